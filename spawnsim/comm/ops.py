"""Reduction operations: predefined ones and the program's own.

This room knows how two operands become one. In which order operands meet is the business of whoever reduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import ERR_OP, CallError
from spawnsim.comm.handles import Handle, reduced
from spawnsim.comm.kernels import ARRAY, FAMILIES, SCALAR, Kernel
from spawnsim.comm.memory import as_bytes, buffer
from spawnsim.comm.predefined import BY_DTYPE, BYTE
from spawnsim.errors import ParameterError

UserFunction = Callable[[Any, Any, Any], Any]
RMA_ONLY: Final = ("REPLACE", "NO_OP")


class Op(Handle):
    """An operation under mpi4py's names; `op(x, y)` applies it to two objects, `op.reduce` to two arrays."""

    __slots__ = ("_combine", "commute", "function", "name")
    name: str
    function: UserFunction | None
    _combine: Kernel
    commute: bool

    def __new__(cls, op: Op | None = None) -> Self:
        self = super().__new__(cls)
        self._identity, self.name, self.function, self.commute = None, "OP_NULL", None, False
        if op is not None:
            for slot in ("_identity", "_combine", "name", "function", "commute"):
                if hasattr(op, slot):
                    setattr(self, slot, getattr(op, slot))
        return self

    @classmethod
    def of(cls, name: str) -> Self:
        """Return a predefined operation."""
        self = cls()
        self._identity, self.name, self.commute, self._combine = object(), name, True, ARRAY[name]
        return self

    @classmethod
    def Create(cls, function: UserFunction, commute: bool = False) -> Self:
        """Return an operation of the program: `function(inbuf, inoutbuf, datatype)` writes to `inoutbuf`."""
        self = cls()
        self._identity, self.name, self.function, self.commute = object(), "", function, bool(commute)
        return self

    def Free(self) -> None:
        """Make this handle null; predefined operations stay."""
        self._live()
        if self.is_predefined:
            raise CallError(ERR_OP, f"{self.name} is predefined and cannot be freed")
        self._identity = None

    def _live(self) -> None:
        if self._identity is None:
            raise CallError(ERR_OP, "the operation is null or was freed")

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.function is not None:
            return type(self).Create, (self.function, self.commute)
        return reduced(self, globals(), self.name)

    def Is_commutative(self) -> bool:
        """Return whether operands may change places."""
        self._live()
        return self.commute

    is_commutative = property(Is_commutative)

    def Is_predefined(self) -> bool:
        """Return whether MPI defines the operation (the null operation counts as such)."""
        return self.function is None

    is_predefined = property(Is_predefined)

    def __call__(self, x: Any, y: Any, /) -> Any:
        if self.function is not None:
            return self.function(x, y, None)
        if self._identity is None:
            raise ParameterError("OP_NULL cannot be called")
        return SCALAR[self.name](x, y)

    def check(self, datatype: Datatype, *, one_sided: bool = False) -> None:
        """Raise `ERR_OP` unless the operation takes this datatype; `REPLACE` and `NO_OP` are for windows only."""
        self._live()
        if self.function is not None or (one_sided and self.name in RMA_ONLY):
            return
        if datatype.recipe.name == "DUP" or datatype.family not in FAMILIES.get(self.name, ()):
            where = " outside of one-sided calls" if self.name in RMA_ONLY else ""
            raise CallError(
                ERR_OP, f"{self.name} does not take {datatype.Get_name() or 'derived types'}{where}"
            )

    def reduce(
        self, invec: NDArray[Any], inoutvec: NDArray[Any], datatype: Datatype | None = None
    ) -> NDArray[Any]:
        """Compute `inoutvec = invec op inoutvec` in place and return it.

        Both are 1-D arrays as `Buffer.pack()` makes them: typed for predefined datatypes (`BF16` and pairs by their
        own dtypes), else bytes as they travel. `datatype` is what a function of the program is told; without it,
        the predefined type of the dtype.
        """
        if self.function is None:
            self._combine(invec, inoutvec)
        elif datatype is None or datatype.dense or datatype.dtype is not None:
            told = datatype or BY_DTYPE.get(inoutvec.dtype, BYTE)
            self.function(as_bytes(invec).view(buffer), as_bytes(inoutvec).view(buffer), told)
        else:
            self._reduce_sparse(invec, inoutvec, datatype)
        return inoutvec

    def _reduce_sparse(self, invec: NDArray[Any], inoutvec: NDArray[Any], datatype: Datatype) -> None:
        """Lay the elements out with their gaps, as the program's function expects, and take them back."""
        layout, count = datatype.live(), len(inoutvec) // datatype.size
        low, high = layout.span(count)
        high = max(high, layout.lb + count * layout.extent)
        first, inout = np.zeros(high - low, np.uint8), np.zeros(high - low, np.uint8)
        layout.scatter(first, as_bytes(invec), low)
        layout.scatter(inout, as_bytes(inoutvec), low)
        assert self.function is not None, "predefined operations never come here"
        self.function(first.view(buffer), inout.view(buffer), datatype)
        as_bytes(inoutvec)[...] = layout.gather(inout, count, low)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Compute `inoutbuf = inbuf op inoutbuf` on this rank."""
        from spawnsim.comm.buffers import as_buffer

        source, target = as_buffer(inbuf), as_buffer(inoutbuf, writable=True)
        if source.datatype != target.datatype:
            raise ParameterError("mismatch in send and receive MPI datatypes")
        if source.count != target.count:
            raise ParameterError(f"mismatch in send count {source.count} and receive count {target.count}")
        self.check(target.datatype)
        target.unpack(self.reduce(source.pack(), target.pack(), target.datatype))


BY_NAME: Final = {name: Op.of(name) for name in ARRAY} | {"OP_NULL": Op()}
"""Every predefined operation under mpi4py's name."""

OP_NULL = BY_NAME["OP_NULL"]
SUM, PROD, MAX, MIN = (BY_NAME[name] for name in ("SUM", "PROD", "MAX", "MIN"))
LAND, LOR, LXOR = (BY_NAME[name] for name in ("LAND", "LOR", "LXOR"))
BAND, BOR, BXOR = (BY_NAME[name] for name in ("BAND", "BOR", "BXOR"))
MAXLOC, MINLOC, REPLACE, NO_OP = (BY_NAME[name] for name in ("MAXLOC", "MINLOC", "REPLACE", "NO_OP"))
