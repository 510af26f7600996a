"""Sums of large arrays through memory that all ranks of one node share.

An MPI library moves each byte of an Allreduce between two processes several times; here each rank lays what others will
sum where all see it, sums its slice of everyone's, and takes theirs: the floor is one pass to read and one to write.
The order of the sums is the tree in which virtual ranks and MPICH sum, so the bits are the same with and without (Open
MPI takes a ring for some sizes where the ranks are no power of two). Knows mpi4py's shared windows and barriers; knows
no watchdog and no deadline.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from spawnsim.comm.buffers import as_buffer
from spawnsim.comm.predefined import NAMED
from spawnsim.comm.reductions import tree_in_place

if TYPE_CHECKING:
    from spawnsim.real.mpi.home import Home

Array = NDArray[Any]
LARGE_NBYTES = 1 << 17
"""Where two barriers begin to cost less than what the library does."""
CHUNK_NBYTES = 1 << 21
"""Bytes a round: they stay in the caches between being laid out, summed and taken, and ranks meet seldom enough."""
HOUSE_SHARE = 0.25
"""Of the free shared memory of a node: the library needs some of its own, and an overdrawn page kills the process."""


class Library:
    """The way through the library, for communicators with ranks on several nodes."""

    def __init__(self, raw: MPI.Intracomm) -> None:
        self._raw = raw

    def allreduce(self, contribution: Array, into: Array) -> None:
        """Put the sum of all ranks' contributions into `into`."""
        self._raw.Allreduce(MPI.IN_PLACE if contribution is into else contribution, into)

    def free(self) -> None:
        """Nothing is held."""


class Node:
    """The shared memory of a communicator whose ranks all live on one node: two halves a rank, used in turn."""

    def __init__(self, raw: MPI.Intracomm, home: Home) -> None:
        self.label, self._home = f"{raw.Get_name()}/node{raw.Get_size()}", home
        self._raw, self._rank, self._size = raw, raw.Get_rank(), raw.Get_size()
        self._win = MPI.Win.Allocate_shared(2 * CHUNK_NBYTES, 1, comm=raw)
        self._win.Lock_all(MPI.MODE_NOCHECK)
        self._halves = [
            np.asarray(self._win.Shared_query(rank)[0], np.uint8).reshape(2, CHUNK_NBYTES)
            for rank in range(self._size)
        ]
        self._turn = 0
        home.windows.append(self)

    @classmethod
    def of(cls, raw: MPI.Intracomm, home: Home) -> Node | Library:
        """Return the way for large sums on this communicator; collective."""
        return cls(raw, home) if _on_one_node(raw) else Library(raw)

    def allreduce(self, contribution: Array, into: Array) -> None:
        """Put the sum of all ranks' contributions into `into`; both flat, of one dtype, and perhaps the same memory."""
        step, in_place = CHUNK_NBYTES // contribution.itemsize, contribution is into
        for start in range(0, contribution.size, step):
            piece = slice(start, start + step)
            self._round(contribution[piece], into[piece], in_place=in_place)

    def _round(self, contribution: Array, into: Array, *, in_place: bool) -> None:
        """One chunk. A half is written again only two rounds later, when a barrier says that all have taken it.

        The own slice stays where it is: it need not be seen by others before it is summed, nor be taken afterwards.
        """
        self._turn ^= 1
        rank, length, kind = self._rank, contribution.size, contribution.dtype
        low, high = rank * length // self._size, (rank + 1) * length // self._size
        parts = [half[self._turn, : length * kind.itemsize].view(kind) for half in self._halves]
        _copy_but(low, high, contribution, parts[rank])
        if not in_place:
            into[low:high] = contribution[low:high]
        self._meet()
        slices = [part[low:high] for part in parts]  # nobody else touches these
        shared, slices[rank] = slices[-1], into[low:high]
        total = tree_in_place(slices, _add)
        if total is shared:
            into[low:high] = total
        else:
            shared[:] = total
        self._meet()
        _copy_but(low, high, parts[-1], into)

    def _meet(self) -> None:
        self._win.Sync()
        self._raw.Barrier()
        self._win.Sync()

    def free(self) -> None:
        """Leave the communicator's shared memory; collective."""
        self._home.windows.remove(self)
        self.release()

    def release(self) -> None:
        """Give the memory back; collective, and works when the communicator is gone already."""
        self._halves = []
        self._win.Unlock_all()
        self._win.Free()


def _copy_but(low: int, high: int, source: Array, to: Array) -> None:
    """Copy all but what lies from `low` to `high`."""
    to[:low], to[high:] = source[:low], source[high:]


def _add(one: Array, other: Array) -> Array:
    return np.add(one, other, out=other)


def _on_one_node(raw: MPI.Intracomm) -> bool:
    """Return whether all ranks share a node with room for the memory; collective, the same on all ranks."""
    if raw.Get_size() == 1:
        return False
    node = raw.Split_type(MPI.COMM_TYPE_SHARED)
    fits = node.Get_size() == raw.Get_size() and _room(2 * CHUNK_NBYTES * raw.Get_size())
    node.Free()
    return bool(raw.allreduce(fits, MPI.LAND))


def _room(nbytes: int) -> bool:
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:  # the library keeps its shared memory elsewhere, and sees to it itself
        return True
    return nbytes < HOUSE_SHARE * disk.f_bavail * disk.f_frsize


def arrays(sendbuf: Any, recvbuf: Any) -> tuple[Array, Array] | None:
    """Return contribution and result as flat arrays if they are large and of one type that numpy sums, else None.

    Both in mpi4py's words. All ranks of an Allreduce get the same answer, however each spells its buffers.
    """
    into = _array(recvbuf)
    if into is None or into.nbytes < LARGE_NBYTES or into.dtype.kind not in "fiu" or into.itemsize < 4:
        return None
    given = into if sendbuf is MPI.IN_PLACE else _array(sendbuf)
    same = given is not None and given.dtype == into.dtype and given.size == into.size
    return (given, into) if same and given is not None else None


def _array(spec: Any) -> Array | None:
    """Return the memory of a specification, or None if there is none in a row of one predefined type."""
    try:
        if type(spec) in (list, tuple):
            spec = [_named(part) if isinstance(part, MPI.Datatype) else part for part in spec]
        buffer = as_buffer(spec)
    except (TypeError, ValueError, BufferError, KeyError):  # the library says what is wrong with it
        return None
    return buffer.array if buffer.dtype is not None and buffer.datatype.is_predefined else None


def _named(datatype: MPI.Datatype) -> Any:
    """Return spawnsim's type of the same name; a derived one is no type that is summed."""
    return NAMED[datatype.Get_name()]
