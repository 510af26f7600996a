"""`spawnsim list`, `new`, `completion` and `doctor`: available names, initial files, and the abilities of this
machine.

Each loads only the parts in question. This module also resolves the name of a study, or of a program of studies, to
its file.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import keyword
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spawnsim
from spawnsim.cli import COMMANDS, command_of
from spawnsim.cli.declaring import Command, Json, Parser, argument, parser_of
from spawnsim.errors import ParameterError, SpawnsimError, UnsupportedError
from spawnsim.options import nearest
from spawnsim.units import text_table

if TYPE_CHECKING:
    from spawnsim.real.launch.doctor import Finding

Line = tuple[str, str]


def find(name: str, defines: str = "study") -> Path:
    """Return the path of a study, given the path or a name in one of `folders()`."""
    candidates = [Path(name), *(folder / f"{name}.py" for folder in folders())]
    for path in candidates:
        if path.suffix == ".py" and path.is_file():
            return path
    known = names(defines)
    what, whose = ("study", "studies") if defines == "study" else ("file", "programs of studies")
    hint = nearest(name, known) or f"{whose} here: {', '.join(known) or 'none'}"
    raise ParameterError(f"no {what} {name!r}; {hint}")


def program_file(given: Path) -> Path:
    """Return a program's path: the given one, or the path of a study program that is given by name."""
    is_name = not given.suffix and len(given.parts) == 1 and not given.exists()
    return find(str(given), "main") if is_name else given


def names(defines: str = "study") -> list[str]:
    """Return the names of the files in `folders()` that define a function."""
    files = {path.stem: path for folder in folders() for path in folder.glob("*.py")}
    # By their text: importing all of them would load torch.
    return sorted(
        stem for stem, path in files.items() if f"def {defines}(" in path.read_text(encoding="utf-8")
    )


def folders() -> list[Path]:
    """Return the folders of studies: `studies/` here, and the bundled ones, in a checkout or installed."""
    package = Path(spawnsim.__file__).parent
    return [
        each for each in (Path("studies"), package.parent / "studies", package / "studies") if each.is_dir()
    ]


def platforms() -> Iterator[Line]:
    """Yield the bundled platform files."""
    from spawnsim.models.platform import list_platforms

    for platform in list_platforms():
        yield platform.name, platform.description


def stragglers() -> Iterator[Line]:
    """Yield the forms that `--straggler` takes."""
    from spawnsim.models.compute.model import FORMS

    for form, model, _ in FORMS:
        yield form, _summary(model)


def faults() -> Iterator[Line]:
    """Yield the forms that `--faults` takes, joined by ";"."""
    from spawnsim.models.faults import KINDS
    from spawnsim.models.faults.failures import Failures
    from spawnsim.models.faults.plan import MTBF, MTBF_FORM, REQUEUE, form

    for kind in KINDS.values():
        yield form(kind), _summary(kind)
    yield MTBF_FORM, _summary(Failures)
    yield (
        MTBF_FORM.replace(MTBF, REQUEUE, 1),
        "The same; each failure ends the job, which restarts from its beginning.",
    )


def policies() -> Iterator[Line]:
    """Yield the policies, each with its paper."""
    module = import_module("spawnsim.policies")
    for name, summary in _classes(
        "spawnsim.policies", lambda name: name.endswith("Policy") and name != "SpawnPolicy"
    ):
        paper = getattr(module, name).paper
        yield name, f"{summary} [{paper}]" if paper else summary


def workloads() -> Iterator[Line]:
    """Yield the workloads on which ranks can train."""
    yield from _classes("spawnsim.workloads", lambda _name: True)


def _classes(package: str, chosen: Callable[[str], bool]) -> Iterator[Line]:
    module = import_module(package)
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.isclass(thing) and chosen(name):
            yield name, _summary(thing)


