"""`Comm` over torch.distributed: gloo on CPU, NCCL on GPUs with gloo beside it, for where there is no MPI.

Under torchrun, mpiexec, srun, or as one process. Collectives are torch's; messages and windows travel over one wire
per rank (see `real.torch`). What is not offered raises `UnsupportedError` and names the alternative.
"""

from __future__ import annotations

import atexit
import hashlib
import socket
import sys
import warnings
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from spawnsim.comm.constants import COMM_TYPE_SHARED, CONGRUENT, IDENT, SIMILAR, UNDEFINED, UNEQUAL
from spawnsim.comm.failures import ERR_COMM, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.protocols import Capabilities
from spawnsim.errors import UnsupportedError, UsageError
from spawnsim.real.launch.launchers import detect_launcher
from spawnsim.real.runtime.abort import refuse_recovery
from spawnsim.real.runtime.checkpoints import checkpoint, restore
from spawnsim.real.runtime.namespace import namespace as names
from spawnsim.real.runtime.rank import close, guarded
from spawnsim.real.runtime.services import Options, RankServices, Recorder
from spawnsim.real.torch.collectives import NativeCollectives
from spawnsim.real.torch.point_to_point import PointToPoint
from spawnsim.real.torch.process_groups import join, make_group
from spawnsim.real.torch.runtime import TorchRuntime, backend_of, can_use_nccl, gpu_report, missing_call
from spawnsim.real.torch.windows import Windows

__all__ = ["Options", "TorchComm", "close", "guarded", "namespace", "world", "wrap"]


INSTEAD = {
    "Send_init": "Isend", "Recv_init": "Irecv", "Ssend_init": "Issend", "Bcast_init": "Ibcast",
    "Psend_init": "Isend", "Precv_init": "Irecv", "Attach_buffer": "bsend, which has its own", "Spawn": "torchrun",
    "Create_cart": "Split and rank arithmetic", "Create_graph": "Split", "Create_dist_graph": "Split",
    "Create_intercomm": "Split of one communicator",
}  # fmt: skip
SURVIVAL = "to survive a rank's death use torchrun --max-restarts, or --backend mpi --survive"


def namespace(comm: Any) -> SimpleNamespace:
    """Return `MPI` for programs on `comm`: mpi4py's names for spawnsim's numbers and classes.

    Args:
        comm: what the program takes for `MPI.COMM_WORLD`.
    """
    found = names(comm)
    return TorchNamespace(**vars(found))


class TorchNamespace(SimpleNamespace):
    """A namespace in which a missing name is an error that says what to use instead."""

    def __getattr__(self, name: str) -> Any:
        raise missing_call(f"MPI.{name}")


class TorchComm(PointToPoint, NativeCollectives):
    """A communicator of real ranks. Made by `world()`, by its own `Split`, `Dup`, …, and by `wrap()`."""

    def __init__(self, runtime: TorchRuntime, members: tuple[int, ...], label: str) -> None:
        # the label is the same on all ranks, so they agree on the context without a message; even numbers are the
        # program's, the odd ones beside them the communicator's own exchanges'
        number = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=7).digest(), "little") & ~1
        super().__init__(runtime, members, label, number)
        self._inner = PointToPoint(runtime, members, label, number ^ 1)
        self._made = Counter[str]()
        own_gloo = backend_of(runtime.group, "cpu") if label == "world" else None
        self._gloo = own_gloo if own_gloo and own_gloo.name() == "gloo" else runtime.gloo(label, members)
        self._nccl, self._process_group = None, cast("Any", None)
        self._named = "MPI_COMM_WORLD" if label == "world" else label
        self._active = runtime.watchdog.active
        self.Win = Windows(self)

    # ------------------------------------------------------------------------------------------------ checkpoints
    checkpoint, restore = checkpoint, restore

    # ----------------------------------------------------------------------------------------------- recovery
    def capabilities(self) -> Capabilities:
        """Return what this communicator can do here."""
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
        """Refuse: a group of torch is of no use after a death."""
        refuse_recovery(f"recover: not over torch.distributed; {SURVIVAL}")

    # -------------------------------------------------------------------------------------- about the communicator
    def Get_rank(self) -> int:
        self._live()
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Group:
        """Return the group: its members are ranks of the world."""
        return Group.of(self.members, self.runtime.wire.rank)

    group = property(Get_group)

    def Get_name(self) -> str:
        """Return the communicator's name."""
        return self._named

    def Set_name(self, name: str) -> None:
        """Give the communicator a name."""
        self._named = name

    def Is_inter(self) -> bool:
        """Return False: there are no intercommunicators here."""
        return False

    def Compare(self, other: TorchComm) -> int:
        """Return how two communicators relate."""
        if self is other:
            return IDENT
        if self.members == other.members:
            return CONGRUENT
        return SIMILAR if set(self.members) == set(other.members) else UNEQUAL

    @property
    def name(self) -> str:
        """The communicator's name."""
        return self._named

    @name.setter
    def name(self, value: str) -> None:
        self._named = value

    # ------------------------------------------------------------------------------------------- making others
    def Split(self, color: int = 0, key: int = 0) -> TorchComm | None:
        everyone = self.allgather((color, key, self.rank))
        self._made["Split"] += 1
        if color == UNDEFINED:
            return None
        chosen = sorted((key, rank) for other, key, rank in everyone if other == color)
        members = tuple(self.members[rank] for _, rank in chosen)
        return TorchComm(self.runtime, members, f"{self.label}/Split{self._made['Split']}({color})")

    def Split_type(
        self, split_type: int = COMM_TYPE_SHARED, key: int = 0, info: Any = None
    ) -> TorchComm | None:
        hosts = self.allgather(socket.gethostname())
        color = UNDEFINED if split_type == UNDEFINED else hosts.index(socket.gethostname())
        return self.Split(color, key)

    def Dup(self, info: Any = None) -> TorchComm:
        self._made["Dup"] += 1
        return TorchComm(self.runtime, self.members, f"{self.label}/Dup{self._made['Dup']}")

    def Clone(self) -> TorchComm:
        """Return a duplicate."""
        return self.Dup()

    def Create(self, group: Group) -> TorchComm | None:
        self.Barrier()
        return self.Create_group(group)

    def Create_group(self, group: Group, tag: int = 0) -> TorchComm | None:
        members = group.live()
        kind = f"Group{members}:{tag}"
        self._made[kind] += 1
        if self.runtime.wire.rank not in members:
            return None
        return TorchComm(self.runtime, members, f"{self.label}/{kind}{self._made[kind]}")

    @staticmethod
    def Create_keyval(*_args: Any, **_kwargs: Any) -> int:
        """Refuse: a program can keep attributes in a dict."""
        raise UnsupportedError("Create_keyval: not over torch.distributed; keep a dict by communicator")

    def as_process_group(self) -> Any:
        """Return torch's own group of these ranks, which `wrap` gives back as this. Collective on the first call."""
        self._live()
        if self._process_group is None:
            self._process_group = make_group(self)
            _WRAPPED[self._process_group] = self
        return self._process_group

    def Free(self) -> None:
        """Give up the communicator."""
        self._live()
        if self.label == "world":
            raise CallError(ERR_COMM, "the world cannot be freed: close() ends it")
        self._freed, self._nccl = True, None
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)

    def Abort(self, errorcode: int = 0) -> None:
        """End all ranks at once."""
        self.runtime.end_job(errorcode)

    def __getattr__(self, name: str) -> Any:
        raise missing_call(name, INSTEAD.get(name, "")) if name[:1].isupper() else AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return self is other or (self._freed and not other)

    def __hash__(self) -> int:
        return id(self)

    def __bool__(self) -> bool:
        return not self._freed

    def __repr__(self) -> str:
        return f"<TorchComm {self.label}: rank {self.rank} of {self.size}>"


