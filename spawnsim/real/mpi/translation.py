"""Translation between spawnsim's values and mpi4py's: constants, ops, datatypes, statuses, buffers, errors.

The same name has another value in each MPI (`ANY_SOURCE` is -1 in Open MPI and -2 in MPICH, where -1 is `PROC_NULL`),
so values are translated by argument position, never by value alone. mpi4py's own objects pass unchanged; its values of
these two names are refused, as on other backends.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from spawnsim.comm import constants as ours
from spawnsim.comm import failures
from spawnsim.comm.datatypes import BFLOAT16_T, BY_NAME, NAMED, Datatype
from spawnsim.comm.group import Group
from spawnsim.comm.handles import Errhandler, Info, integer
from spawnsim.comm.layouts import BF16
from spawnsim.comm.ops import BY_NAME as OPS
from spawnsim.comm.ops import Op
from spawnsim.errors import RankFailed, Revoked, SpawnsimError, UnsupportedError, WorldError
from spawnsim.real.launch.launchers import cuda_aware

if TYPE_CHECKING:
    from spawnsim.real.runtime.staging import Memory, Stage

DETECTED_S = 0.5  # from an error to the detection of a death: 10 ms were measured
NO_PROCESS = f"(errno {errno.ESRCH})"
WORLD_CLASSES = (
    MPI.ERR_OTHER, MPI.ERR_INTERN, MPI.ERR_UNKNOWN, MPI.ERR_NO_MEM, MPI.ERR_IN_STATUS, MPI.ERR_PENDING,
)  # fmt: skip


def source(rank: int) -> int:
    """Return a receive's source in mpi4py's numbers."""
    rank = integer(rank)
    if rank >= 0:
        return rank
    return MPI.ANY_SOURCE if rank == ours.ANY_SOURCE else peer(rank)


def peer(rank: int) -> int:
    """Return a destination, target or root in mpi4py's numbers."""
    rank = integer(rank)
    if rank == ours.PROC_NULL:
        return MPI.PROC_NULL
    if rank in (MPI.ANY_SOURCE, MPI.PROC_NULL):
        raise failures.CallError(
            failures.ERR_RANK, f"rank {rank} is not a rank of a communicator{ours.of_mpi4py(rank)}"
        )
    return MPI.ROOT if rank == ours.ROOT else rank if rank >= 0 else -(2**20)


def tag(value: int) -> int:
    """Return a receive's tag in mpi4py's numbers."""
    value = integer(value)
    return MPI.ANY_TAG if value == ours.ANY_TAG else value


KEYVALS = (
    "TAG_UB", "IO", "WTIME_IS_GLOBAL", "UNIVERSE_SIZE", "LASTUSEDCODE", "APPNUM", "WIN_BASE", "WIN_SIZE",
    "WIN_DISP_UNIT", "WIN_CREATE_FLAVOR", "WIN_MODEL",
)  # fmt: skip
_KEYVALS: dict[int, int] = {getattr(ours, name): getattr(MPI, name) for name in KEYVALS}


def keyval(number: int) -> int:
    """Return a predefined attribute's keyval in mpi4py's numbers; a program's own keyval is unchanged."""
    return _KEYVALS.get(number, number)


def rank_back(rank: int) -> int:
    """Return a rank from mpi4py in spawnsim's numbers."""
    if rank >= 0:
        return rank
    return ours.PROC_NULL if rank == MPI.PROC_NULL else ours.ANY_SOURCE if rank == MPI.ANY_SOURCE else rank


