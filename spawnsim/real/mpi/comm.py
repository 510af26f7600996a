"""`Comm` on a real MPI: a thin wrapper over mpi4py's communicators that implements spawnsim's interface.

All of mpi4py's methods are available by delegation. Communicators that they return are wrapped and share the rank's
services (clock, rng, record, compute, background). Integers such as `ANY_SOURCE` are spawnsim's, independent of the
library's own values.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.comm import constants, failures
from spawnsim.comm.group import Group
from spawnsim.comm.handles import ERRORS_ARE_FATAL, ERRORS_RETURN, Errhandler
from spawnsim.comm.protocols import Capabilities, Recovery
from spawnsim.errors import UsageError
from spawnsim.real.base import KINDS, names_for
from spawnsim.real.launch.launchers import detect_launcher, require_together
from spawnsim.real.mpi import translation
from spawnsim.real.mpi.collectives import BUFFER, MAKERS, Collectives
from spawnsim.real.mpi.point_to_point import MPIPersistent, MPIRequest, PointToPoint, wrap_request
from spawnsim.real.mpi.recovery import capabilities, prepare, recover
from spawnsim.real.mpi.runtime import MPIRuntime, abort
from spawnsim.real.mpi.translation import ulfm
from spawnsim.real.mpi.windows import Windows
from spawnsim.real.runtime.rank import close, guarded
from spawnsim.real.runtime.services import Options, RankServices, Recorder, contribution

if TYPE_CHECKING:
    from spawnsim.real.runtime.staging import Stage


SENDS = ("Send", "Ssend", "Rsend", "Bsend", "Psend")
COUNTED = (
    {form: name for name in (*BUFFER, "Allreduce") for form in (f"I{name.lower()}", f"{name}_init")}
    | {f"{name}_init": name for name in SENDS}
    | {name: name for name in ("Bsend", "Ibsend", "bsend", "ibsend", "Isendrecv", "Isendrecv_replace")}
)
"""Sending calls that mpi4py implements → the operation that defines their bytes. Persistent calls count per start."""


class MPIComm(PointToPoint, Collectives):
    """A communicator of real ranks, created by `world()`, `wrap()`, and its methods `Split`, `Dup`, …."""

    def __init__(self, raw: MPI.Comm, runtime: MPIRuntime, label: str) -> None:
        super().__init__(raw, runtime, label)
        self._node = None
        self._shares = (
            runtime.options.node_memory and self.size > 1 and not (self._inter or runtime.abortable)
        )
        self.Win = Windows(self)
        raw.Set_attr(_keyval(), self)
        self._open_matching()  # last, since the watchdog's thread may revoke it from now on

    # ----------------------------------------------------------------------------------------------- recovery
    def capabilities(self) -> Capabilities:
        return capabilities(self.runtime)

    def recover(self, step: int | None = None) -> Recovery:
        """Return the communicator of the survivors, after `RankFailed`, `Revoked` or `Timeout`; all must call it."""
        return recover(self, step)

    def Get_failed(self) -> Group:
        """Return the group of the members that are known to have died or were given up."""
        dead = self.runtime.survival.failed(self)
        return Group.of(tuple(self.members[rank] for rank in dead), self.runtime.services.rank)

    def Ack_failed(self, num_to_ack: int | None = None) -> int:
        """Acknowledge failures: receives from any rank continue without these ranks. Return the acknowledged number."""
        if ulfm() and not self.revoked:
            self._raw.Ack_failed()
        count: int = self.runtime.survival.acknowledge(self, num_to_ack)
        return count

    def as_native(self) -> MPI.Comm:
        return self._raw

    def as_mpi_comm(self) -> MPI.Comm:
        return self._raw

    # ------------------------------------------------------------------------------------------- mpi4py's own
    def Get_rank(self) -> int:
        if not self._raw:
            raise failures.CallError(failures.ERR_COMM, f"{self.label} was freed: make another one")
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Get_group(self) -> Group:
        """Return the group, in spawnsim's terms: its members are ranks of the world."""
        return Group.of(self.members, self.runtime.services.rank)

    def Get_remote_group(self) -> Group:
        remote: Any = self._raw
        return Group.of(self._in_world(remote.Get_remote_group()), self.runtime.services.rank)

    def Get_attr(self, keyval: int) -> Any:
        """Return an attribute; spawnsim's keyvals of predefined attributes are translated."""
        return self._raw.Get_attr(translation.keyval(keyval))

    def Get_topology(self) -> int:
        kinds = {MPI.CART: constants.CART, MPI.GRAPH: constants.GRAPH, MPI.DIST_GRAPH: constants.DIST_GRAPH}
        return kinds.get(self._raw.Get_topology(), constants.UNDEFINED)

    topology = topo = property(Get_topology)

    def Get_errhandler(self) -> Any:
        """Return the error handler: spawnsim's if it is predefined."""
        found = self._raw.Get_errhandler()
        for services, theirs in (
            (ERRORS_RETURN, MPI.ERRORS_RETURN),
            (ERRORS_ARE_FATAL, MPI.ERRORS_ARE_FATAL),
        ):
            if found == theirs:
                found.Free()
                return Errhandler(services)
        return found

    Create_keyval = staticmethod(MPI.Comm.Create_keyval)
    Free_keyval = staticmethod(MPI.Comm.Free_keyval)
    Create_errhandler = staticmethod(MPI.Comm.Create_errhandler)

    def Free(self) -> None:
        """Free the communicator; further calls on it are errors, and open object receives are cancelled."""
        if self.label == "world":
            raise failures.CallError(failures.ERR_COMM, "the world cannot be freed: close() ends it")
        for waiting in list(self._posted):
            waiting.Cancel()
        if self._node is not None:
            self._node.free()
        self._raw.Free()

    def Abort(self, errorcode: int = 0) -> None:
        abort(errorcode)

    def Shift(self, direction: int, disp: int) -> tuple[int, int]:
        """Return source and destination of a shift on a Cartesian communicator; edges are PROC_NULL."""
        source, dest = self._raw.Shift(direction, disp)  # type: ignore[attr-defined]
        return translation.rank_back(source), translation.rank_back(dest)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._raw, name)
        if not callable(found):
            return self._wrapped(found, name)
        method = self._delegate(found, name)
        self.__dict__[name] = method
        return method

    def _delegate(self, raw: Callable[..., Any], name: str) -> Callable[..., Any]:
        counters, known = self.runtime.counters, self.runtime.translate
        translate = known.op if name[0].islower() else known  # objects are not translated
        persistent, operation = name.endswith("_init"), COUNTED.get(name)
        place = self.rank, self.size

        def call(*args: Any, **kwargs: Any) -> Any:
            named = {key: translate(value) for key, value in kwargs.items()}
            given = tuple([translate(value) for value in args])
            stage = self._staged(name, given, named) if known.devices else None
            if stage is not None:
                given, named = stage.args, stage.kwargs
            if known.unnamed and operation is not None:
                given, named = known.reducing(self._raw, name, given, named)
            nbytes = 0 if operation is None else contribution(operation, given, named, place)
            if operation is not None and not persistent:
                counters.part(nbytes)
            try:
                result = self._wrapped(raw(*given, **named), name, stage)
            except MPI.Exception as error:
                raise self._error(error, name) from None
            if isinstance(result, MPIRequest):
                result.buffers = given, named
            if persistent and isinstance(result, MPIPersistent):
                result.sent = None if operation is None else nbytes
            if stage is not None and not isinstance(result, MPIRequest):
                stage.end()
            return result

        return call

    def _wrapped(self, value: Any, name: str, stage: Stage | None = None) -> Any:
        """Return a result with its communicators and requests wrapped, also in tuples."""
        if isinstance(value, MPI.Comm):
            return MPIComm(value, self.runtime, f"{self.label}/{name}") if value else None
        if isinstance(value, MPI.Request):
            return wrap_request(value, self.runtime, (name, -1, self), stage)
        if type(value) is tuple:
            return tuple([self._wrapped(part, name) for part in value])
        return value

    def _make(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        translate = self.runtime.translate
        named = {key: translate(value) for key, value in kwargs.items()}
        raw = self._watched(name, tuple([translate(value) for value in args]), named)
        if raw == MPI.COMM_NULL:
            return None
        return MPIComm(raw, self.runtime, f"{self.label}/{name}{self._sequence}")

    def __eq__(self, other: object) -> bool:
        if not other:  # non-members get None, whereas mpi4py programs compare with COMM_NULL
            return not self
        return isinstance(other, MPIComm) and self._raw == other._raw

    def __hash__(self) -> int:
        return self._raw.handle

    def __bool__(self) -> bool:
        return bool(self._raw)

    def __repr__(self) -> str:
        return f"<MPIComm {self.label}: rank {self.rank} of {self.size}>"


def _maker(name: str) -> Callable[..., Any]:
    def make(self: MPIComm, *args: Any, **kwargs: Any) -> Any:
        return self._make(name, args, kwargs)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = f"mpi4py's `{name}`; the new communicator is wrapped, None where this rank is in none."
    return make


for _name in MAKERS:
    setattr(MPIComm, _name, _maker(_name))


def world(
    *,
    recorder: Recorder | None = None,
    seed: int = 0,
    deadline_s: float = 30.0,
    options: Options | None = None,
) -> MPIComm:
    """Return the communicator of all ranks of this job. Collective; the clock starts when all ranks have met.

    Args:
        recorder: stores the recorded values of ranks; None: nothing is stored.
        seed: seed of the random streams of all ranks.
        deadline_s: limit of a blocking call in seconds, unless `comm.clock.deadline` sets another.
        options: options of the run; the same on all ranks.

    Raises:
        UsageError: a launcher started several ranks, but each is alone in MPI.
        ParameterError: `deadline_s` is not above 0.
    """
    require_together(detect_launcher(), MPI.COMM_WORLD.Get_size(), MPI.get_vendor()[0])
    raw = MPI.COMM_WORLD.Dup()
    services = RankServices(raw.Get_rank(), recorder=recorder, seed=seed, deadline_s=deadline_s)
    comm = _enter(raw, services, options or Options.given(), "world")
    raw.Set_name("MPI_COMM_WORLD")
    # `wrap` of COMM_WORLD during the run returns this communicator, with the run's seed, recorder and deadline.
    MPI.COMM_WORLD.Set_attr(_keyval(), comm)
    return comm


def _enter(raw: MPI.Intracomm, services: RankServices, options: Options, label: str) -> MPIComm:
    runtime = MPIRuntime(raw, services, options)
    prepare(runtime)
    runtime.watchdog.start()
    comm = MPIComm(raw, runtime, label)
    comm.Barrier()
    services.clock.start()
    return comm


@cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


def wrap(raw: MPI.Comm) -> MPIComm:
    """Return the wrapper of an mpi4py communicator, always the same one.

    During a run of `world()`, COMM_WORLD stands for that run. Otherwise the first call is collective over `raw`; the
    deadline is 30 s, the seed 0, and nothing is recorded. Use `world()` to choose these.

    Args:
        raw: an mpi4py intracommunicator that contains this rank. MPI must not have been finalized.

    Raises:
        UsageError: `raw` is not such an intracommunicator.
    """
    if not isinstance(raw, MPI.Intracomm) or raw == MPI.COMM_NULL:
        raise UsageError(f"{raw!r}: pass an mpi4py intracommunicator that this rank is in")
    known = raw.Get_attr(_keyval())
    if isinstance(known, MPIComm) and not known.runtime.abort.program_ended:
        return known
    comm = _enter(
        raw, RankServices(raw.Get_rank(), recorder=None, seed=0, deadline_s=30.0), Options(), raw.Get_name()
    )
    atexit.register(_finalize, comm.runtime)
    return comm


def _finalize(runtime: MPIRuntime) -> None:
    """End together with the other ranks, in a program that uses `wrap` and not `world()`.

    Policies may have sent messages to ranks that had ended; MPICH kills a job that finalizes with such messages.
    """
    try:
        if not MPI.Is_finalized() and not runtime.abort.begun:
            runtime.finalize()
    finally:
        runtime.watchdog.stop()


def namespace(comm: MPIComm) -> SimpleNamespace:
    """Return `MPI` for programs on `comm`: mpi4py's names, with spawnsim's numbers and requests.

    Args:
        comm: the program's `MPI.COMM_WORLD`.
    """
    found = names_for(comm, vars(MPI))
    found.COMM_SELF, found.Prequest = wrap(MPI.COMM_SELF), MPIPersistent
    vars(found).update(KINDS, Compute_dims=_compute_dims)
    return found


def _compute_dims(nnodes: int, dims: int | Sequence[int]) -> list[int]:
    """Return balanced dimensions (`MPI.Compute_dims`), or spawnsim's error."""
    try:
        return MPI.Compute_dims(nnodes, dims)
    except MPI.Exception as error:
        raise translation.failure(error, None, f"Compute_dims({nnodes}, {dims})") from error


__all__ = ["MPIComm", "Options", "close", "guarded", "namespace", "world", "wrap"]
