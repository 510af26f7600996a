"""Errors name what the program needs to know: sender, tag, communicator, and the ranks' numbers there."""

import functools
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from virtual_run import Notes, platform, run

from spawnsim.comm import MAX, SUM
from spawnsim.comm.failures import Truncated, Unreadable
from spawnsim.errors import Deadlock, MismatchError, UsageError
from spawnsim.virtual import simulate
from spawnsim.virtual.programs import run_program


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
        Unreadable, match=r"80 bytes from rank 0 with tag 3 on MPI_COMM_WORLD are no pickled"
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
        assert "came from rank 0 with tag 0" in caught.value.__notes__[0]

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
        simulate(main, ranks=ranks, platform=platform(), recorder=Notes())
    return str(caught.value)


def test_a_receive_from_anybody_is_no_cycle():
    """All who could send have ended; the rank itself is among those who could, and no cycle."""
    text = stuck(lambda comm: comm.recv() if comm.rank == 0 else None, 4)
    assert "cycle" not in text
    assert "rank 0 waits for rank 1, 2, 3, whose programs have ended" in text


def test_a_rank_may_wait_for_itself():
    """A synchronous send to oneself."""
    text = stuck(lambda comm: comm.ssend(1, comm.rank), 1)
    assert "rank 0 waits for itself" in text


def test_ranks_of_other_communicators_are_told_in_the_world():
    """Rank 1 of the odd ones is rank 3."""

    def main(comm):
        odd = comm.Split(comm.rank % 2, comm.rank)
        if comm.rank == 1:
            odd.recv(source=1, tag=5)

    assert "recv(source=1 (rank 3 of the world), tag=5) on communicator" in stuck(main, 4)


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


def test_messages_on_another_communicator_are_told(tmp_path):
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
        run_program(path, ranks=4, recorder=Notes())
    notes = "\n".join(caught.value.__notes__)
    assert "rank 1 to rank 3, tag 5, on MPI_COMM_WORLD" in notes
    assert "rank 0 to rank 1, tag 6, on odd ones (ranks 1 and 3 of the world)" in notes


def test_a_call_by_a_library_is_told_by_the_line_of_the_program():
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
        simulate(wrong, ranks=12, platform=platform(), recorder=Notes())
    place = rf"{Path(__file__).name}:{wrong.__code__.co_firstlineno + 2} \(in functools.py:\d+\)"
    assert re.search(place, caught.value.__notes__[-1])