class Translator:
    """Translates arguments; caches the method per type, so that a known type costs one look-up.

    Attributes:
        devices: whether any argument so far was a tensor outside of main memory: only then callers `stage`.
        memory: the staging memory for such tensors; created for the first one.
        bfloat16: the datatype of bfloat16, once an argument was a bfloat16 tensor.
        unnamed: whether any argument so far had a type that MPI does not define, bfloat16 or float8. MPI cannot
            interpret these bits, so from then on reductions request an op (`reducing`).
    """

    def __init__(self, world: MPI.Group) -> None:
        self._world = world
        self.devices = False
        self.memory: Memory | None = None
        self._how: dict[type, Callable[[Any], Any] | None] = {list: self._spec, tuple: self._spec}
        self._ops: dict[int, tuple[Any, MPI.Op]] = {}
        self._types: dict[int, tuple[Any, MPI.Datatype]] = {}
        self._halves: dict[str, MPI.Op] = {}
        self._torch_bfloat16: Any = None
        self._float8: frozenset[Any] = frozenset()  # torch's types
        self.bfloat16: MPI.Datatype | None = None
        self.unnamed = False

    def __call__(self, value: Any) -> Any:
        """Return a buffer specification, op or datatype in mpi4py's form."""
        kind = type(value)
        try:
            how = self._how[kind]
        except KeyError:
            how = self._how[kind] = self._learn(kind)
        return value if how is None else how(value)

    def op(self, value: Any) -> Any:
        return self(value) if isinstance(value, Op) else value

    def stage(
        self,
        raw: Any,
        operation: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        rank: int | None = None,
        direct: bool = True,
    ) -> Stage | None:
        """Return the stage of a call of `raw`, if GPU tensors among its translated arguments need one.

        `rank`: the caller's rank, None on an intercommunicator; `direct`: whether MPI gets the call unchanged.
        """
        from spawnsim.real.runtime import staging  # torch is loaded by now, since there are tensors

        if self.memory is None:
            self.memory = staging.Memory(aware=cuda_aware())
        kind: Any = type(raw)
        call = staging.Call(operation, parameter_names(kind, operation), args, kwargs or {}, rank)
        return staging.stage(self.memory, call, direct=direct)

    def far(self, spec: Any) -> bool:
        if not self.devices:
            return False
        from spawnsim.real.runtime import staging  # torch is loaded by now

        return staging.device_tensor(spec) is not None

    def _learn(self, kind: type) -> Callable[[Any], Any] | None:
        if hasattr(kind, "data_ptr"):  # torch's tensors, known without loading torch
            torch = sys.modules["torch"]
            self._torch_bfloat16 = torch.bfloat16
            self._float8 = frozenset(kind for name, kind in vars(torch).items() if name.startswith("float8_"))
            return self._tensor
        if not kind.__module__.startswith("spawnsim."):
            return None
        if issubclass(kind, Op):
            return self._op
        if issubclass(kind, Datatype):
            return self._datatype
        if issubclass(kind, Group):
            return self._group
        if issubclass(kind, Info):
            return _info
        if issubclass(kind, Errhandler):
            return _named
        return _singleton if issubclass(kind, int) else getattr(kind, "as_native", None)

    def _group(self, group: Group) -> MPI.Group:
        return self._world.Incl(list(group.live()))

    def _tensor(self, tensor: Any) -> Any:
        if not tensor.is_cpu:
            self.devices = True
        if tensor.dtype is self._torch_bfloat16:
            return [tensor, self._half()]
        if tensor.dtype in self._float8:
            self.unnamed = True
        return tensor

    def _half(self) -> MPI.Datatype:
        """Return the datatype of bfloat16, which MPI libraries do not define yet."""
        if self.bfloat16 is None:
            self.unnamed = True
            self.bfloat16 = MPI.UINT16_T.Dup()
            self.bfloat16.Set_name(BFLOAT16_T.Get_name())
        return self.bfloat16

    def _spec(self, spec: Any) -> Any:
        how = self._how
        for part in spec:
            kind = type(part)
            if kind not in how:
                how[kind] = self._learn(kind)
            if how[kind] is not None:
                made = [part if type(part) is tuple else self(part) for part in spec]
                return self._typed(made) if self.bfloat16 is not None else made
        return spec

    def _typed(self, spec: list[Any]) -> list[Any]:
        """Return a specification with the type of its memory, a tensor of bfloat16, unless it states another."""
        first, last = spec[0], spec[-1]
        if type(first) is not list or first[-1:] != [self.bfloat16]:
            return spec
        stated = isinstance(last[0] if type(last) is list and last else last, (MPI.Datatype, str))
        return [first[0], *spec[1:]] if stated else [first[0], *spec[1:], self.bfloat16]

    def reducing(
        self, raw: MPI.Comm, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the translated arguments of a call, with an op of ours in a reduction of bfloat16.

        Raises:
            UnsupportedError: a reduction of float8, which Open MPI adds as bytes.
        """
        kind: Any = type(raw)
        half, names = self.bfloat16, parameter_names(kind, operation)
        given = [*args, *kwargs.values()]
        if "op" not in names:
            return args, kwargs
        for spec in given:
            dtype = getattr(spec[0] if type(spec) is list and spec else spec, "dtype", None)
            if dtype in self._float8:
                raise UnsupportedError(f"{operation} of {dtype}: MPI cannot add such numbers; use bfloat16")
        if not any(type(spec) is list and spec and spec[-1] is half for spec in given):
            return args, kwargs
        place = names.index("op")
        op = self._half_op(args[place] if place < len(args) else kwargs.get("op", MPI.SUM))
        if place < len(args):
            return (*args[:place], op, *args[place + 1 :]), kwargs
        return args, kwargs | {"op": op}

    def _half_op(self, native: MPI.Op) -> MPI.Op:
        """Return an op that computes on bfloat16 as on virtual ranks: in float32, rounded at each step."""
        op = next((op for name, op in OPS.items() if op and getattr(MPI, name) == native), None)
        if op is None:  # the program's own
            return native
        op.check(BFLOAT16_T)
        made = self._halves.get(op.name)
        if made is None:

            def combine(inbuf: Any, inoutbuf: Any, _datatype: Any) -> None:
                op.reduce(np.frombuffer(inbuf, BF16), np.frombuffer(inoutbuf, BF16))

            made = self._halves[op.name] = MPI.Op.Create(combine, commute=True)
        return made

    def _op(self, op: Any) -> MPI.Op:
        found = self._ops.get(id(op))
        if found is None:
            found = self._ops[id(op)] = (op, _named(op) or _users_op(op))
        return found[1]

    def _datatype(self, datatype: Any) -> MPI.Datatype:
        if not datatype.committed:
            raise failures.CallError(
                failures.ERR_TYPE, "the datatype is not committed: call its Commit() first"
            )
        found = self._types.get(id(datatype))
        if found is None:
            name = next((name for name, known in BY_NAME.items() if known is datatype), None)
            if datatype is BFLOAT16_T:
                native = self._half()
            else:
                native = getattr(MPI, name) if name is not None and hasattr(MPI, name) else _derived(datatype)
            found = self._types[id(datatype)] = (datatype, native)
        return found[1]


@lru_cache(maxsize=128)
def parameter_names(kind: type, operation: str) -> tuple[str, ...]:
    """Return the names of a call's parameters."""
    return tuple(inspect.signature(getattr(kind, operation)).parameters)[1:]


def _named(thing: Any) -> Any:
    """Return mpi4py's object of the same name for a predefined operation or error handler, else None."""
    return getattr(MPI, thing.name) if getattr(thing, "function", None) is None else None


def _info(info: Info) -> MPI.Info:
    return MPI.Info.Create(dict(info.items())) if info else MPI.INFO_NULL


def _users_op(op: Op) -> MPI.Op:
    """Return an op that calls the program's function, with spawnsim's datatype if it has one of that name."""
    function: Any = op.function

    def call(inbuf: Any, inoutbuf: Any, datatype: MPI.Datatype | None) -> Any:
        named = None if datatype is None else NAMED.get(datatype.Get_name(), datatype)
        return function(inbuf, inoutbuf, named)

    return MPI.Op.Create(call, op.Is_commutative())


def _singleton(value: Any) -> Any:
    return getattr(MPI, repr(value), value)


def _derived(datatype: Any) -> MPI.Datatype:
    layout = datatype.layout
    blocks = MPI.BYTE.Create_hindexed([int(n) for n in layout.lengths], [int(n) for n in layout.offsets])
    return blocks.Create_resized(layout.lb, layout.extent).Commit()


def failure(
    error: MPI.Exception, comm: MPI.Comm | None, what: str, peer: int = ours.ANY_SOURCE
) -> SpawnsimError:
    """Return spawnsim's error for an mpi4py error: a dead rank, a revoked communicator, or the responsible side.

    `peer`: the rank that the call needs, if it needs one; MPICH does not name a dead rank, but reports that it found
    no process.
    """
    kind = error.Get_error_class()
    text = f"{what}: {error.Get_error_string()}"
    if kind in (_class("ERR_PROC_FAILED"), _class("ERR_PROC_FAILED_PENDING")):
        return _failed(failed_ranks(comm), text)
    if kind == _class("ERR_REVOKED") or (kind in WORLD_CLASSES and _is_revoked(comm)):
        return Revoked(text)
    if kind == MPI.ERR_TRUNCATE:
        return failures.Truncated(failures.ERR_TRUNCATE, f"{text}: receive into a larger buffer")
    if kind in WORLD_CLASSES:
        dead = [peer] if peer >= 0 and NO_PROCESS in text else _found_dead(comm)
        return _failed(dead, text) if dead else WorldError(text)
    return failures.CallError(_our_class(kind), text)


def _failed(dead: list[int], text: str) -> RankFailed:
    return RankFailed(dead, f"{text}; missing: rank {', '.join(map(str, dead))}" if dead else text)


def _is_revoked(comm: Any) -> bool:
    return ulfm() and comm is not None and bool(comm.Is_revoked())


def _class(name: str) -> int:
    return getattr(MPI, name, -1)


def _our_class(kind: int) -> int:
    names = [name for name in dir(MPI) if name.startswith("ERR_") and getattr(MPI, name) == kind]
    return next((getattr(failures, name) for name in names if hasattr(failures, name)), kind)


def ulfm() -> bool:
    """Whether this MPI's fault tolerance is switched on; the existence of the calls does not show it."""
    switch = "OMPI_MCA_mpi_ft_enable"  # set by mpiexec --with-ft ulfm
    return MPI.get_vendor()[0] == "Open MPI" and os.environ.get(switch) in ("1", "true")


def _found_dead(comm: MPI.Comm | None) -> list[int]:
    """Return the ranks that are known to be dead; the library may detect a death shortly after the error."""
    dead, end_s = failed_ranks(comm), time.perf_counter() + (DETECTED_S if ulfm() else 0.0)
    while not dead and time.perf_counter() < end_s:
        time.sleep(1e-3)
        dead = failed_ranks(comm)
    return dead


def failed_ranks(comm: MPI.Comm | None) -> list[int]:
    """Return the ranks of `comm` that are known to be dead (needs an MPI with ULFM switched on)."""
    if comm is None or not hasattr(comm, "Get_failed"):
        return []
    try:
        dead = comm.Get_failed()
    except (MPI.Exception, NotImplementedError):
        return []
    return [int(rank) for rank in MPI.Group.Translate_ranks(dead, None, comm.Get_group())]


__all__ = ["Translator", "failed_ranks", "failure", "peer", "rank_back", "source", "tag", "ulfm"]
