"""Errors name what the program needs to know: sender, tag, communicator, and the ranks' numbers there."""

import functools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.virtual_run import Notes, platform, run

from spawnsim.comm import DOUBLE, MAX, SUM
from spawnsim.comm.failures import Truncated, Unreadable
from spawnsim.errors import Deadlock, MismatchError, UsageError
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate
from spawnsim.virtual.scripts import run_program


@pytest.mark.parametrize("call", ["reduce", "allreduce", "scan", "exscan"])
def test_reductions_of_objects_agree_on_the_operation(call):
    """The upper-case calls always did; here all ranks got the sum."""

    def main(comm):
        getattr(comm, call)(comm.rank, op=MAX if comm.rank == 1 else SUM)

    with pytest.raises(MismatchError, match=rf"rank 1 calls {call}\(.*op=MAX\) .* where rank 0 called"):
        run(main, 3)


def test_functions_of_the_program_reduce_objects():
    """Each rank has a function of its own; they cannot be compared."""

    def main(comm):
        assert comm.allreduce(comm.rank, op=lambda a, b: a + b) == 3

    run(main, 3)


@pytest.mark.parametrize(
    "call", [lambda comm, buf: comm.Recv(buf, 0), lambda comm, buf: comm.Irecv(buf, 0).Wait()]
)
def test_a_message_that_is_too_long_is_named(call):
    """By sender, tag and communicator."""

    def main(comm):
        sub = comm.Split(0, -comm.rank)  # the other way round
        if sub.rank == 0:
            sub.Send(np.zeros(8), 1, tag=7)
        else:
            call(sub, np.zeros(4))

    with pytest.raises(
        Truncated, match=r"64 bytes .* 32 bytes; it is from rank 0 with tag 7 on communicator \d+"
    ):
        run(main, 2)


@pytest.mark.parametrize(
    "call", [lambda comm, buf: comm.Bcast(buf), lambda comm, buf: comm.Ibcast(buf).Wait()]
)
def test_a_collective_that_is_too_long_is_named(call):
    """By its call."""

    def main(comm):
        call(comm, np.zeros(4 if comm.rank else 8))

    with pytest.raises(Truncated, match=r"it is from Bcast\(root=0\) on MPI_COMM_WORLD"):
        run(main, 2)


@pytest.mark.parametrize("call", [lambda comm: comm.recv(source=0), lambda comm: comm.irecv(source=0).wait()])
def test_numbers_are_no_object(call):
    """What Send has sent is not for recv; mpi4py raises a bare UnpicklingError."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(np.ones(10), 1, tag=3)
        else:
            call(comm)

    with pytest.raises(
        Unreadable, match=r"80 bytes from rank 0 with tag 3 on MPI_COMM_WORLD are not a pickled"
    ) as caught:
        run(main, 2)
    assert isinstance(caught.value, pickle.UnpicklingError)


class Unhappy:
    """Cannot be made anew."""

    def __reduce__(self):
        return int, ("no number",)


def test_what_an_object_raises_is_kept():
    """With a note about where it came from."""

    def main(comm):
        if comm.rank == 0:
            comm.send(Unhappy(), 1)
            return
        with pytest.raises(ValueError, match="invalid literal") as caught:
            comm.recv(source=0)
        assert "the object from rank 0 with tag 0" in caught.value.__notes__[0]

    run(main, 2)


def test_requests_that_are_none():
    """All of the list is looked at before anything is done."""

    def main(comm):
        request = comm.irecv(source=comm.rank)
        comm.send("x", comm.rank)
        for call in ("Waitall", "Waitany", "Waitsome", "Testall", "Testany", "Testsome"):
            with pytest.raises(TypeError, match="item 1 of the requests is of type NoneType") as caught:
                getattr(type(request), call)([request, None])
            assert isinstance(caught.value, UsageError)
        assert request.wait() == "x"

    run(main, 1)


def stuck(main, ranks):
    """Return what a deadlock's report says."""
    with pytest.raises(Deadlock) as caught:
        simulate(main, Scenario(ranks, platform()), recorder=Notes())
    return str(caught.value)


def test_a_receive_from_anybody_is_no_cycle():
    """All who could send have ended; the rank itself is among those who could, and no cycle."""
    text = stuck(lambda comm: comm.recv() if comm.rank == 0 else None, 4)
    assert "cycle" not in text
    assert "rank 0 waits for ranks 1, 2, 3, whose programs have ended" in text


def test_a_rank_may_wait_for_itself():
    """A synchronous send to oneself."""
    text = stuck(lambda comm: comm.ssend(1, comm.rank), 1)
    assert "rank 0 waits for itself" in text