# -------------------------------------------------------------------------------------------------------- entering
def world(
    *,
    recorder: Recorder | None = None,
    seed: int = 0,
    deadline_s: float = 30.0,
    options: Options | None = None,
    backend: str = "",
) -> TorchComm:
    """Return the communicator of all ranks of this job. Collective; the clock starts when all have met.

    Args:
        recorder: keeps what ranks record; None: nothing is kept.
        seed: of the random streams of all ranks.
        deadline_s: how long a blocking call may take, in seconds, where `comm.clock.deadline` says nothing else.
        options: how the run behaves; the same on all ranks.
        backend: torch's name of the backend of its default group, if it has none yet; "" is gloo, with NCCL beside it
            if all ranks have GPUs.

    Raises:
        UnsupportedError: this torch does not have the backend.
        Timeout: a rank did not come.
        WorldError: the address where ranks meet does not exist, or its port is taken.
        ParameterError: `deadline_s` is not above 0, or an address is missing in a job on several nodes.
    """
    entered = not dist.is_initialized()
    if entered:
        join(detect_launcher(), backend)
    services = RankServices(dist.get_rank(), recorder=recorder, seed=seed, deadline_s=deadline_s)
    comm = _enter(dist.group.WORLD, services, options or Options.given())
    comm.runtime.leaves_torch = entered
    # To wrap it during the run means this run: its seed, recorder and deadline.
    _WRAPPED[comm.runtime.group] = comm
    if entered:
        atexit.register(_finalize, comm.runtime)
    return comm


def _finalize(runtime: TorchRuntime) -> None:
    """End together with the others in a program without `guarded`; one that has raised does not wait for them.

    A process that ends while the wire's thread receives may end in C++'s `terminate`.
    """
    if not hasattr(sys, "last_value"):
        runtime.finalize()


def _enter(group: Any, services: RankServices, options: Options) -> TorchComm:
    runtime = TorchRuntime(group, services, options)
    runtime.wire.start()
    runtime.watchdog.start()
    comm = TorchComm(runtime, tuple(range(group.size())), "world")
    runtime.has_nccl, runtime.lacks = can_use_nccl(comm.allgather(gpu_report(group)))
    if runtime.lacks and comm.rank == 0:
        warnings.warn(runtime.lacks, RuntimeWarning, stacklevel=3)
    comm.Barrier()
    services.clock.start()
    return comm


# A process group takes no attributes: what it was wrapped by is kept beside it, for as long as it lives.
_WRAPPED: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchComm] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> TorchComm:
    """Return a communicator over a group of torch.distributed; the same one each time. Collective on the first call.

    Args:
        group: a process group that this rank is in.

    Raises:
        UsageError: it is something else.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"{group!r}: pass a torch.distributed process group that this rank is in")
    known = _WRAPPED.get(group)
    if known is None or known.runtime.abort.program_ended:
        services = RankServices(group.rank(), recorder=None, seed=0, deadline_s=30.0)
        known = _WRAPPED[group] = _enter(group, services, Options())
    return known
