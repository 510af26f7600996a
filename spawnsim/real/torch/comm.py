"""`Comm` over torch.distributed: gloo on CPU, NCCL on GPUs with gloo beside it, for where there is no MPI.

Under torchrun, mpiexec, srun, or as one process. Collectives are torch's; messages and windows travel over one wire
per rank (see `real.torch`). What is not offered raises `UnsupportedError` and names the alternative. Knows torch;
knows no policy, no run folder and no command line.
"""

from __future__ import annotations

import atexit
import hashlib
import socket
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from spawnsim.comm.constants import COMM_TYPE_SHARED, CONGRUENT, IDENT, SIMILAR, UNDEFINED, UNEQUAL
from spawnsim.comm.failures import ERR_COMM, CallError
from spawnsim.comm.group import Group
from spawnsim.comm.protocols import Capabilities
from spawnsim.errors import UnsupportedError, UsageError
from spawnsim.real.launch.launchers import detect_launcher
from spawnsim.real.runtime.abort import refuse_recovery
from spawnsim.real.runtime.finalize import close, guarded
from spawnsim.real.runtime.namespace import namespace as names
from spawnsim.real.runtime.services import Options, RankServices, Recorder, Task
from spawnsim.real.torch.collectives import NativeCollectives
from spawnsim.real.torch.exchanges import ObjectCollectives
from spawnsim.real.torch.point_to_point import PointToPoint
from spawnsim.real.torch.process_groups import join, make_group
from spawnsim.real.torch.runtime import RankRuntime, backend_of, can_use_nccl, gpu_report
from spawnsim.real.torch.windows import Windows

__all__ = [
    "Options",
    "TorchComm",
    "close",
    "guarded",
    "namespace",
    "world",
    "wrap",
]


INSTEAD = {
    "Send_init": "Isend", "Recv_init": "Irecv", "Ssend_init": "Issend", "Bcast_init": "Ibcast",
    "Psend_init": "Isend", "Precv_init": "Irecv", "Attach_buffer": "bsend, which has its own", "Spawn": "torchrun",
    "Create_cart": "Split and rank arithmetic", "Create_graph": "Split", "Create_dist_graph": "Split",
    "Create_intercomm": "Split of one communicator",
}  # fmt: skip
SURVIVAL = "to survive a rank's death use torchrun --max-restarts, or --backend mpi --survive"


class MissingCall(UnsupportedError, AttributeError):
    """A name that is not here, so that `hasattr` says False."""


def refusal(name: str) -> MissingCall:
    """Return the error for one of mpi4py's methods that is not here."""
    if name in INSTEAD:
        return MissingCall(f"{name}: not over torch.distributed; use {INSTEAD[name]}, or --backend mpi")
    return MissingCall(f"{name}: not over torch.distributed; --backend mpi has all of mpi4py's calls")


def namespace(comm: Any) -> SimpleNamespace:
    """Return `MPI` for programs on `comm`: mpi4py's names in spawnsim's words."""
    found = names(comm)
    return TorchNamespace(**vars(found))


class TorchNamespace(SimpleNamespace):
    """A namespace that says what is missing, and what to do."""

    def __getattr__(self, name: str) -> Any:
        raise MissingCall(f"MPI.{name}: not over torch.distributed; --backend mpi has all of mpi4py's names")


class InnerChannel(PointToPoint):
    """The channel of a communicator's own exchanges: the same ranks, another context."""

    def __init__(self, comm: TorchComm) -> None:
        self._home, self._context = comm._home, comm._context ^ 1
        self.label, self.rank, self.size = comm.label, comm.rank, comm.size
        self._home.mailbox.open(self._context, comm.members)


