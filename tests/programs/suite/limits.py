"""What an object may take: irecv has so many bytes for it, recv without a buffer any number."""

import warnings

import numpy as np
from mpi4py import MPI

warnings.simplefilter("ignore")  # mpi4py 4 warns of recv(buf)
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
right, left = (rank + 1) % size, (rank - 1) % size
largest = 32768 - len(MPI.pickle.dumps(b"x" * 1000)) + 1000  # what is pickled to 32,768 bytes


def received(nbytes, receive):
    """Return the length of what arrives, or the class of the error."""
    request = comm.isend(b"x" * nbytes, right)
    try:
        found = len(receive())
    except MPI.Exception as error:
        found = "ERR_TRUNCATE" if error.Get_error_class() == MPI.ERR_TRUNCATE else str(error)
    request.wait()
    return found


ways = {
    "irecv()": lambda: comm.irecv(source=left).wait(),
    "irecv(120)": lambda: comm.irecv(120, left).wait(),
    "irecv(np.int64(120))": lambda: comm.irecv(np.int64(120), left).wait(),
    "irecv(bytearray(120))": lambda: comm.irecv(bytearray(120), left).wait(),
    "irecv(np.empty(15))": lambda: comm.irecv(np.empty(15), left).wait(),
    "recv()": lambda: comm.recv(source=left),
    "recv(120)": lambda: comm.recv(120, left),
    "recv(bytearray(120))": lambda: comm.recv(bytearray(120), left),
    "sendrecv(recvbuf=120)": lambda: comm.sendrecv(None, MPI.PROC_NULL, 0, 120, left),
    "mprobe": lambda: comm.mprobe(left).recv(),
    "mprobe, irecv": lambda: comm.mprobe(left).irecv().wait(),
}
for name, receive in ways.items():
    found = [received(nbytes, receive) for nbytes in (10, 100, 200, largest, largest + 1)]
    limit = 120 if "120" in name or "15" in name else 32768 if name == "irecv()" else 10**9
    pickled = {n: len(MPI.pickle.dumps(b"x" * n)) for n in (10, 100, 200, largest, largest + 1)}
    assert found == [n if nbytes <= limit else "ERR_TRUNCATE" for n, nbytes in pickled.items()], (name, found)
    if rank == 0:
        print(name, found)
memory = bytearray(64)
assert received(10, lambda: comm.irecv(memory, left).wait()) == 10
assert bytes(memory).startswith(MPI.pickle.dumps(b"x" * 10))
for wrong, kind in (("text", TypeError), (2.5, TypeError), (b"read-only", BufferError)):
    try:
        comm.irecv(wrong, left)
    except kind:
        continue
    raise AssertionError(wrong)
assert comm.irecv(None, MPI.PROC_NULL).wait() is None
print("well on", rank)
