"""Mandelbrot with a queue of lines: probes, buffers whose length the probe tells."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
w, h = 32, 24


def line(j):
    c = np.linspace(-2, 1, w) + 1j * (-1.2 + 2.4 * j / (h - 1))
    z, n = np.zeros_like(c), np.zeros(w, "i4")
    for _ in range(30):
        keep = abs(z) <= 2
        z[keep] = z[keep] ** 2 + c[keep]
        n[keep] += 1
    return n


if rank == 0:
    image, nxt, busy = np.zeros((h, w), "i4"), 0, 0
    status = MPI.Status()
    for worker in range(1, size):
        comm.Send(np.array([nxt if nxt < h else -1], "i4"), worker, 1)
        busy += nxt < h
        nxt += 1
    while busy:
        comm.Probe(MPI.ANY_SOURCE, 2, status)
        assert status.Get_count(MPI.INT) == w + 1
        buf = np.empty(w + 1, "i4")
        comm.Recv(buf, status.source, 2, status)
        image[buf[0]] = buf[1:]
        more = nxt < h
        comm.Send(np.array([nxt if more else -1], "i4"), status.source, 1)
        nxt += 1
        busy -= not more
    if size == 1:
        image = np.array([line(j) for j in range(h)])
    assert (image == np.array([line(j) for j in range(h)])).all()
    print("mandelbrot", int(image.sum()))
else:
    j = np.empty(1, "i4")
    while True:
        comm.Recv(j, 0, 1)
        if j[0] < 0:
            break
        comm.Send(np.concatenate([j, line(int(j[0]))]).astype("i4"), 0, 2)