class TorchComm(PointToPoint, NativeCollectives, ObjectCollectives):
    """A communicator of real ranks. Made by `world()`, by its own `Split`, `Dup`, …, and by `wrap()`."""

    def __init__(self, home: RankRuntime, members: tuple[int, ...], label: str) -> None:
        self._home, self.label, self.members = home, label, members
        self.rank, self.size = members.index(home.wire.rank), len(members)
        self._sequence, self._made = 0, Counter[str]()
        self._context = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=7).digest(), "little") & ~1
        home.mailbox.open(self._context, members)
        self._inner = InnerChannel(self)
        own_gloo = backend_of(home.group, "cpu") if label == "world" else None
        self._gloo = own_gloo if own_gloo and own_gloo.name() == "gloo" else home.gloo(label, members)
        self._nccl: Any = None
        self._process_group: Any = None
        self._named = "MPI_COMM_WORLD" if label == "world" else label
        self._freed, self._active = False, home.watchdog.active
        own = home.own
        self.clock, self.rng, self.record, self.compute = own.clock, own.rng, own.record, own.compute
        self.Win = Windows(self)

    def _on_gpus(self) -> Any:
        """Return NCCL's group of these ranks, made when all of them first need it."""
        if self._nccl is None:
            home, whole = self._home, self.label == "world"
            self._nccl = backend_of(home.group, "cuda") if whole else home.nccl(self.label, self.members)
        return self._nccl

    # ------------------------------------------------------------------------------------------ own members
    def background(self, fn: Callable[[], object]) -> Task:
        """Run `fn()` in a thread of this rank."""
        return self._home.own.background(fn)

    def poll(self) -> None:
        """Let go of requests that are complete; the wire makes progress by itself."""
        self._home.poll()

    def capabilities(self) -> Capabilities:
        """Return what this communicator can do here."""
        return Capabilities(
            backend="torch",
            library=f"torch {torch.__version__}, {dist.get_backend(self._home.group)}",
            survives=False,
            ulfm=False,
            progress="async",  # a thread of each rank serves windows
            threads="multiple",
            devices=("cpu", "cuda"),
            missing=(*filter(None, [self._home.lacks]), SURVIVAL),
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
        return Group.of(self.members, self._home.wire.rank)

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

    def _live(self) -> None:
        if self._freed:
            raise CallError(ERR_COMM, f"{self.label} was freed: make another one")

    # ------------------------------------------------------------------------------------------- making others
    def Split(self, color: int = 0, key: int = 0) -> TorchComm | None:
        everyone = self.allgather((color, key, self.rank))
        self._made["Split"] += 1
        if color == UNDEFINED:
            return None
        chosen = sorted((key, rank) for other, key, rank in everyone if other == color)
        members = tuple(self.members[rank] for _, rank in chosen)
        return TorchComm(self._home, members, f"{self.label}/Split{self._made['Split']}({color})")

    def Split_type(
        self, split_type: int = COMM_TYPE_SHARED, key: int = 0, info: Any = None
    ) -> TorchComm | None:
        hosts = self.allgather(socket.gethostname())
        color = UNDEFINED if split_type == UNDEFINED else hosts.index(socket.gethostname())
        return self.Split(color, key)

    def Dup(self, info: Any = None) -> TorchComm:
        self._made["Dup"] += 1
        return TorchComm(self._home, self.members, f"{self.label}/Dup{self._made['Dup']}")

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
        if self._home.wire.rank not in members:
            return None
        return TorchComm(self._home, members, f"{self.label}/{kind}{self._made[kind]}")

    @staticmethod
    def Create_keyval(*_args: Any, **_kwargs: Any) -> int:
        """Refuse: attributes are Python's business here."""
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
        self._home._abort(errorcode)

    def __getattr__(self, name: str) -> Any:
        raise refusal(name) if name[:1].isupper() else AttributeError(name)

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

    Where torch.distributed has no default group yet, it gets one, of torch's `backend` (see `join`).
    """
    entered = not dist.is_initialized()
    if entered:
        join(detect_launcher(), backend)
    own = RankServices(dist.get_rank(), recorder=recorder, seed=seed, deadline_s=deadline_s)
    comm = _enter(dist.group.WORLD, own, options or Options())
    comm._home.leaves_torch = entered
    _WRAPPED[comm._home.group] = comm  # whoever wraps it means this run: its seed, recorder and deadline
    if entered:
        atexit.register(_leave, comm._home)
    return comm


def _leave(home: RankRuntime) -> None:
    """Part from the others at the end of a program without `guarded`; one that raised has no time for it.

    A process that ends while the wire's thread receives may end in C++'s `terminate`.
    """
    if not hasattr(sys, "last_value"):
        home.goodbye()


def _enter(group: Any, own: RankServices, options: Options) -> TorchComm:
    home = RankRuntime(group, own, options)
    home.wire.start()
    home.watchdog.start()
    comm = TorchComm(home, tuple(range(group.size())), "world")
    home.has_nccl, home.lacks = can_use_nccl(comm.allgather(gpu_report(group)))
    if home.lacks and comm.rank == 0:
        warnings.warn(home.lacks, RuntimeWarning, stacklevel=3)
    comm.Barrier()
    own.clock.start()
    return comm


# A process group takes no attributes: what it was wrapped by is kept beside it, for as long as it lives.
_WRAPPED: weakref.WeakKeyDictionary[dist.ProcessGroup, TorchComm] = weakref.WeakKeyDictionary()


def wrap(group: Any) -> TorchComm:
    """Return a communicator over a group of torch.distributed; the same one each time. Collective on the first call."""
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"{group!r}: pass a torch.distributed process group that this rank is in")
    known = _WRAPPED.get(group)
    if known is None or known._home.ending.over:
        own = RankServices(group.rank(), recorder=None, seed=0, deadline_s=30.0)
        known = _WRAPPED[group] = _enter(group, own, Options())
    return known
