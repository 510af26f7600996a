"""Errors of MPI programs by class, each next to a correct twin: every error is named, and no twin causes an alarm.

The classes are those of the MPI Bugs Initiative: invalid parameters, unmatched parameters, call ordering, matching of
messages, local concurrency (buffers in use), requests, resource leaks, epochs and global concurrency.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

import spawnsim
from spawnsim.errors import SpawnsimError

HEAD = """
from mpi4py import MPI
import numpy as np

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
a, b, many = np.ones(4), np.zeros(4), np.zeros(4 * size)
big, room = np.ones(100_000), np.zeros(100_000)
def window():
    return MPI.Win.Allocate(64, 8, comm=comm)
"""


class Pair(NamedTuple):
    """An erroneous program, a correct one, and what is said of the first."""

    wrong: str
    right: str
    said: str


def on(rank: int, text: str) -> str:
    """Return lines that one rank executes."""
    return f"if rank == {rank}:\n" + "".join(f"    {line}\n" for line in text.splitlines())


SENDS = {
    "Send": "comm.Send(a, {0}, {1})",
    "Ssend": "comm.Ssend(a, {0}, {1})",
    "Isend": "comm.Isend(a, {0}, {1}).Wait()",
    "Issend": "comm.Issend(a, {0}, {1}).Wait()",
    "send": "comm.send(7, {0}, {1})",
}
RECEIVES = {
    "Recv": "comm.Recv(b, {0}, {1})",
    "Irecv": "comm.Irecv(b, {0}, {1}).Wait()",
    "recv": "comm.recv(None, {0}, {1})",
}
ROOTED = {
    "Bcast": "comm.Bcast(a, root={0})",
    "Gather": "comm.Gather(a, many, root={0})",
    "Scatter": "comm.Scatter(many, b, root={0})",
    "Reduce": "comm.Reduce(a, b, root={0})",
    "bcast": "comm.bcast(1, root={0})",
    "reduce": "comm.reduce(1, root={0})",
}
COLLECTIVES = {
    "Barrier": "comm.Barrier()",
    "Allreduce": "comm.Allreduce(a, b)",
    "Allgather": "comm.Allgather(a, many)",
    "Alltoall": "comm.Alltoall(many, many.copy())",
    "Bcast": "comm.Bcast(a)",
    "Scan": "comm.Scan(a, b)",
    "Reduce": "comm.Reduce(a, b)",
    "Gather": "comm.Gather(a, many)",
}
STARTED = {
    "Ibcast": ("comm.Ibcast(a)", "a"),
    "Ireduce": ("comm.Ireduce(a, b)", "a"),
    "Igather": ("comm.Igather(a, many)", "a"),
    "Iallreduce": ("comm.Iallreduce(a, b)", "a"),
    "Iallgather": ("comm.Iallgather(a, many)", "many"),
    "Iscan": ("comm.Iscan(a, b)", "b"),
    "Ialltoall": ("comm.Ialltoall(many, many.copy())", "many"),
}


def invalid_parameters() -> dict[str, Pair]:
    """Ranks, tags, roots, counts, datatypes, operations and handles that do not exist."""
    found = {}
    for name, call in SENDS.items():
        receive = "comm.recv(source=0)" if name == "send" else "comm.Recv(b, 0)"
        right = on(0, call.format(1, 5)) + on(1, receive)
        found[f"{name} to a rank that is not there"] = Pair(on(0, call.format("size", 5)), right, "is not in")
        found[f"{name} with a negative tag"] = Pair(on(0, call.format(1, -5)), right, "tag -5 is outside")
    for name, call in RECEIVES.items():
        right = on(1, "comm.send(1, 0, 5)" if name == "recv" else "comm.Send(a, 0, 5)") + on(
            0, call.format(1, 5)
        )
        found[f"{name} from a rank that is not there"] = Pair(
            on(0, call.format("size", 5)), right, "is not in"
        )
    for name, call in ROOTED.items():
        found[f"{name} with a root that is not there"] = Pair(
            call.format("size"), call.format(1), "is not in"
        )
    found["an operation that does not take the type"] = Pair(
        "comm.Allreduce(a, b, MPI.BAND)", "comm.Allreduce(a, b, MPI.MAX)", "BAND does not take"
    )
    found["a datatype that is not committed"] = Pair(
        "t = MPI.DOUBLE.Create_contiguous(2)\ncomm.Bcast([a, 2, t])\nt.Free()",
        "t = MPI.DOUBLE.Create_contiguous(2).Commit()\ncomm.Bcast([a, 2, t])\nt.Free()",
        "not been committed",
    )
    found["a datatype that was freed"] = Pair(
        "t = MPI.DOUBLE.Create_contiguous(2).Commit()\nt.Free()\ncomm.Bcast([a, 2, t])",
        "t = MPI.DOUBLE.Create_contiguous(2).Commit()\ncomm.Bcast([a, 2, t])\nt.Free()",
        "null or was freed",
    )
    found["a communicator that was freed"] = Pair(
        "c = comm.Dup()\nc.Free()\nc.Barrier()", "c = comm.Dup()\nc.Barrier()\nc.Free()", "was freed before"
    )
    found["a null communicator"] = Pair("MPI.COMM_NULL.Barrier()", "MPI.COMM_SELF.Barrier()", "null")
    found["a count beyond the buffer"] = Pair(
        "comm.Bcast([a, 5, MPI.DOUBLE])", "comm.Bcast([a, 4, MPI.DOUBLE])", "5 elements"
    )
    found["an access beyond the window"] = Pair(
        "w = window()\nw.Fence()\nw.Put(a, 0, 7)\nw.Fence()\nw.Free()",
        "w = window()\nw.Fence()\nw.Put(a, rank, 4)\nw.Fence()\nw.Free()",
        "span bytes",
    )
    return found


def unmatched_parameters() -> dict[str, Pair]:
    """Arguments that must agree and do not."""
    found = {}
    for name, call in ROOTED.items():
        found[f"{name} with two roots"] = Pair(call.format("rank % 2"), call.format(1), "same root")
    for name in ("Reduce", "Allreduce", "Scan", "Exscan"):
        text = f"comm.{name}(a, b, {{}})"
        found[f"{name} with two operations"] = Pair(
            text.format("MPI.SUM if rank else MPI.MAX"), text.format("MPI.MAX"), "same op"
        )
        text = f"comm.{name}(a[:{{0}}], b[:{{0}}])"
        found[f"{name} with two counts"] = Pair(text.format("2 + rank % 2"), text.format("3"), "same count")
        text = f"t = {{}}\ncomm.{name}(a.astype(t), b.astype(t))"
        found[f"{name} with two types"] = Pair(
            text.format("'i8' if rank else 'f8'"), text.format("'i8'"), "same datatype"
        )
    found["Bcast with two counts"] = Pair(
        "comm.Bcast(a if rank else a[:2])", "comm.Bcast(a[:2])", "MPI requires equal counts"
    )
    found["Bcast with two types"] = Pair(
        "comm.Bcast(a if rank else a.astype(int))", "comm.Bcast(a)", "does not convert"
    )
    found["Bcast into a shorter buffer"] = Pair(
        "comm.Bcast(a[:2] if rank else a)", "comm.Bcast(a)", "does not fit"
    )
    found["Gather with two counts"] = Pair(
        "comm.Gather(a if rank else a[:2], many)", "comm.Gather(a, many)", "MPI requires equal counts"
    )
    found["a message of another type"] = Pair(
        on(0, "comm.Send(a, 1)") + on(1, "comm.Recv(np.zeros(4, int), 0)"),
        on(0, "comm.Send(a, 1)") + on(1, "comm.Recv(b, 0)"),
        "does not convert",
    )
    found["a message that does not fit"] = Pair(
        on(0, "comm.Send(a, 1)") + on(1, "comm.Recv(b[:2], 0)"),
        on(0, "comm.Send(a[:2], 1)") + on(1, "comm.Recv(b, 0)"),
        "does not fit",
    )
    found["an object received as a buffer"] = Pair(
        on(0, "comm.send(a, 1)") + on(1, "comm.Recv(room, 0)"),
        on(0, "comm.send(a, 1)") + on(1, "comm.recv(source=0)"),
        "received an object",
    )
    found["one buffer for both"] = Pair(
        "comm.Allreduce(a, a)", "comm.Allreduce(MPI.IN_PLACE, a)", "one buffer twice"
    )
    return found


def ordering() -> dict[str, Pair]:
    """Collectives in two orders, or only on some ranks; sends and receives that wait for each other."""
    found, names = {}, [*COLLECTIVES]
    for first, second in zip(names, names[1:] + names[:1], strict=True):
        a, b = COLLECTIVES[first], COLLECTIVES[second]
        right = f"{a}\n{b}\n"
        wrong = f"if rank == 1:\n    {b}\n    {a}\nelse:\n    {a}\n    {b}\n"
        found[f"{first} and {second} in two orders"] = Pair(
            wrong, right, "same collective calls in the same order"
        )
    for name in ("Barrier", "Allreduce", "Allgather", "Alltoall", "Scan"):
        call = COLLECTIVES[name]
        found[f"{name} that one rank omits"] = Pair(
            f"if rank != 1:\n    {call}\n", call, "whose program has ended"
        )
    found["two communicators in two orders"] = Pair(
        "c = comm.Dup()\nfor each in (comm, c) if rank else (c, comm):\n    each.Barrier()\nc.Free()",
        "c = comm.Dup()\nfor each in (comm, c):\n    each.Barrier()\nc.Free()",
        "deadlock",
    )
    found["all receive first"] = Pair(
        "comm.Recv(b, (rank - 1) % size)\ncomm.Send(a, (rank + 1) % size)",
        "comm.Sendrecv(a, (rank + 1) % size, 0, b, (rank - 1) % size)",
        "Each waits to receive before it sends",
    )
    found["all send large messages first"] = Pair(
        "comm.Send(big, (rank + 1) % size)\ncomm.Recv(room, (rank - 1) % size)",
        "comm.Sendrecv(big, (rank + 1) % size, 0, room, (rank - 1) % size)",
        "use Sendrecv",
    )
    found["all send synchronously first"] = Pair(
        "comm.Ssend(a, (rank + 1) % size)\ncomm.Recv(b, (rank - 1) % size)",
        "r = comm.Issend(a, (rank + 1) % size)\ncomm.Recv(b, (rank - 1) % size)\nr.Wait()",
        "use Sendrecv",
    )
    found["a collective and a message that wait for each other"] = Pair(
        on(0, "comm.Recv(b, 1)\ncomm.Barrier()")
        + on(1, "comm.Barrier()\ncomm.Send(a, 0)")
        + on(2, "comm.Barrier()"),
        on(0, "comm.Recv(b, 1)\ncomm.Barrier()")
        + on(1, "comm.Send(a, 0)\ncomm.Barrier()")
        + on(2, "comm.Barrier()"),
        "deadlock",
    )
    return found


def matching() -> dict[str, Pair]:
    """Messages that nobody receives, and receives of messages that nobody sends."""
    found = {}
    for name in ("Send", "send", "Isend"):
        receive = "comm.recv(source=0)" if name == "send" else "comm.Recv(b, 0)"
        call = SENDS[name].format(1, 5)
        found[f"{name} without a receive"] = Pair(on(0, call), on(0, call) + on(1, receive), "never received")
    for name, call in RECEIVES.items():
        send = "comm.send(1, 0, 5)" if name == "recv" else "comm.Send(a, 0, 5)"
        right = on(1, send) + on(0, call.format(1, 5))
        found[f"{name} without a send"] = Pair(on(0, call.format(1, 5)), right, "deadlock")
        found[f"{name} of another tag"] = Pair(on(1, send) + on(0, call.format(1, 6)), right, "deadlock")
        found[f"{name} of another source"] = Pair(on(1, send) + on(0, call.format(2, 5)), right, "deadlock")
    found["two communicators"] = Pair(
        "c = comm.Dup()\n" + on(0, "comm.Send(a, 1)") + on(1, "c.Recv(b, 0)") + "c.Free()",
        "c = comm.Dup()\n" + on(0, "c.Send(a, 1)") + on(1, "c.Recv(b, 0)") + "c.Free()",
        "deadlock",
    )
    return found


def local_concurrency() -> dict[str, Pair]:
    """Buffers that a program uses while a call has them."""
    found = {}
    for name, (call, buffer) in STARTED.items():
        store = on(0, f"{buffer}[0] = 3")
        found[f"{name} and a store"] = Pair(
            f"r = {call}\n{store}r.Wait()",
            f"r = {call}\nr.Wait()\n{store}",
            "the request's Wait before the second",
        )
    send = on(1, "comm.Send(a, 0)\ncomm.Send(a, 0)")
    second = "comm.Recv(b, 1)\n"
    for what, line in (("load", "print(b[0])"), ("store", "b[0] = 3"), ("Irecv", "comm.Irecv(b, 1).Wait()")):
        again = "" if what == "Irecv" else second
        found[f"Irecv and {what}"] = Pair(
            send + on(0, f"r = comm.Irecv(b, 1)\n{line}\nr.Wait()\n{again}"),
            send + on(0, f"r = comm.Irecv(b, 1)\nr.Wait()\n{line}\n{again}"),
            "the request's Wait before the second",
        )
    for name in ("Isend", "Issend", "Send_init"):
        start = f"r = comm.{name}(a, 1)\n" + ("r.Start()\n" if name == "Send_init" else "")
        free = "\nr.Free()" if name == "Send_init" else ""
        found[f"{name} and a store"] = Pair(
            on(0, f"{start}a[0] = 3\nr.Wait(){free}") + on(1, "comm.Recv(b, 0)"),
            on(0, f"{start}r.Wait(){free}\na[0] = 3") + on(1, "comm.Recv(b, 0)"),
            "the request's Wait before the second",
        )
    return found


def requests_and_leaks() -> dict[str, Pair]:
    """Requests that are not completed, or used wrongly; resources that are not freed, or freed twice."""
    receive = on(1, "comm.Recv(b, 0)")
    found = {
        "Isend without Wait": Pair(
            on(0, "r = comm.Isend(a, 1)") + receive,
            on(0, "comm.Isend(a, 1).Wait()") + receive,
            "never completed by Wait or Test",
        ),
        "Irecv without Wait": Pair(
            on(1, "comm.Send(a, 0)") + on(0, "r = comm.Irecv(b, 1)"),
            on(1, "comm.Send(a, 0)") + on(0, "comm.Irecv(b, 1).Wait()"),
            "never completed by Wait or Test",
        ),
        "Ibarrier without Wait": Pair(
            "r = comm.Ibarrier()", "comm.Ibarrier().Wait()", "never completed by Wait or Test"
        ),
        "a persistent request started twice": Pair(
            on(0, "r = comm.Recv_init(b, 1)\nr.Start()\nr.Start()") + on(1, "comm.Send(a, 0)"),
            on(0, "r = comm.Recv_init(b, 1)\nr.Start()\nr.Wait()\nr.Free()") + on(1, "comm.Send(a, 0)"),
            "still active",
        ),
        "a persistent request used after Free": Pair(
            on(0, "r = comm.Recv_init(b, 1)\nr.Free()\nr.Start()"),
            on(0, "r = comm.Recv_init(b, 1)\nr.Free()"),
            "null",
        ),
        "a request freed after its Wait": Pair(
            on(0, "r = comm.Isend(a, 1)\nr.Wait()\nr.Free()") + receive,
            on(0, "r = comm.Isend(a, 1)\nr.Wait()") + receive,
            "already collected or freed",
        ),
        "a communicator freed twice": Pair(
            "c = comm.Dup()\nc.Free()\nc.Free()", "c = comm.Dup()\nc.Free()", "freed before"
        ),
        "a datatype freed twice": Pair(
            "t = MPI.INT.Dup()\nt.Free()\nt.Free()", "t = MPI.INT.Dup()\nt.Free()", "freed"
        ),
        "a window freed twice": Pair(
            "w = window()\nw.Free()\nw.Free()", "w = window()\nw.Free()", "freed before"
        ),
        "a communicator freed by some ranks": Pair(
            "c = comm.Dup()\nif rank:\n    c.Free()", "c = comm.Dup()\nc.Free()", "freed by only some"
        ),
        "a window not freed": Pair("w = window()", "w = window()\nw.Free()", "never freed"),
        "a file not closed": Pair(
            "f = MPI.File.Open(comm, f'{__file__}.data', MPI.MODE_CREATE | MPI.MODE_WRONLY)",
            "f = MPI.File.Open(comm, f'{__file__}.data', MPI.MODE_CREATE | MPI.MODE_WRONLY)\nf.Close()",
            "never closed",
        ),
    }
    for name, make in {
        "Dup": "comm.Dup()",
        "Split": "comm.Split(rank % 2)",
        "Create": "comm.Create(g := comm.group)\ng.Free()",
        "Create_cart": "comm.Create_cart([size])",
        "Split_type": "comm.Split_type(MPI.COMM_TYPE_SHARED)",
    }.items():
        found[f"a communicator of {name} not freed"] = Pair(
            f"c = {make}", f"c = {make}\nc.Free()", "never freed"
        )
    for name, make in {
        "datatype": "MPI.DOUBLE.Create_vector(2, 1, 2).Commit()",
        "datatype of Dup": "MPI.DOUBLE.Dup()",
        "operation": "MPI.Op.Create(lambda one, other, kind: None)",
        "group": "comm.group",
        "persistent request": "comm.Bcast_init(a)",
        "info object": "MPI.Info.Create({'a': 'b'})",
        "info object of Dup": "(first := MPI.Info.Create()).Dup()\nfirst.Free()",
        "info object of a communicator": "comm.Get_info()",
        "error handler": "comm.Get_errhandler()",
    }.items():
        found[f"a {name} not freed"] = Pair(f"x = {make}", f"x = {make}\nx.Free()", "never freed")
    for name in ("Comm", "Win"):
        make = f"key = MPI.{name}.Create_keyval()"
        found[f"a keyval of {name} not freed"] = Pair(
            make, f"{make}\nMPI.{name}.Free_keyval(key)", "keyvals were never freed"
        )
    found["a thousand datatypes not freed"] = Pair(
        "for _ in range(1000):\n    x = MPI.INT.Dup()",
        "for _ in range(1000):\n    x = MPI.INT.Dup()\n    MPI.Datatype(x).Free()",
        "3,000 datatypes were never freed: created at 3,000 × program.py:12",
    )
    found["hints of a window not freed"] = Pair(
        "i = MPI.Info.Create()\nMPI.Win.Allocate(8, 1, i, comm).Free()",
        "MPI.Win.Allocate(8, 1, MPI.INFO_NULL, comm).Free()\nMPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)",
        "info objects were never freed",
    )
    return found


def epochs() -> dict[str, Pair]:
    """Epochs that are missing, not ended or begun twice; and races of accesses."""
    begin, end, put = "w = window()\n", "comm.Barrier()\nw.Free()\n", "w.Put(a[:1], 1)\n"
    lock, unlock, both = on(0, "w.Lock(1)\n" + put), on(0, "w.Unlock(1)"), "w.Lock_all()\nw.Unlock_all()\n"
    groups = "g = comm.group\nzero, one = g.Incl([0]), g.Incl([1])\n"
    access = on(0, "w.Start(one)\nw.Put(a[:1], 1)\nw.Complete()")
    expose = on(1, "w.Post(zero)\nw.Wait()") + "for each in (g, zero, one):\n    each.Free()\n"
    wrong = {
        "Put outside an epoch": (on(0, put), lock + unlock, "outside an epoch"),
        "Get outside an epoch": (on(0, "w.Get(b[:1], 1)"), lock + unlock, "outside an epoch"),
        "Accumulate outside an epoch": (on(0, "w.Accumulate(a[:1], 1)"), lock + unlock, "outside an epoch"),
        "Flush outside an epoch": (
            on(0, "w.Flush(1)"),
            on(0, "w.Lock(1)\nw.Flush(1)\nw.Unlock(1)"),
            "outside an epoch",
        ),
        "Flush_all outside an epoch": (
            "w.Flush_all()\n",
            "w.Lock_all()\nw.Flush_all()\nw.Unlock_all()\n",
            "outside an epoch",
        ),
        "Put to a rank that is not locked": (
            on(0, "w.Lock(2)\n" + put + "w.Unlock(2)"),
            lock + unlock,
            "outside an epoch",
        ),
        "Unlock without Lock": (unlock, lock + unlock, "holds no lock"),
        "Unlock_all without Lock_all": ("w.Unlock_all()\n", both, "is not locked"),
        "Lock twice": (on(0, "w.Lock(1)\nw.Lock(1)"), lock + unlock, "already"),
        "Lock_all twice": ("w.Lock_all()\n" + both, both, "already"),
        "Lock without Unlock": (lock, lock + unlock, "before Unlock"),
        "Lock_all without Unlock_all": ("w.Lock_all()\n", both, "before Unlock_all"),
        "Complete without Start": ("w.Complete()\n", groups + access + expose, "without Start"),
        "Wait without Post": ("w.Wait()\n", groups + access + expose, "without Post"),
        "Post without Wait": (
            groups + access + on(1, "w.Post(zero)"),
            groups + access + expose,
            "before Wait",
        ),
        "Start without Complete": (
            groups + on(0, "w.Start(one)") + on(1, "w.Post(zero)"),
            groups + access + expose,
            "before ",
        ),
        "Start without Post": (groups + access, groups + access + expose, "deadlock"),
        "Fence at the begin alone": (
            "w.Fence()\n" + on(0, put),
            "w.Fence()\n" + on(0, put) + "w.Fence()\n",
            "no Fence",
        ),
        "Fence that one rank omits": ("if rank:\n    w.Fence()\n", "w.Fence()\n", "deadlock"),
        "two Puts to one element": (
            "w.Fence()\nif rank != 1:\n    w.Put(a[:1], 1)\nw.Fence()\n",
            "w.Fence()\nif rank != 1:\n    w.Put(a[:1], 1, rank)\nw.Fence()\n",
            "data race",
        ),
        "a load before the fence": (
            "w.Fence()\n" + on(0, put) + on(1, "print(np.frombuffer(w, float)[0])") + "w.Fence()\n",
            "w.Fence()\n" + on(0, put) + "w.Fence()\n" + on(1, "print(np.frombuffer(w, float)[0])"),
            "data race",
        ),
    }
    return {
        name: Pair(begin + bad + end, begin + good + end, said) for name, (bad, good, said) in wrong.items()
    }


CLASSES = {
    make.__name__: make()
    for make in (
        invalid_parameters,
        unmatched_parameters,
        ordering,
        matching,
        local_concurrency,
        requests_and_leaks,
        epochs,
    )
}


def said_of(text: str, folder: Path) -> str:
    """Run a program; return its error and warnings."""
    path = folder / "program.py"
    path.write_text(HEAD + text)
    try:
        run = spawnsim.run(path, ranks=3, races=True, options={"prefix": False})
    except SpawnsimError as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(run.what.get("warnings", ()))


def test_there_are_a_hundred_errors() -> None:
    """And as many twins without."""
    assert sum(map(len, CLASSES.values())) >= 100


@pytest.mark.parametrize("kind", [*CLASSES])
def test_errors_are_named_and_twins_cause_no_alarm(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All pairs of one class."""
    silent, alarms = {}, {}
    for name, pair in CLASSES[kind].items():
        said = said_of(pair.wrong, tmp_path)
        if pair.said not in said:
            silent[name] = said
        if alarm := said_of(pair.right, tmp_path):
            alarms[name] = alarm
    capsys.readouterr()
    assert silent == {}
    assert alarms == {}
