"""The one-sided calls themselves: Put, Get and the atomic ones.

This room knows buffers at both ends. It must not know locks or times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from spawnsim.comm import constants
from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.constants import PROC_NULL
from spawnsim.comm.datatypes import Datatype
from spawnsim.comm.failures import ERR_COUNT, ERR_RMA_RANGE, ERR_TYPE, ArgumentError, CallError
from spawnsim.comm.integers import AINT, integer
from spawnsim.comm.memory import address, as_bytes
from spawnsim.comm.ops import NO_OP, REPLACE, SUM, Op
from spawnsim.comm.regions import Buffer
from spawnsim.comm.specs import locate
from spawnsim.comm.vectors import as_target
from spawnsim.errors import ParameterError
from spawnsim.virtual.comm.plans import agree
from spawnsim.virtual.onesided.epochs import Epochs
from spawnsim.virtual.onesided.service import Access, Serve
from spawnsim.virtual.requests import Request


class Accesses(Epochs):
    """Put, Get and the atomic calls."""

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Write to a part. The origin's buffer is free again at once."""
        self._later(self._put(origin, target_rank, target, REPLACE), target_rank)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Read from a part. The data are in the origin's buffer after the next flush, unlock, fence or complete."""
        self._later(self._get(origin, target_rank, target), target_rank)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> None:
        """Combine with a part, atomically."""
        self._later(self._put(origin, target_rank, target, op), target_rank)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> None:
        """Combine with a part and return what was there, atomically."""
        self._later(self._swap(origin, result, target_rank, target, op=op), target_rank)

    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Start Put; the request is over when the data are written."""
        return self._request("Rput", self._put(origin, target_rank, target, REPLACE), target_rank)

    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Request:
        """Start Get; the request is over when the data are there."""
        return self._request("Rget", self._get(origin, target_rank, target), target_rank)

    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Op = SUM) -> Request:
        """Start Accumulate."""
        return self._request("Raccumulate", self._put(origin, target_rank, target, op), target_rank)

    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Op = SUM
    ) -> Request:
        """Start Get_accumulate."""
        return self._request(
            "Rget_accumulate", self._swap(origin, result, target_rank, target, op=op), target_rank
        )

    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Op = SUM
    ) -> None:
        """Combine one element and return what was there, atomically."""
        _check_single("Fetch_and_op", result, *([] if op == NO_OP else [origin]))
        self._later(
            self._swap(origin, result, target_rank, [integer(target_disp, AINT), 1], op=op), target_rank
        )

    def Compare_and_swap(
        self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0
    ) -> None:
        """Replace one element if it equals `compare`, and return what was there, atomically."""
        _check_single("Compare_and_swap", result, origin, compare)
        target_rank, target_disp = integer(target_rank), integer(target_disp, AINT)
        if target_rank == PROC_NULL:
            return
        new, expected = as_buffer(origin).pack()[:1], as_buffer(compare).pack()[:1]
        found = as_buffer(result, writable=True)
        part = self._part(target_rank, [target_disp, 1], found, "Compare_and_swap")

        def serve(data: Any) -> Any:
            there = part.pack()
            if there.tobytes() == data[1].tobytes():
                part.unpack(data[0])
            return there

        sizes = new.nbytes + expected.nbytes, new.nbytes
        access = self._access("Compare_and_swap", sizes, serve, [new, expected])
        self._later((self._send(target_rank, access), found.unpack), target_rank)

    # -- how they are made -----------------------------------------------------------------------------------

    def _put(self, origin: Any, rank: int, target: Any, op: Op) -> Any:
        rank = integer(rank)
        if rank == PROC_NULL:
            return None
        own = as_buffer(origin)
        part = self._part(rank, target, own, "Put")
        _check_op(op, own, part)
        call = "Put" if op == REPLACE else "Accumulate"
        access = self._access(call, (own.nbytes, 0), lambda data: _apply(op, part, data), own.pack())
        return self._send(rank, access), _nothing

    def _get(self, origin: Any, rank: int, target: Any) -> Any:
        rank = integer(rank)
        if rank == PROC_NULL:
            return None
        own = as_buffer(origin, writable=True)
        part = self._part(rank, target, own, "Get")
        access = self._access("Get", (0, part.nbytes), lambda data: part.pack())
        return self._send(rank, access), own.unpack

    def _swap(self, origin: Any, result: Any, rank: int, target: Any, *, op: Op) -> Any:
        rank = integer(rank)
        if rank == PROC_NULL:
            return None
        found = as_buffer(result, writable=True)
        data = None if op == NO_OP else as_buffer(origin).pack()
        part = self._part(rank, target, found, "Get_accumulate")
        _check_op(op, found, part)

        def serve(data: Any) -> Any:
            there = part.pack()
            if data is not None:
                _apply(op, part, data)
            return there

        sizes = 0 if data is None else data.nbytes, found.nbytes
        access = self._access("Get_accumulate", sizes, serve, data)
        return self._send(rank, access), found.unpack

    def _part(self, rank: int, target: Any, own: Buffer, operation: str) -> Buffer:
        """Return the buffer in the target's memory that an access means."""
        self._check(rank, operation)
        displacement, count, datatype = as_target(target, own)
        part = self._windows.targets[rank]
        start, memory = displacement * part.disp_unit, part.memory
        if self._windows.flavor == constants.WIN_FLAVOR_DYNAMIC:
            memory, start = _region(part.regions, displacement)
        return _located(memory, datatype, start, count, what=f"{operation} to rank {rank} of {self._label}")

    def _access(self, call: str, nbytes: tuple[int, int], serve: Serve, data: Any = None) -> Access:
        return Access(self._windows.world, call, nbytes, serve, data=data)

    def _send(self, rank: int, access: Access) -> Access:
        return self._windows.request(self._comm._rank, rank, access)

    def _later(self, access: Any, rank: int) -> None:
        if access is not None:
            self._under_way.append((integer(rank), *access))

    def _request(self, operation: str, access: Any, rank: int) -> Request:
        world, rank = self._windows.world, integer(rank)
        if access is None:
            return Request.over(world)
        self._later(access, rank)
        begun = self._under_way[-1]
        return Request.start(
            world, access[0], self._waiting(operation, rank), lambda status: self._take(begun)
        )


