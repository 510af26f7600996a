"""Phantoms: buffers without memory take as long as data, and are never taken for data."""

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim import PhantomArray
from spawnsim.comm import FLOAT, buffers
from spawnsim.comm.constants import IN_PLACE
from spawnsim.comm.failures import Truncated
from spawnsim.comm.ops import SUM
from spawnsim.errors import MismatchError
from spawnsim.phantoms import PhantomError
from spawnsim.virtual.mpi import payload
from spawnsim.virtual.mpi.requests import Request

RANKS = 12


def data(count):
    """Return an array."""
    return np.ones(count, np.float32)


def phantom(count):
    """Return what stands for it."""
    return PhantomArray(count, np.float32)


def meta(count):
    """Return torch's own."""
    return torch.empty(count, device="meta")


def every_call(make, count, comm):
    """Pass buffers through all kinds of calls."""
    size, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    one, other, row, rows = make(count), make(count), make(count * size), make(count * size)
    comm.Sendrecv(one, right, 0, other, left, 0)
    Request.Waitall([comm.Irecv(other, left, 1), comm.Isend(one, right, 1)])
    prepared = [
        comm.Recv_init([other, count - 1, "f"], left, 2),
        comm.Send_init([one, count - 1, "f"], right, 2),
    ]
    type(prepared[0]).Startall(prepared)
    Request.Waitall(prepared)
    request = comm.Issend(one, right, 3)
    comm.Mprobe(left, 3).Recv(other)
    request.Wait()
    comm.Bcast(one, 1)
    comm.Allreduce(one, other)
    comm.Iallreduce(IN_PLACE, one).Wait()
    comm.Reduce(one, other, SUM, 2)
    comm.Allgather(one, row)
    comm.Allgatherv(one, [row, [count] * size])
    comm.Gather(one, row if comm.rank == 1 else None, 1)
    comm.Scatter(row if comm.rank == 1 else None, one, 1)
    comm.Alltoall(row, rows)
    comm.Alltoallv([row, [count] * size], [rows, [count] * size])
    comm.Scan(one, other)
    comm.Exscan(one, other)
    comm.Reduce_scatter_block(row, one)
    window = comm.Win.Create(make(count), 4, comm=comm)
    window.Lock_all()
    window.Put(one, right)
    window.Get(other, left)
    window.Flush_all()
    window.Accumulate(one, right, op=SUM)
    window.Get_accumulate(one, other, right, op=SUM)
    window.Rget(other, left).Wait()
    window.Unlock_all()
    window.Free()
    comm.record(now=comm.clock.now())


@pytest.mark.parametrize("count", [100, 30_000], ids=["eager", "rendezvous"])
def test_phantoms_take_the_time_of_data(count):
    """All clocks, messages and bytes are those of data, to the bit; the digest covers sizes."""
    runs = [
        spawnsim.run(lambda comm, make=make: every_call(make, count, comm), ranks=RANKS)
        for make in (data, phantom, meta)
    ]
    first = runs[0]
    for each in runs[1:]:
        assert each.table["now"].tolist() == first.table["now"].tolist()
        assert all(
            each.totals[name] == first.totals[name]
            for name in ("virtual_seconds", "bytes", "messages", "events")
        )
        assert each.totals["digest"] == runs[1].totals["digest"]
    other = spawnsim.run(lambda comm: every_call(phantom, count + 1, comm), ranks=RANKS)
    assert other.totals["digest"] != runs[1].totals["digest"]


def mixed_message(comm):
    """Send a phantom, and receive data."""
    if comm.rank == 10:
        comm.Send(phantom(9), 11)
    if comm.rank == 11:
        comm.Recv(data(9), 10)


def mixed_root(comm):
    """Broadcast a phantom to data."""
    comm.Bcast(data(9) if comm.rank else phantom(9))


def mixed_window(comm):
    """Read data from a phantom's window."""
    window = comm.Win.Create(phantom(9), 1, comm=comm)
    window.Lock_all()
    if comm.rank == 11:
        window.Get(data(9), 10)
    window.Unlock_all()


MIXED = [
    (mixed_message, "rank 11 receives from rank 10"),
    (mixed_root, r"rank \d+ in Bcast\(root=0\)"),
    (mixed_window, "rank 11 reads from rank 10"),
]


@pytest.mark.parametrize(("program", "who"), MIXED)
def test_data_are_not_made_of_phantoms(program, who):
    """The error names both ranks."""
    with pytest.raises(PhantomError, match=who + ".*has no data"):
        spawnsim.run(program, ranks=RANKS)