def test_ranks_of_other_communicators_are_reported_in_the_world():
    """Rank 1 of the odd ones is rank 3."""

    def main(comm):
        odd = comm.Split(comm.rank % 2, comm.rank)
        if comm.rank == 1:
            odd.recv(source=1, tag=5)

    assert "recv(source=1 (rank 3 of the world), tag=5) on communicator" in stuck(main, 4)


def test_who_holds_a_lock_is_named():
    """Rank 2 waits for rank 0, which holds the lock; it was told to wait for rank 1, whose part is locked."""

    def main(comm):
        win = comm.Win.Allocate(8, comm=comm)
        if comm.rank == 0:
            win.Lock(1)
            comm.barrier()
            comm.recv(source=2)
        else:
            comm.barrier()
        if comm.rank == 2:
            win.Lock(1)
            comm.send(1, dest=0)

    text = stuck(main, 4)
    assert "a cycle of waits: rank 0 → rank 2 → rank 0" in text
    assert "Lock(target=1) on window on MPI_COMM_WORLD, locked by rank 0 " in text


def test_two_groups_without_a_root():
    """Where no rank gives MPI.ROOT, the error says who gives what."""

    def main(comm):
        half = comm.Split(comm.rank % 2)
        half.Create_intercomm(0, comm, 1 - comm.rank % 2).Bcast(np.zeros(1), root=0)

    with pytest.raises(
        UsageError, match=r"rank 0 of the other group has contributed nothing: .* root=MPI.ROOT"
    ):
        run(main, 4)


def test_a_lock_has_no_tag():
    """Accesses to windows name their target."""

    def main(comm):
        window = comm.Win.Allocate(8, comm=comm)
        window.Lock(comm.rank)
        comm.barrier()
        window.Lock(1 - comm.rank)

    text = stuck(main, 2)
    assert "Lock(target=1) on" in text
    assert "tag" not in text


def test_messages_on_another_communicator_are_reported(tmp_path):
    """Sent on the world, awaited on a part of it."""
    path = tmp_path / "script.py"
    path.write_text(
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "odd = comm.Split(comm.rank % 2, comm.rank)\n"
        "odd.Set_name('odd ones')\n"
        "if comm.rank == 1: comm.send('x', 3, 5); odd.send('y', 1, 6)\n"
        "if comm.rank == 3: odd.recv(source=0, tag=5)\n"
    )
    with pytest.raises(
        Deadlock, match=r"recv\(source=0 \(rank 1 of the world\), tag=5\) on odd ones"
    ) as caught:
        run_program(path, [], Scenario(4), recorder=Notes())
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 to rank 3, tag 5, on MPI_COMM_WORLD" in notes
    assert "rank 0 to rank 1, tag 6, on odd ones (ranks 1 and 3 of the world)" in notes


def test_a_call_by_a_library_is_reported_by_the_line_of_the_program():
    """Which line of the library it was comes after; both in a deadlock's table and in an error's note."""

    def main(comm):
        if comm.rank == 0:
            functools.singledispatch(comm.recv)(None)

    place = rf"{Path(__file__).name}:{main.__code__.co_firstlineno + 2} \(in functools.py:\d+\)"
    assert re.search(rf"rank 0 .* {place}$", stuck(main, 4), re.MULTILINE)

    def wrong(comm):
        if comm.rank == 11:
            functools.singledispatch(comm.isend)(None, dest=99)

    with pytest.raises(UsageError) as caught:
        simulate(wrong, Scenario(12, platform()), recorder=Notes())
    place = rf"{Path(__file__).name}:{wrong.__code__.co_firstlineno + 2} \(in functools.py:\d+\)"
    assert re.search(place, caught.value.__notes__[-1])


def mistakes(main, size=12, **setting):
    """Return what the totals of a run tell of a program's mistakes."""
    return run(main, size, **setting)[0].mistakes


def blocking(comm, buf):
    """Receive in one call."""
    comm.Recv(buf, 0, 3)


def begun(comm, buf):
    """Receive in two calls."""
    comm.Irecv(buf, 0, 3).Wait()


def probed(comm, buf):
    """Receive what a probe has found."""
    comm.Mprobe(0, 3).Recv(buf)


