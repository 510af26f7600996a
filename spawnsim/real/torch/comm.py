"""`Comm` over torch.distributed, for systems without MPI: gloo on CPUs, NCCL together with gloo on GPUs.

It runs under torchrun, mpiexec or srun, or as one process. Collectives are torch's; messages and windows come from
`real.base` and use one wire per rank. Unsupported calls raise `UnsupportedError`, which names the alternative.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import re
import socket
import sys
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from spawnsim.comm.protocols import Capabilities
from spawnsim.errors import ParameterError, Timeout, UnsupportedError, UsageError, WorldError
from spawnsim.real.base import namespace
from spawnsim.real.launch.launchers import LaunchContext, detect_launcher, gpu_of_rank
from spawnsim.real.runtime.abort import refuse_recovery
from spawnsim.real.runtime.rank import close, guarded
from spawnsim.real.runtime.services import Options, RankServices, Recorder
from spawnsim.real.torch.collectives import NativeCollectives
from spawnsim.real.torch.runtime import FOREVER, TorchRuntime, backend_of, can_use_nccl, gpu_report

__all__ = ["Options", "TorchComm", "close", "guarded", "namespace", "world", "wrap"]

SURVIVAL = "to survive a rank's death use torchrun --max-restarts, or --backend mpi --survive"


class TorchComm(NativeCollectives):
    """A communicator of real ranks, created by `world()`, `wrap()`, and its methods `Split`, `Dup`, …."""

    def __init__(self, runtime: TorchRuntime, members: tuple[int, ...], label: str) -> None:
        super().__init__(runtime, members, label)
        own_gloo = backend_of(runtime.group, "cpu") if label == "world" else None
        self._gloo = own_gloo if own_gloo and own_gloo.name() == "gloo" else runtime.gloo(label, members)
        self._nccl, self._process_group = None, cast("Any", None)
        self._active = runtime.watchdog.active

    def capabilities(self) -> Capabilities:
        """Return the capabilities of this communicator in this environment."""
        return Capabilities(
            backend="torch",
            library=f"torch {torch.__version__}, {dist.get_backend(self.runtime.group)}",
            survives=False,
            ulfm=False,
            progress="async",  # a thread of each rank serves windows
            threads="multiple",
            devices=("cpu", "cuda"),
            missing=(*filter(None, [self.runtime.lacks]), SURVIVAL),
            sums="gloo",
        )

    def recover(self, step: int | None = None) -> Any:
        refuse_recovery(f"recover: not available over torch.distributed; {SURVIVAL}")

    def as_process_group(self) -> Any:
        """Return torch's process group of these ranks; `wrap` maps it to this object. Collective on the first call."""
        self._live()
        if self._process_group is None:
            self._process_group = make_group(self)
            _WRAPPED[self._process_group] = self
        return self._process_group

    def Free(self) -> None:
        super().Free()
        self._nccl = None
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)