def _nothing(answer: Any) -> None:
    """Deliver nothing."""


def _check_op(op: Op, own: Buffer, part: Buffer) -> None:
    """Refuse an operation that does not take the types, at the call and not when the target serves it.

    Derived types are combined element by element: all must be of one predefined type, the same at both ends.
    """
    if not own.nbytes or op in (REPLACE, NO_OP):
        return
    ours, theirs = own.datatype.basic, part.datatype.basic
    if ours is None or theirs is None or ours.dtype != theirs.dtype:
        kinds = " and ".join(kind.Get_name() if kind else "a mixed type" for kind in (ours, theirs))
        raise CallError(ERR_TYPE, f"{op.name or 'an operation'} needs elements of one type: got {kinds}")
    op.check(ours)


def _check_single(call: str, result: Any, *others: Any) -> None:
    """Refuse anything but one element, of one type everywhere."""
    found = as_buffer(result, writable=True)
    if found.count != 1:
        raise ArgumentError(ERR_COUNT, f"{call} takes one element, but the result's buffer has {found.count}")
    for other in others:
        agree(call, as_buffer(other), found)


def _apply(op: Op, part: Buffer, data: Any) -> None:
    """Combine data with a target's memory."""
    if not part.nbytes:
        return
    basic = part.datatype.basic
    if op == REPLACE or basic is None:
        part.unpack(data)
    else:
        part.unpack(op.reduce(_elements(data, basic), _elements(part.pack(), basic), basic))


def _elements(data: Any, basic: Datatype) -> Any:
    """Return what travels as an array of elements of a predefined type."""
    if data.dtype == basic.dtype:
        return data
    if basic.dense:
        return data.view(basic.dtype)
    found = np.zeros(len(data) // basic.size, basic.dtype)  # a pair travels without its padding
    basic.layout.scatter(as_bytes(found), data)
    return found


def _located(memory: Any, datatype: Datatype, start: int, count: int, *, what: str) -> Buffer:
    try:
        return locate(memory, datatype, start, (count, 1))
    except ParameterError as error:
        raise CallError(ERR_RMA_RANGE, f"{what}: {error}") from None


def _region(regions: Sequence[Any], place: int) -> tuple[Any, int]:
    for region in regions:
        first = address(region)
        if first <= place <= first + region.nbytes:
            return region, place - first
    raise CallError(ERR_RMA_RANGE, f"address {place:#x} is in no memory that the target has attached")