def _summary(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def studies() -> Iterator[Line]:
    """Yield the programs and studies of `studies/` by the names that commands take, with the first line of each."""
    found: dict[str, Path] = {}
    for folder in folders():
        found = {path.stem: path for path in folder.glob("*.py")} | found
    for _, path in sorted(found.items()):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield path.stem, text.partition("\n")[0]


SECTIONS: dict[str, Callable[[], Iterator[Line]]] = {
    "platforms": platforms,
    "stragglers": stragglers,
    "faults": faults,
    "policies": policies,
    "workloads": workloads,
    "studies": studies,
}


@dataclass(kw_only=True)
class List(Command):
    """List the names that other commands take."""

    examples = ("spawnsim list", "spawnsim list platforms stragglers")
    what: Sequence[str] = argument(
        f"among {', '.join(SECTIONS)}; default: all", "WHAT", names=SECTIONS, default=()
    )

    def __call__(self) -> int:
        unknown = [name for name in self.what if name not in SECTIONS]
        if unknown:
            parser_of(List).error(f"{unknown[0]}: choose among {', '.join(SECTIONS)}")
        for name in self.what or SECTIONS:
            print(f"{name}:")
            print(text_table((), list(SECTIONS[name]()), left=2, indent="  ") or "  none here")
        return 0


# ---------------------------------------------------------------------------------------------------------- new
KINDS = {
    "study": "a question, a grid of runs, a figure",
    "policy": "a subclass of SpawnPolicy, and a program that tries it",
    "workload": "data, model, step and accuracy, and a program that trains it",
    "program": "a training loop for virtual and for real ranks",
    "torchrun": "a script for torchrun, with DistributedDataParallel",
}


@dataclass(kw_only=True)
class New(Command):
    """Write a commented file to begin with, which runs at once."""

    examples = ("spawnsim new study stragglers", "spawnsim new policy my_policy")
    kind: str = argument("; ".join(f"{kind}: {what}" for kind, what in KINDS.items()), choices=KINDS)
    name: str = argument("of the file, with or without .py and a folder", "NAME")

    def __call__(self) -> int:
        from spawnsim.record.sorting import storing

        path = _place(self.name)
        if path.exists():
            raise ParameterError(f"{path} exists and is not overwritten: choose another name")
        if not path.parent.is_dir():
            raise ParameterError(f"{path}: the folder {path.parent} does not exist")
        template = Path(__file__).parent / "templates" / f"{self.kind}.py.txt"
        name = "".join(word[:1].upper() + word[1:] for word in path.stem.split("_")) or "Mine"
        name += "Policy" * (self.kind == "policy" and not name.endswith("Policy"))
        text = template.read_text(encoding="utf-8").replace("__NAME__", path.stem).replace("__CLASS__", name)
        with storing(path):
            path.write_text(text, encoding="utf-8")
        is_study = self.kind == "study"
        use = f"spawnsim study {path} --quick" if is_study else f"spawnsim run {path} --ranks 12"
        sys.stdout.write(f"written: {path}; run it: {use}\n")
        return 0


def _place(name: str) -> Path:
    """Return the path for a name; raise `ParameterError` if no module can have the name."""
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise ParameterError(f"{name!r}: give a name that Python can import, of letters, digits and _")
    # A program's folder comes first on the module path.
    if path.stem in {*sys.stdlib_module_names, "mpi4py", "numpy", "spawnsim", "torch"}:
        raise ParameterError(
            f"{path} would hide the module {path.stem} from programs next to it: choose another name"
        )
    return path


# --------------------------------------------------------------------------------------------------- completion
SHELLS = {
    "bash": "~/.local/share/bash-completion/completions/spawnsim",
    "zsh": "_spawnsim in a folder of $fpath",
    "fish": "~/.config/fish/completions/spawnsim.fish",
}


@dataclass(kw_only=True)
class Completion(Command):
    """Print a script that completes spawnsim's commands, options and names. It is static: a Tab starts no Python, and
    it knows the names of the day on which it was made.
    """

    examples = (f"spawnsim completion bash > {SHELLS['bash']}",)
    shell: str = argument(
        "which shell; write its script to "
        + "; ".join(f"{shell}: {place}" for shell, place in SHELLS.items()),
        choices=SHELLS,
    )

    def __call__(self) -> int:
        try:
            import shtab
        except ImportError as error:
            raise UnsupportedError("completion needs shtab: pip install 'spawnsim[completion]'") from error
        whole = argparse.ArgumentParser(prog="spawnsim", description="Simulate and run distributed training.")
        commands = whole.add_subparsers(dest="command")
        for name, (_, text) in COMMANDS.items():
            own = parser_of(command_of(name))
            if name == "resume":  # it passes options of `run` on
                _add_options_of_run(own)
            for action in own._actions:
                _complete(action, shtab)
            commands.add_parser(name, help=text, parents=[own], add_help=False)
        made: str = shtab.complete(whole, self.shell)
        if self.shell == "bash":
            # shtab's own text names a folder that bash does not search by itself.
            made = re.sub(
                r"\A(# AUTO.*\n)(#.*\n)+",
                rf"\1# Write it to {SHELLS['bash']}: bash reads it from there.\n",
                made,
            )
            # A word that is not a known name may be a path.
            made = made.replace(" -F _shtab_spawnsim spawnsim", " -o default -F _shtab_spawnsim spawnsim")
        sys.stdout.write(made)
        return 0


def _add_options_of_run(resume: Parser) -> None:
    taken = {*resume._option_string_actions, "--resume", "--out", "--overwrite"}
    for action in parser_of(command_of("run"))._actions:
        if action.option_strings and not taken.intersection(action.option_strings):
            resume._add_action(action)


def _complete(action: Any, shtab: Any) -> None:
    """Declare the values of an argument: known names, files or folders."""
    words = str(action.metavar).split("|")
    if action.choices is not None:
        action.choices = list(action.choices)
    elif names := getattr(action, "names", ()):
        action.choices = list(names() if callable(names) else names)
    elif {"FILE", "PATH"}.intersection(words):
        action.complete = shtab.FILE
    elif {"DIR", "RUN"}.intersection(words):
        action.complete = shtab.DIRECTORY


# ------------------------------------------------------------------------------------------------------- doctor
@dataclass(kw_only=True)
class Doctor(Command):
    """Report what this machine can run, and what to change; the status is 1 if something is lacking."""

    examples = ("spawnsim doctor", "spawnsim doctor --json")
    json: Json = False

    def __call__(self) -> int:
        from spawnsim.real.launch.doctor import examine
        from spawnsim.real.launch.launchers import detect_launcher

        try:
            if detect_launcher().rank > 0:  # a launcher has started several ranks: the first one prints
                return 0
        except SpawnsimError:
            pass  # it is a finding
        findings = examine()
        if self.json:
            print(json.dumps([asdict(finding) for finding in findings], indent=1))
        else:
            print("\n".join(line for finding in findings for line in _lines(finding)))
        return int(any(finding.state == "lacking" for finding in findings))


def _lines(finding: Finding) -> list[str]:
    mark = {"good": "ok", "note": "--", "lacking": "!!"}[finding.state]
    text = [f"{mark} {finding.topic:20} {finding.found}"]
    return [*text, *([f"   {'':20} → {finding.advice}"] if finding.advice else [])]
