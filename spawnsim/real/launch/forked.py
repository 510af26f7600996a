"""Ranks of torch.distributed on this node, forked from one process that has loaded torch.

`python -m spawnsim.real.launch.forked RANKS -m MODULE ARGUMENTS…`, or `RANKS FILE ARGUMENTS…`. To load torch takes each
process 2 s, and a fork a millisecond. Where that could make a difference ranks load by themselves: if the program sets
variables of the environment, which libraries read as they are loaded. Ranks find what torchrun tells them, and a store
that outlives rank 0. The first that fails ends the job with its status: it has said why, or its monitor has.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import time
import types
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path

from spawnsim.backends import BACKENDS
from spawnsim.real.launch.processes import dying_with_parent, python

HOST = "127.0.0.1"
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
AWAITED = (*STOPPING, signal.SIGCHLD)
PATIENCE_S = 30.0  # how long ranks that are told to stop may take to save what they have, as under torchrun
LOOK_S = 0.5


def main(arguments: Sequence[str]) -> int:
    """Run a job and return its status; in a rank, the status of its program."""
    ranks, program = int(arguments[0]), arguments[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listening = socket.create_server((HOST, 0))
    loaded = not _sets_variables(program) and _load()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by who started this, ranks would end unseen
    former = signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    parent, children = os.getpid(), dict[int, int]()
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.environ.update(_variables(rank, ranks, listening.getsockname()[1]))
            listening.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            return _be_a_rank(program, parent, loaded=loaded)
        children[child] = rank
    store = _serve(listening, ranks)
    status = _wait(children)
    del store
    return status


def _sets_variables(program: Sequence[str]) -> bool:
    """Return whether a program's text speaks of the environment, as in `os.environ["OMP_NUM_THREADS"] = "2"`."""
    file = next((Path(word) for word in program if word.endswith(".py")), None)
    if file is None or not file.is_file():
        return False
    text = file.read_bytes()
    return b"environ" in text or b"putenv" in text


def _load() -> bool:
    """Load what ranks need; return whether they may be forked from what this process is then."""
    # Elsewhere than on Linux libraries do not promise to live on in a fork; nor do they with threads anywhere.
    if sys.platform != "linux":
        return False
    for backend in BACKENDS.values():
        for name in backend.preloads:
            importlib.import_module(name)
    # At its end each rank would look at all that was loaded, and so copy the memory that it shares: 0.5 s of each.
    gc.collect()
    gc.freeze()
    return len(os.listdir("/proc/self/task")) == 1


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what torchrun sets, for a job of one node."""
    numbers = {
        "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0,
        "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "ROLE_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": HOST, "MASTER_PORT": port, "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_RUN_ID": os.getppid(),
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    nccl = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")}
    return nccl | {name: str(value) for name, value in numbers.items()}


def _serve(listening: socket.socket, ranks: int) -> object:
    """Serve the store in which ranks meet. After the forks, since it has a thread."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listening.getsockname()[1]
    return TCPStore(
        HOST, port, ranks, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


def _be_a_rank(program: Sequence[str], parent: int, *, loaded: bool) -> int:
    """Run the program as Python does; return its status."""
    die_with_parent = dying_with_parent(signal.SIGTERM)
    if die_with_parent is not None:
        die_with_parent()
    if os.getppid() != parent:  # it died before that was in force
        return 128 + signal.SIGTERM
    if not loaded:
        os.execv(sys.executable, [*python(), *program])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as Python's own generator does by itself, and as it is where a process loads it
    try:
        if program[0] == "-m":
            sys.argv = [program[1], *program[2:]]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(program)
    except Exception as error:  # noqa: BLE001  told as Python tells it
        sys.excepthook(type(error), error, _of_program(error.__traceback__))
        return 1
    return 0


def _run_file(program: Sequence[str]) -> None:
    """Run a file as Python runs a script: `runpy` would leave another module as that of a pool's workers."""
    file = os.path.abspath(program[0])
    sys.argv = [*program]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(file)
    loader, module = SourceFileLoader("__main__", file), types.ModuleType("__main__")
    vars(module).update(__file__=file, __loader__=loader, __builtins__=builtins)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(loader.source_to_code(loader.get_data(file), file), vars(module))


def _of_program(trace: types.TracebackType | None) -> types.TracebackType | None:
    runner = getattr(find_spec("runpy"), "origin", None)
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runner, "<frozen runpy>"):
        trace = trace.tb_next
    return trace


def _wait(children: dict[int, int]) -> int:
    """Wait until all ranks have ended; return the status of the first that failed, or of the signal to stop."""
    status, due_s = 0, float("inf")
    while children:
        told = signal.sigtimedwait(AWAITED, LOOK_S)
        if told is not None and told.si_signo in STOPPING:
            status = status or 128 + told.si_signo
            due_s = min(due_s, _tell(children, signal.SIGTERM))  # by which all save what they have
        for child, rank in [*children.items()]:
            ended, how = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            del children[child]
            code = os.waitstatus_to_exitcode(how)
            if code and not status:
                status = code if code > 0 else _killed(rank, child, -code)
                due_s = min(due_s, _tell(children, signal.SIGTERM))
        if time.monotonic() > due_s:
            _tell(children, signal.SIGKILL)
    return status


def _tell(children: Iterable[int], number: int) -> float:
    """Send ranks a signal to stop; return until when they may take to do so."""
    for child in children:
        os.kill(child, number)  # none has been waited for: it is there
    return time.monotonic() + PATIENCE_S


def _killed(rank: int, process: int, number: int) -> int:
    """Say which rank a signal has killed, for the supervisor, as other launchers do; return the status."""
    status = 128 + number
    who = f"process rank {rank} with PID {process} on node {os.uname().nodename}"
    sys.stderr.write(f"launcher noticed that {who} exited on signal {number}\n")
    return status


if __name__ == "__main__":
    LAUNCHER = os.getpid()
    STATUS = main(sys.argv[1:])
    if os.getpid() == LAUNCHER:  # it has nothing left to do, and to take down what it has loaded takes 0.5 s
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STATUS)
    sys.exit(STATUS)
