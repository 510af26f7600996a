"""The call in which a stack of py-spy or faulthandler stands, its line, and the rank for which it waits."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from spawnsim.explain.reading import Frame
from spawnsim.waits import is_installed, is_program, line

# py-spy shortens the names of files to those below a folder of sys.path.
LIBRARIES = {"torch", "mpi4py", "numpy", "horovod", "deepspeed", "accelerate", "lightning", "pytorch_lightning",
             "transformers", *sys.stdlib_module_names}  # fmt: skip
COMMUNICATES = re.compile(
    r"(^|/)(mpi4py/|horovod/|torch/(distributed|nn/parallel|autograd)/|torch/_tensor\.py)"
)
WRAPPERS = ("wrapper", "inner", "_fn", "decorate_context")
COLLECTIVE = re.compile(
    r"(all_?)?(reduce|gather)(v|w|_scatter|_scatter_block|_scatter_tensor|_into_tensor|_object|_coalesced)*|scatter(v|_object_list)?"
    r"|bcast|broadcast(_object_list)?|(monitored_)?barrier|all_?to_?all(v|w|_single)?|(ex)?scan|split|dup|create|fence"
    r"|new_group|init_process_group|backward|forward"
)
MESSAGE = re.compile(r"[sbr]?send|m?recv|m?probe|sendrecv(_replace)?|(send|recv)_object_list")
WAITS = ("wait", "waitall", "waitany", "waitsome", "lock", "unlock", "flush", "complete", "synchronize")
PEERS = {"send": ("dest", "dst", "group_dst"), "recv": ("source", "src", "group_src")}


@dataclass(frozen=True)
class Standing:
    """Where a stack stands.

    Attributes:
        call: such as "all_reduce" or "comm.Recv(buf, source=0)".
        name: the function, in lower case.
        line: the program's line.
        peer: the rank whose message it sends or awaits, if known.
        in_group: whether the call is known to concern a group other than all ranks.
    """

    call: str
    name: str
    line: str
    peer: int | None
    in_group: bool

    @property
    def collective(self) -> bool:
        """Whether all ranks take part in the call."""
        return COLLECTIVE.fullmatch(self.name) is not None

    @property
    def waits(self) -> bool:
        """Whether the call can wait for another rank."""
        return self.collective or MESSAGE.fullmatch(self.name) is not None or self.name in WAITS


@cache
def own_file(file: str) -> bool:
    """Whether a file of a dump belongs to a program, on this machine or another."""
    first = file.partition("/")[0].removesuffix(".py")
    if not is_program(file) or re.search(r"/lib/python3\.\d+/|\.so[.\d]*$", file) or first in LIBRARIES:
        return False
    if not first.isidentifier() or first == "__main__":
        return True
    spec = importlib.util.find_spec(first)  # a package that is installed here, too
    return spec is None or not is_installed(spec.origin or "")


def standing(stack: Sequence[Frame]) -> Standing:
    """Return where a stack stands; its innermost frame comes first."""
    at = next((at for at, frame in enumerate(stack) if frame.line and own_file(frame.file)), len(stack))
    inner, own = list(stack[:at]), next(iter(stack[at:]), None)
    place = line([(frame.file, frame.line) for frame in stack if frame.line], own_file) or "?"
    called = [each for each in inner if COMMUNICATES.search(each.file) and _name(each) not in WRAPPERS]
    source = _source_call(own) if own is not None else None
    if called:
        call, values = _name(called[-1]), called[-1].values
        peer = _number(values, *PEERS.get("send" if "send" in call.lower() else "recv", ()))
        text = call if source is None or _called(source) != call else _text(source)
        group = values.get("group", "None")
        peer = peer if peer is not None or source is None else _peer(source, own)
        return Standing(text, call.lower(), place, peer, group not in ("None", "<GroupMember.WORLD>"))
    if source is not None:
        return Standing(_text(source), _called(source).lower(), place, _peer(source, own), in_group=False)
    name = _name(inner[-1]) if inner else own.name if own is not None else "?"
    return Standing(name, name.lower(), place, None, in_group=False)


def _name(frame: Frame) -> str:
    return frame.name.rpartition(".")[2]


def _number(values: dict[str, str], *names: str) -> int | None:
    return next((int(values[name]) for name in names if values.get(name, "").isdecimal()), None)


@cache
def _calls(file: str) -> list[ast.Call]:
    """Return the calls in a program's text, if it is here: without --native, py-spy shows no function of mpi4py."""
    for path in (Path(file), Path(file).name):
        try:
            tree = ast.parse(Path(path).read_bytes())
        except (OSError, ValueError, SyntaxError):
            continue
        return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return []


def _source_call(frame: Frame) -> ast.Call | None:
    """Return the communicating call at a frame's line, if there is just one."""
    found = [call for call in _calls(frame.file) if call.lineno <= frame.line <= (call.end_lineno or 0)]
    named = [call for call in found if _communicates(_called(call))]
    return named[0] if len(named) == 1 else None


def _communicates(called: str) -> bool:
    name = called.lower()
    if name in ("split", "dup", "create", "scan", "fence", "lock", "unlock"):  # str.split is not MPI's
        return called[0].isupper()
    return bool(COLLECTIVE.fullmatch(name) or MESSAGE.fullmatch(name) or name in WAITS)


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _text(call: ast.Call) -> str:
    text = ast.unparse(call)
    return text if len(text) <= 70 else f"{text[:67]}..."


def _peer(call: ast.Call, frame: Frame | None) -> int | None:
    """Return the rank that a call names: a number, or a variable of the frame."""
    kind = "send" if "send" in _called(call).lower() else "recv"
    if MESSAGE.fullmatch(_called(call).lower()) is None:
        return None
    for value in _given(call, PEERS[kind]):
        if isinstance(value, ast.Constant) and type(value.value) is int:
            return value.value
        if isinstance(value, ast.Name) and frame is not None:
            return _number(frame.values, value.id)
    return None


def _given(call: ast.Call, names: Sequence[str]) -> Iterator[ast.expr]:
    yield from (each.value for each in call.keywords if each.arg in names)
    yield from call.args[1:2]
