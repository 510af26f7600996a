"""Mistakes in mpi4py programs that users report again and again, each on 12 virtual ranks: found, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import spawnsim
from spawnsim.errors import Deadlock, Livelock, MismatchError, UsageError

HEAD = """
from mpi4py import MPI
import numpy as np
comm = MPI.COMM_WORLD
R, N = comm.rank, comm.size
"""


class Bug(NamedTuple):
    """A program with a mistake, its error (None: a warning), and words of the message, in this order."""

    text: str
    error: type[Exception] | None
    words: tuple[str, ...]


BUGS = {
    "all send before they receive, more than goes out at once": Bug(
        "big = np.zeros(1 << 20)\ncomm.Send(big, dest=(R + 1) % N)\ncomm.Recv(big, source=(R - 1) % N)",
        Deadlock, ("12 of 12", "rank 0 → rank 1", "Send(dest=1", "program.py:7", "use Sendrecv")),
    "neighbours send in the same direction": Bug(
        "row, ghost = np.ones(9), np.empty(9)\ncomm.Ssend(row, dest=R ^ 1)\ncomm.Recv(ghost, source=R ^ 1)",
        Deadlock, ("rank 0 → rank 1 → rank 0", "Ssend(dest=1", "program.py:7")),
    "one rank leaves out a collective": Bug(
        "x, total = np.ones(3), np.empty(3)\nfor step in range(4):\n    if R == 3 and step == 2:\n        continue\n"
        "    comm.Allreduce(x, total)\ncomm.Barrier()",
        MismatchError, ("number 3", "rank 3 calls Barrier", "Allreduce", "program.py:10")),
    "the order of two collectives depends on the rank": Bug(
        "x, y = np.ones(4), np.empty(4)\nif R == 5:\n    comm.Bcast(x, root=0)\n    comm.Allreduce(x, y)\nelse:\n"
        "    comm.Allreduce(x, y)\n    comm.Bcast(x, root=0)",
        MismatchError, ("number 0", "rank 5 calls Bcast(root=0)", "Allreduce", "program.py:11", "program.py:8")),
    "a wrong root": Bug(
        "config = comm.bcast({'lr': 0.1}, root=7 if R == 7 else 0)",
        MismatchError, ("rank 7 calls bcast(root=7)", "bcast(root=0)", "program.py:6", "the same root")),
    "a wrong operation": Bug(
        "total = comm.allreduce(R, op=MPI.MAX if R == 3 else MPI.SUM)",
        MismatchError, ("rank 3 calls allreduce(op=MAX)", "op=SUM", "program.py:6", "the same op")),
    "a wrong tag": Bug(
        "if R == 0:\n    for other in range(1, N):\n        comm.send(other, dest=other, tag=10 + other)\nelse:\n"
        "    got = comm.recv(source=0, tag=15 if R == 4 else 10 + R)",
        Deadlock, ("rank 4 waits for rank 0", "recv(source=0, tag=15)", "program.py:10",
                   "rank 0 to rank 4, tag 14", "A receive must name")),
    "a receive too many": Bug(
        "if R == 0:\n    for _ in range(N):\n        comm.recv(source=MPI.ANY_SOURCE)\nelse:\n    comm.send(R, dest=0)",
        Deadlock, ("1 of 12 ranks waits", "whose programs have ended", "ANY_SOURCE", "program.py:8")),
    "a poll for a message too many": Bug(
        "if R == 0:\n    done = 0\n    while done < N:\n        if comm.iprobe():\n            comm.recv()\n"
        "            done += 1\nelse:\n    comm.send(R, dest=0)",
        Livelock, ("rank 0", "Iprobe", "program.py:9")),
    "a buffer that is too short": Bug(
        "if R == 0:\n    for other in range(1, N):\n        comm.Send(np.zeros(100), dest=other)\nelse:\n"
        "    comm.Recv(np.zeros(50 if R == 6 else 100), source=0)",
        UsageError, ("800 bytes", "400 bytes", "from rank 0", "rank 6", "program.py:10")),
    "counts that do not match": Bug(
        "counts = np.full(N, 2)\ngot = counts.copy()\ngot[1] -= R == 3\n"
        "comm.Alltoallv([np.ones(2 * N), counts], [np.empty(2 * N), got])",
        UsageError, ("16 bytes", "8 bytes", "Alltoall", "rank 3", "program.py:9")),
    "types differ": Bug(
        "mine = np.ones(8, dtype='f4' if R == 2 else 'f8')\ncomm.Allreduce(mine, np.empty_like(mine))",
        MismatchError, ("rank 2 calls", "MPI_FLOAT", "MPI_DOUBLE", "program.py:7")),
    "a list with too few items": Bug(
        "mine = comm.scatter(list(range(N - 1)) if R == 0 else None)",
        UsageError, ("expecting 12 items", "got 11", "rank 0", "program.py:6")),
    "a barrier in an except clause": Bug(
        "try:\n    if R == 9:\n        raise ValueError('bad batch')\n    comm.allreduce(R)\n"
        "except ValueError:\n    comm.Barrier()",
        MismatchError, ("rank 9 calls Barrier", "allreduce", "program.py:9", "program.py:11")),
    "one rank exits": Bug(
        "import sys\nfor step in range(3):\n    if R == 1 and step == 1:\n        sys.exit(0)\n"
        "    comm.allreduce(step)",
        Deadlock, ("waits for rank 1, whose program has ended", "allreduce", "program.py:10",
                   "sys.exit was called by rank 1")),
    "locks of windows in different orders": Bug(
        "win = MPI.Win.Allocate(8, 8, comm=comm)\nif R < 2:\n    win.Lock(R)\n"
        "    comm.sendrecv(0, 1 - R, source=1 - R)\n"
        "    win.Lock(1 - R)\ncomm.Barrier()",
        Deadlock, ("rank 0 → rank 1 → rank 0", "Lock(target=1)", "locked by rank 1", "program.py:10")),
    "a lock that is not unlocked": Bug(
        "win = MPI.Win.Allocate(8, 8, comm=comm)\nif R == 3:\n    win.Lock(0)\n    win.Put(np.ones(1), 0)\n"
        "comm.Barrier()\nif R == 4:\n    win.Lock(0)\ncomm.Barrier()",
        Deadlock, ("rank 4 → rank 3 → rank 4", "program.py:13", "locked by rank 3", "program.py:12")),
    "a fence too few": Bug(
        "win = MPI.Win.Allocate(8, comm=comm)\nfor step in range(2 if R == 2 else 3):\n    win.Fence()",
        Deadlock, ("waits for rank 2, whose program has ended", "Fence", "program.py:8")),
    "one rank does not start the send that another waits for": Bug(
        "out, got = np.ones(5), np.empty(5)\nrequests = [comm.Irecv(got, source=(R - 1) % N)]\nif R:\n"
        "    requests.append(comm.Isend(out, dest=(R + 1) % N))\nMPI.Request.Waitall(requests)",
        Deadlock, ("rank 1 waits for rank 0, whose program has ended", "Irecv(source=0", "program.py:10")),
    "a communicator that a rank has no part in": Bug(
        "part = comm.Split(0 if R < 4 else MPI.UNDEFINED)\nif R <= 4:\n    part.Barrier()",
        UsageError, ("communicator is null", "rank 4", "program.py:8")),
    "a communicator that was freed": Bug(
        "part = comm.Split(R % 2)\npart.Free()\npart.Barrier()",
        UsageError, ("freed before", "program.py:8")),
    "a wrong colour": Bug(
        "part = comm.Split(0 if R == 5 else R % 2)\npeer = part.rank ^ 1\npart.sendrecv(R, peer, source=peer)",
        UsageError, ("rank 7 is not in communicator", "whose ranks are 0 to 6", "program.py:8")),
    "an array is received as an object": Bug(
        "if R == 0:\n    comm.Send(np.ones(4), dest=1)\nelif R == 1:\n    comm.recv(source=0)",
        UsageError, ("from rank 0", "not a pickled object", "Recv", "rank 1", "program.py:9")),
    "an object is received as an array": Bug(
        "if R == 0:\n    comm.send([1.0, 2.0], dest=1)\nelif R == 1:\n    comm.Recv(np.empty(64), source=0)",
        None, ("rank 1", "program.py:9", "received an object from rank 0", "float64", "lower-case")),
    "a type of another size is received": Bug(
        "if R == 0:\n    comm.Send(np.ones(10), dest=1)\nelif R == 1:\n    comm.Recv(np.empty(20, 'f4'), source=0)",
        None, ("rank 1", "program.py:9", "received float64 from rank 0", "into float32")),
    "a buffer that is sent is used again": Bug(
        "big, requests = np.zeros(1 << 18), []\nif R == 0:\n    for other in range(1, N):\n        big[:] = other\n"
        "        requests.append(comm.Isend(big, dest=other))\n    MPI.Request.Waitall(requests)\n"
        "else:\n    comm.Recv(big, source=0)",
        None, ("rank 0", "program.py:11", "changed the buffer of its Isend to rank 1")),
    "a buffer that is summed up is used again": Bug(
        "x, y = np.full(1000, float(R)), np.empty(1000)\nrequest = comm.Iallreduce(x, y)\nx[:] = -1\nrequest.Wait()",
        None, ("rank", "program.py:9", "changed the buffer of its Iallreduce")),
    "a send that is never completed": Bug(
        "if R == 0:\n    comm.Isend(np.ones(1 << 18), dest=1)\n"
        "elif R == 1:\n    comm.Recv(np.empty(1 << 18), source=0)",
        None, ("1 request was never completed", "rank 0: Isend(dest=1")),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_it_is_found_and_named(name: str, tmp_path: Path) -> None:
    """With rank, call and line."""
    bug, file = BUGS[name], tmp_path / "program.py"
    file.write_text(HEAD + bug.text + "\n")
    if bug.error is None:
        run: Any = spawnsim.run(file, ranks=12)
        said = "\n".join(run.what["warnings"])
    else:
        with pytest.raises(bug.error) as found:
            spawnsim.run(file, ranks=12)
        said = "\n".join([str(found.value), *getattr(found.value, "__notes__", ())])
    place = 0
    for word in bug.words:
        place = said.find(word, place)
        assert place >= 0, f"{word!r} is not in the message, or not in this order:\n{said}"


def test_what_is_right_is_not_warned_of(tmp_path: Path) -> None:
    """A pickle that the program sends as bytes, a buffer that is used again after its Wait, one for both."""
    file = tmp_path / "program.py"
    file.write_text(
        HEAD + "import pickle\ndata = pickle.dumps([1.0] * 9)\ngot = bytearray(len(data))\n"
        "comm.Sendrecv([data, MPI.BYTE], (R + 1) % N, recvbuf=[got, MPI.BYTE], source=(R - 1) % N)\n"
        "assert pickle.loads(got) == [1.0] * 9\nx, y = np.ones(1000), np.empty(1000)\n"
        "for step in range(3):\n    request = comm.Iallreduce(x, y)\n    request.Wait()\n    x[:] = step\n"
        "    request = comm.Iallreduce(MPI.IN_PLACE, x)\n    request.Wait()\n"
    )
    run: Any = spawnsim.run(file, ranks=12)
    assert run.what["warnings"] == []