def test_phantoms_and_data_are_not_summed():
    """The error names two ranks that differ."""
    with pytest.raises(MismatchError, match=r"phantom MPI_FLOAT.* where rank \d+ called"):
        spawnsim.run(lambda comm: comm.Allreduce(IN_PLACE, phantom(9) if comm.rank else data(9)), ranks=RANKS)


def test_a_header_in_a_phantom_is_data():
    """What was stored travels, is overwritten, and is read again; nothing else can be."""
    memory = PhantomArray(1 << 40, np.uint8)
    memory[10:20] = np.arange(10, dtype=np.uint8)
    memory[12:14] = np.full(2, 99, np.uint8)
    moved = PhantomArray(1 << 40, np.uint8)
    moved[5 : 5 + 30] = memory[8:38]
    assert np.asarray(moved[7:17]).tolist() == [0, 1, 99, 99, 4, 5, 6, 7, 8, 9]
    assert moved[9:11].view(np.uint16).tobytes() == b"cc"
    with pytest.raises(PhantomError):
        moved[6:17].tobytes()
    moved[0:100] = PhantomArray(100, np.uint8)
    with pytest.raises(PhantomError):
        np.asarray(moved[7:17])

    def main(comm):
        room = PhantomArray(1 << 40, np.uint8)
        comm.Sendrecv(memory, (comm.rank + 1) % RANKS, 0, room, (comm.rank - 1) % RANKS, 0)
        found = np.empty(4, np.uint8)
        window = comm.Win.Create(room, 1, comm=comm)
        window.Fence()
        window.Get(found, (comm.rank + 1) % RANKS, 12)
        window.Fence()
        assert found.tolist() == [99, 99, 4, 5]

    spawnsim.run(main, ranks=RANKS, deadline_s=1e6)


def test_arithmetic_with_phantoms_keeps_sizes():
    """Results are phantoms of numpy's dtype; numpy refuses to mix them with data."""
    one, two = PhantomArray(7, np.float32), PhantomArray(7, np.float64)
    assert ((one - two) * 0.5).dtype == np.float64
    assert np.isfinite(one).all() and (one == two).size == 7
    assert np.concatenate([one, one[2:4]]).nbytes == 36
    with pytest.raises(PhantomError):
        one + np.ones(7)


def test_what_is_stored_travels():
    """As it was when it was sent; a phantom that stores nothing takes away what was there."""

    def main(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        out, into = phantom(3000), phantom(3000)
        out[:2] = np.array([comm.rank, 7], np.float32)
        request = comm.Isend(out, right)
        out[:2] = np.array([-1, -1], np.float32)
        comm.Recv(into, left)
        request.Wait()
        assert np.frombuffer(into.data, np.float32).tolist() == [left, 7]
        comm.Sendrecv(phantom(3000), right, 0, into, left, 0)
        assert not into.data
        comm.Sendrecv(out[:10], right, 0, into[10:20], left, 0)
        assert not into.data
        assert np.frombuffer(into[10:].data, np.float32).tolist() == [-1, -1]

    spawnsim.run(main, ranks=RANKS)


def test_a_phantom_that_is_too_long_is_truncated():
    """Also where there is no room at all: an empty phantom is none, and is told no other error than an array is."""

    def main(comm, make):
        for room in (make(0), [make(7), 0, FLOAT], make(6)):
            request = comm.Isend(make(7), comm.rank)
            with pytest.raises(Truncated, match="a message of 28 bytes does not fit a buffer of"):
                comm.Recv(room, comm.rank)
            request.Wait()

    for make in (data, phantom):
        spawnsim.run(main, ranks=RANKS, parameters={"make": make})


def test_the_short_way(monkeypatch):
    """Phantoms and tensors as they are need no more than an array does; [array, its length] is not taken apart."""

    def taken_apart(*_, **__):
        raise AssertionError

    def as_buffer(spec, **how):
        assert type(spec) is list
        return buffers.as_buffer(spec, **how)

    monkeypatch.setattr(buffers, "_parts", taken_apart)
    monkeypatch.setattr(payload, "as_buffer", as_buffer)

    def main(comm, make):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        out, into = make(30_000), make(30_000)
        comm.Sendrecv(out, right, 0, into, left, 0)
        Request.Waitall([comm.Irecv(into, left, 1), comm.Isend(out, right, 1)])
        comm.record(now=comm.clock.now())

    times = [
        spawnsim.run(lambda comm, make=make: main(comm, make), ranks=RANKS).table["now"].tolist()
        for make in (data, phantom, torch.ones, lambda count: [data(count), count])
    ]
    assert times[1:] == times[:1] * 3
