"""Ranks of torch.distributed on this node, forked from one process that has loaded torch.

`python -m spawnsim.real.launch.forked RANKS -m MODULE ARGUMENTS…`, or `RANKS FILE ARGUMENTS…`. Loading torch takes 2 s
per process, a fork a millisecond. If the program sets environment variables, which libraries read when they are loaded,
each rank loads torch itself. Ranks get torchrun's environment variables, and a store that outlives rank 0. The first
rank that fails ends the job with its status; the rank or its monitor has reported the reason.
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
PATIENCE_S = 30.0  # how long ranks may take to save their data after a stop signal, as under torchrun
POLL_S = 0.5


def main(arguments: Sequence[str]) -> int:
    """Run a job and return its status; in a rank, the status of its program."""
    ranks, program = int(arguments[0]), arguments[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listening = socket.create_server((HOST, 0))
    loaded = not _sets_variables(program) and _load()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would hide the ends of ranks
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
    """Return whether a program's text mentions the environment, as in `os.environ["OMP_NUM_THREADS"] = "2"`."""
    file = next((Path(word) for word in program if word.endswith(".py")), None)
    if file is None or not file.is_file():
        return False
    text = file.read_bytes()
    return b"environ" in text or b"putenv" in text


def _load() -> bool:
    """Load the modules that ranks need; return whether ranks may then be forked from this process."""
    # Outside of Linux libraries do not guarantee to work after a fork; with threads they do so nowhere.
    if sys.platform != "linux":
        return False
    for backend in BACKENDS.values():
        for name in backend.preloads:
            importlib.import_module(name)
    # At its end each rank would otherwise traverse all loaded objects and so copy shared memory: 0.5 s per rank.
    gc.collect()
    gc.freeze()
    return len(os.listdir("/proc/self/task")) == 1


def _variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets, for a job on one node."""
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
    """Serve the store in which ranks meet; called after the forks, since the store has a thread."""
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
    if os.getppid() != parent:  # it died before `die_with_parent` took effect
        return 128 + signal.SIGTERM
    if not loaded:
        os.execv(sys.executable, [*python(), *program])
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python reseeds its own generator after a fork, and a fresh import would seed numpy's
    try:
        if program[0] == "-m":
            sys.argv = [program[1], *program[2:]]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            _run_file(program)
    except Exception as error:  # noqa: BLE001  reported as Python reports it
        sys.excepthook(type(error), error, _of_program(error.__traceback__))
        return 1
    return 0


def _run_file(program: Sequence[str]) -> None:
    """Run a file as Python runs a script: `runpy` would leave the wrong `__main__` for a pool's workers."""
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
    """Wait until all ranks have ended; return the status of the first failed rank, or of the stop signal."""
    status, due_s = 0, float("inf")
    while children:
        received = signal.sigtimedwait(AWAITED, POLL_S)
        if received is not None and received.si_signo in STOPPING:
            status = status or 128 + received.si_signo
            due_s = min(due_s, _signal(children, signal.SIGTERM))  # on which all ranks save their data
        for child, rank in [*children.items()]:
            ended, how = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            del children[child]
            code = os.waitstatus_to_exitcode(how)
            if code and not status:
                status = code if code > 0 else _killed(rank, child, -code)
                due_s = min(due_s, _signal(children, signal.SIGTERM))
        if time.monotonic() > due_s:
            _signal(children, signal.SIGKILL)
    return status


def _signal(children: Iterable[int], number: int) -> float:
    """Send ranks a stop signal; return the time by which they must have ended."""
    for child in children:
        os.kill(child, number)  # the child has not been awaited, so its process id is valid
    return time.monotonic() + PATIENCE_S


def _killed(rank: int, process: int, number: int) -> int:
    """Report to the supervisor which rank a signal has killed, as other launchers do; return the status."""
    status = 128 + number
    who = f"process rank {rank} with PID {process} on node {os.uname().nodename}"
    sys.stderr.write(f"launcher noticed that {who} exited on signal {number}\n")
    return status


if __name__ == "__main__":
    LAUNCHER = os.getpid()
    STATUS = main(sys.argv[1:])
    if os.getpid() == LAUNCHER:  # a regular exit would only free memory, and take 0.5 s
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(STATUS)
    sys.exit(STATUS)