def make_group(comm: TorchComm) -> Any:
    """Return a torch process group of a communicator's ranks, in its order. Collective among them.

    `torch.distributed.new_group` numbers groups by calls, so all ranks of the job must call it in the same order. Here
    only the members take part, and the communicator's name identifies the group.
    """
    runtime = comm.runtime
    if comm.label == "world":
        return runtime.group
    default: Any = dist.group.WORLD
    ranks = [dist.get_global_rank(runtime.group, member) for member in comm.members]
    name: Any = f"{runtime.run_name}/{comm.label}"
    kind, store = c10d._world.pg_map[default]
    group, _ = c10d._new_process_group_helper(
        comm.size, comm.rank, ranks, dist.Backend(kind), store, name, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


# -------------------------------------------------------------------------------------------------------- entering
def world(
    *,
    recorder: Recorder | None = None,
    seed: int = 0,
    deadline_s: float = 30.0,
    options: Options | None = None,
    backend: str = "",
) -> TorchComm:
    """Return the communicator of all ranks of this job. Collective; the clock starts when all ranks have joined.

    Args:
        recorder: stores the recorded values of ranks; None: nothing is stored.
        seed: the seed of the random streams of all ranks.
        deadline_s: limit of a blocking call in seconds, unless `comm.clock.deadline` sets another.
        options: options of the run; the same on all ranks.
        backend: torch's name for the backend of its default group, if that group does not exist yet; "" is gloo,
            together with NCCL if all ranks have GPUs.

    Raises:
        UnsupportedError: this torch build lacks the backend.
        Timeout: a rank did not join.
        WorldError: the address where ranks meet does not exist, or its port is taken.
        ParameterError: `deadline_s` is not above 0, or an address is missing in a job on several nodes.
    """
    entered = not dist.is_initialized()
    if entered:
        join(detect_launcher(), backend)
    services = RankServices(dist.get_rank(), recorder=recorder, seed=seed, deadline_s=deadline_s)
    comm = _enter(dist.group.WORLD, services, options or Options.given())
    comm.runtime.leaves_torch = entered
    # `wrap` of this group during the run returns this communicator, with the run's seed, recorder and deadline.
    _WRAPPED[comm.runtime.group] = comm
    if entered:
        atexit.register(_finalize, comm.runtime)
    return comm


def _finalize(runtime: TorchRuntime) -> None:
    """End together with the other ranks in a program without `guarded`; a program that has raised does not wait.

    A process that exits while the wire's thread receives may end in C++'s `terminate`.
    """
    if not hasattr(sys, "last_value"):
        runtime.finalize()


def _enter(group: Any, services: RankServices, options: Options) -> TorchComm:
    runtime = TorchRuntime(group, services, options)
    runtime.begin()
    comm = TorchComm(runtime, tuple(range(group.size())), "world")
    runtime.has_nccl, runtime.lacks = can_use_nccl(comm.allgather(gpu_report(group)))
    if runtime.lacks and comm.rank == 0:
        warnings.warn(runtime.lacks, RuntimeWarning, stacklevel=3)
    comm.Barrier()
    services.clock.start()
    return comm


# A process group accepts no attributes, so this mapping holds its communicator for as long as the group lives.
_WRAPPED: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchComm] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> TorchComm:
    """Return the communicator of a torch.distributed group, always the same one. Collective on the first call.

    Args:
        group: a process group that contains this rank.

    Raises:
        UsageError: `group` is not such a process group.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"{group!r}: pass a torch.distributed process group that this rank is in")
    known = _WRAPPED.get(group)
    if known is None or known.runtime.abort.program_ended:
        services = RankServices(group.rank(), recorder=None, seed=0, deadline_s=30.0)
        known = _WRAPPED[group] = _enter(group, services, Options())
    return known


# ------------------------------------------------------------------------------- entering torch.distributed
MEET_S = 300.0  # torch's own limit: at the start of a job, nodes read Python and torch from a shared disk
PORTS = range(20000, 32000)  # below the ports that systems use for outgoing connections
USUAL_PORT = 29500  # torch's default, for jobs without a name
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Numbers this process's entries into torch.distributed, so that leftover keys of one do not affect the next.
_ENTRIES = itertools.count()
PACKAGES = {"ccl": "oneccl_bindings_for_pytorch"}
PROXIES = ("hydra", "mpiexec", "mpirun", "prte", "orted")


def join(here: LaunchContext, backend: str = "") -> None:
    """Initialize torch.distributed in the way that the launcher requires. Collective.

    `backend` is torch's name of a backend; "" is gloo, together with NCCL if all ranks have GPUs. A backend that this
    build lacks raises `UnsupportedError`. If a rank does not join within `MEET_S`, `Timeout` names it. An address that
    does not exist or a port that is taken raises `WorldError`. A process may enter again after it has left.
    """
    _require(backend)
    store = PrefixStore(f"spawnsim/{next(_ENTRIES)}", _store(here))
    gpus = _exchanged(here, store, _take_gpu())
    backend = backend or ("cpu:gloo,cuda:nccl" if all(gpus) else "gloo")
    dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.size, timeout=FOREVER)
    store.set_timeout(FOREVER)


def _require(backend: str) -> None:
    """Refuse a backend that is not available. Some backends have their own package, which must be imported first."""
    with suppress(ImportError):
        if backend in PACKAGES:
            import_module(PACKAGES[backend])
    if backend and not _is_here(backend):
        have = ", ".join(filter(_is_here, ("gloo", "mpi", "nccl", "ucc", "xccl")))
        package = f" (it comes with {PACKAGES[backend]})" if backend in PACKAGES else ""
        raise UnsupportedError(
            f"torch {torch.__version__} has no backend {backend!r} here{package}, but {have}: use one of these, or "
            "install a torch that provides it"
        )


def _is_here(backend: str) -> bool:
    """Return whether a backend is usable; NCCL in a CUDA build is not usable without a GPU."""
    return dist.is_backend_available(backend) and (backend != "nccl" or torch.cuda.is_available())


def _store(here: LaunchContext) -> Store:
    if here.launcher == "torchrun":
        return _torchruns()
    if here.size == 1:
        return HashStore()
    point = meeting_point(here)
    _require_host(here, point)
    served = _served(here, point)
    return PrefixStore(point.job, served)  # another job that took the same port would not mix with this one


@cache
def _torchruns() -> Store:
    store: Store = next(rendezvous("env://", timeout=timedelta(seconds=MEET_S)))[0]
    return store


@cache
def _served(here: LaunchContext, point: MeetingPoint) -> Store:
    """Return the store that rank 0 serves until its process ends."""
    try:
        return TCPStore(
            point.host, point.port, is_master=here.rank == 0, wait_for_workers=False,
            timeout=timedelta(seconds=MEET_S),
        )  # fmt: skip
    except dist.DistError as error:
        verb = "listen at" if here.rank == 0 else "reach rank 0 at"
        raise WorldError(
            f"rank {here.rank} of {here.size} cannot {verb} {point.host}:{point.port} ({_first_line(error)}): set "
            "MASTER_ADDR to rank 0's host and MASTER_PORT to a free port"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _require_host(here: LaunchContext, point: MeetingPoint) -> None:
    try:
        socket.getaddrinfo(point.host, point.port)
    except OSError as error:  # torch would retry until its timeout
        raise WorldError(
            f"rank {here.rank} of {here.size} cannot resolve {point.host}, where rank 0 should be ({error}): set "
            "MASTER_ADDR to an address of rank 0's host"
        ) from error


# ------------------------------------------------------------------------------------------------------- GPUs
def _take_gpu() -> str:
    """Make this rank's GPU the current one and return its number; "" without a GPU or NCCL."""
    index = gpu_of_rank(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if index is None or not dist.is_nccl_available():
        return ""
    torch.cuda.set_device(index)
    return str(index)


def _exchanged(here: LaunchContext, store: Store, text: str) -> list[bytes]:
    """Return every rank's text, in rank order."""
    keys = [f"gpu/{rank}" for rank in range(here.size)]
    store.set(keys[here.rank], text)
    try:
        store.wait(keys, timedelta(seconds=MEET_S))
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise Timeout(
            missing,
            "join",
            message=f"rank {here.rank} of {here.size} waited {MEET_S:g} s for rank {', '.join(map(str, missing))} to "
            "start: see what the launcher says about them",
        ) from error
    return [store.get(key) for key in keys]


# -------------------------------------------------------------------------------------------------- where to meet
@dataclass(frozen=True)
class MeetingPoint:
    """The address where rank 0 listens; `job` identifies the job and is the same on all its ranks."""

    host: str
    port: int
    job: str


def meeting_point(here: LaunchContext, environ: Mapping[str, str] | None = None) -> MeetingPoint:
    """Return the meeting point of ranks that mpiexec or srun started; MASTER_ADDR and MASTER_PORT override it.

    Ranks on several nodes meet on the first node of Slurm's list; without a list MASTER_ADDR must be set.
    """
    seen = os.environ if environ is None else environ
    if here.launcher == "srun":
        job, nodes = f"{seen.get('SLURM_JOB_ID')}.{seen.get('SLURM_STEP_ID')}", "SLURM_STEP_NODELIST"
        alone = seen.get("SLURM_STEP_NUM_NODES", "1") == "1"
    else:
        local = next((seen[name] for name in LOCAL_SIZES if name in seen), str(here.size))
        alone, nodes = local == str(here.size), "SLURM_JOB_NODELIST"
        # On one node the launcher's process identifies the job; its variables would also be inherited by a job that one
        # of its ranks starts.
        job = _launcher_pid() if alone else seen.get("PMIX_NAMESPACE") or seen.get("PMI_JOBID") or ""
    host = seen.get("MASTER_ADDR") or ("127.0.0.1" if alone else first_host(seen.get(nodes, "")))
    if not host:
        raise ParameterError(
            f"{here.launcher} started {here.size} ranks on several nodes: set MASTER_ADDR to rank 0's host, and "
            "MASTER_PORT to a free port of it"
        )
    port = seen.get("MASTER_PORT") or str(_port(job))
    return MeetingPoint(host, int(port), job)


def _port(job: str) -> int:
    if not job:
        return USUAL_PORT
    number = int.from_bytes(hashlib.blake2b(job.encode(), digest_size=4).digest(), "little")
    return PORTS[number % len(PORTS)]


def first_host(nodes: str) -> str:
    """Return the first name of a Slurm list of nodes: "n[08-11,20],login" starts with n08."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _launcher_pid() -> str:
    """Return the process id of the mpiexec (or proxy) above this process; each rank may be the child of a shell."""
    known = os.getppid()
    pid = known
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError:  # not Linux, or not ours to read
            break
        if name.startswith(PROXIES):
            return str(pid)
        pid = int(rest.split()[1])
    return str(known)