@pytest.mark.parametrize("receive", [blocking, begun, probed])
@pytest.mark.parametrize(
    "sent",
    [
        np.ones(3000),
        torch.ones(3000, dtype=torch.float64),
        [np.ones(3000), DOUBLE],
        [np.ones(3000), 3000, DOUBLE],
    ],
    ids=["numpy", "torch", "type", "count"],
)
@pytest.mark.parametrize(
    "into",
    [lambda n: np.zeros(n, np.int64), lambda n: torch.zeros(2 * n, dtype=torch.int32)],
    ids=["int64", "int32"],
)
def test_numbers_of_another_type_are_reported(receive, sent, into):
    """A type of equal length made silent garbage, as on real ranks; each line of a program is told once."""

    def main(comm):
        if comm.rank:
            receive(comm, into(3000))
            receive(comm, into(3000))
            receive(comm, np.zeros(3000))
            receive(comm, torch.zeros(3000, dtype=torch.float64))
            receive(comm, np.zeros(24_000, np.uint8))
        else:
            for rank in range(1, comm.size):
                for _ in range(5):
                    comm.Send(sent, rank, 3)

    (only,) = mistakes(main)
    assert re.fullmatch(
        r"rank 1 at \S+ s \(test_what_errors_say.py:\d+\) received float64 from rank 0 with tag 3 on MPI_COMM_WORLD "
        r"into int(32|64): MPI copies the bytes and does not convert them",
        only,
    )


def test_what_may_differ_is_not_reported():
    """Another type of the same numbers, bytes, nothing at all, and objects."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(np.ones(40, np.int64), 1)
            comm.Send(np.ones(0, np.int64), 1)
            comm.Send(np.ones(40, np.float32), 1)
            comm.Send(bytearray(160), 1)
        else:
            comm.Recv(np.ones(40, np.longlong), 0)
            comm.Recv(np.ones(0, np.float32), 0)
            comm.Recv(bytearray(160), 0)
            comm.Recv(np.ones(40, np.float32), 0)

    assert mistakes(main, 2) == ()


@pytest.mark.parametrize("nbytes", [16, 800, 400_000])
@pytest.mark.parametrize("call", ["Isend", "Issend"])
@pytest.mark.parametrize(
    "of", [lambda a: a, torch.from_numpy, lambda a: [a, DOUBLE]], ids=["numpy", "torch", "type"]
)
def test_a_buffer_that_changes_while_it_is_sent_is_reported(call, nbytes, of):
    """The simulator sends the old values, which hid the mistake."""
    got = {}

    def main(comm):
        if comm.rank == 0:
            array = np.ones(nbytes // 8)
            requests = [getattr(comm, call)(of(array), rank) for rank in range(1, comm.size)]
            requests[0].Wait()
            array += 1e-9
            for request in requests[1:]:
                request.Wait()
        else:
            got[comm.rank] = np.empty(nbytes // 8)
            comm.Recv(got[comm.rank], 0)

    (only,) = mistakes(main)
    assert f"changed the buffer of its {call} to rank 2 before its Wait or Test" in only
    assert all((array == 1).all() for array in got.values())


@pytest.mark.parametrize("place", [0, 1, 4097, 65_535])
def test_each_byte_of_a_short_buffer_is_watched(place):
    """Not a sample of them: programs change what belongs to one neighbour."""

    def main(comm):
        array = np.zeros(1 << 16, np.uint8)
        request = comm.Isend(array, comm.rank)
        array[place] = 1
        comm.Recv(np.empty_like(array), comm.rank)
        request.Wait()

    assert len(mistakes(main, 1)) == 1


def test_buffers_that_are_left_alone_are_not_reported():
    """Nor those that the call itself fills, nor gaps."""

    def main(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        array = np.full(5000, comm.rank, float)
        comm.Isendrecv_replace(array, right, 0, left).Wait()
        comm.Sendrecv_replace(array, right, 0, left)
        every = DOUBLE.Create_vector(2500, 1, 2).Commit()
        sending = comm.Isend([array, 1, every], right)
        array[1::2] = -1
        comm.Recv([np.zeros(5000), 1, every], left)
        sending.Wait()
        again = comm.Send_init(array, right, 7)
        for number in range(3):
            array[:] = number
            again.Start()
            comm.Recv(np.zeros(5000), left, 7)
            again.Wait()

    assert mistakes(main) == ()


def test_a_crash_tells_of_the_mistakes_before_it():
    """They may be its cause."""

    def main(comm):
        if comm.rank == 0:
            comm.Send(np.ones(100), 1)
        if comm.rank == 1:
            comm.Recv(np.zeros(100, np.int64), 0)
            comm.recv(source=0)

    with pytest.raises(Deadlock) as caught:
        run(main, 12)
    assert any("warning: rank 1" in note and "received float64" in note for note in caught.value.__notes__)


def test_a_datatype_may_be_freed_while_its_message_is_under_way():
    """What is compared when a request is collected is kept from its start."""

    def main(comm):
        rows, got = np.arange(12.0), np.zeros(12)
        other, kind = 1 - comm.rank, DOUBLE.Create_contiguous(12).Commit()
        requests = [comm.Irecv([got, 1, kind], other), comm.Isend([rows, 1, kind], other)]
        kind.Free()
        for request in requests:
            request.Wait()
        assert (got == rows).all()

    assert mistakes(main, 2) == ()
