"""A program, no test: makes random datatypes with the real MPI or with spawnsim, and prints what they are as JSON."""

import json
import random
import sys

import numpy as np

BASES = ("INT", "DOUBLE", "SHORT", "CHAR", "FLOAT", "DOUBLE_INT", "C_DOUBLE_COMPLEX")


class Maker:
    """Draws the same nested types from the same seed, whatever the library."""

    def __init__(self, mpi, seed):
        self.mpi, self.draw = mpi, random.Random(seed)

    def numbers(self, count, low, high):
        """Return `count` numbers."""
        return [self.draw.randint(low, high) for _ in range(count)]

    def datatype(self, depth):
        """Return a type of some bytes, nested `depth` times."""
        while True:
            found = self.any_datatype(depth)
            if found.Get_size():
                return found

    def any_datatype(self, depth):
        """Return a type, perhaps an empty one."""
        if depth == 0:
            return getattr(self.mpi, self.draw.choice(BASES))
        base, n = self.datatype(depth - 1), self.draw.randint(0, 12)
        kind = self.draw.choice(
            ("contiguous", "vector", "hvector", "indexed", "block", "hblock", "struct", "box", "resized")
        )
        return getattr(self, kind)(base, n)

    def contiguous(self, base, n):
        return base.Create_contiguous(n % 5)

    def vector(self, base, n):
        return base.Create_vector(n % 5, *self.numbers(1, 0, 3), *self.numbers(1, -4, 5))

    def hvector(self, base, n):
        """Return blocks strided in bytes."""
        return base.Create_hvector(n % 5, *self.numbers(1, 0, 3), *self.numbers(1, -40, 80))

    def indexed(self, base, n):
        return base.Create_indexed(self.numbers(n, 0, 3), self.numbers(n, -5, 9))

    def block(self, base, n):
        return base.Create_indexed_block(*self.numbers(1, 0, 3), self.numbers(n, -5, 9))

    def hblock(self, base, n):
        """Return equal blocks at bytes here and there."""
        return base.Create_hindexed_block(*self.numbers(1, 0, 3), self.numbers(n, -50, 90))

    def struct(self, base, n):
        """Return blocks of two types; MPICH does not pad structs of one type, so there are always two."""
        places = [8 * place for place in self.numbers(2, -9, 20)]
        return self.mpi.Datatype.Create_struct(self.numbers(2, 1, 3), places, [base, self.mpi.DOUBLE_INT])

    def box(self, base, n):
        """Return a box of an array."""
        sizes = self.numbers(1 + n % 3, 1, 5)
        inner = [self.draw.randint(1, size) for size in sizes]
        starts = [self.draw.randint(0, size - part) for size, part in zip(sizes, inner, strict=True)]
        return base.Create_subarray(
            sizes, inner, starts, self.draw.choice((self.mpi.ORDER_C, self.mpi.ORDER_F))
        )

    def resized(self, base, n):
        return base.Create_resized(*self.numbers(1, -20, 20), *self.numbers(1, 1, 100))


def span(datatype, count):
    """Return the first and last byte that `count` elements touch."""
    low, length = datatype.Get_true_extent()
    last = (count - 1) * datatype.Get_extent()[1]
    return min(0, low, low + last), max(low + length, low + length + last)


def real_copies(mpi, datatype, count):
    """Return packed and unpacked bytes of the real MPI: messages to itself, at shifted addresses."""
    low, high = span(datatype, count)
    memory, received = np.arange(high - low).astype(np.uint8), np.zeros(high - low, np.uint8)
    packed, source = np.zeros(datatype.Get_size() * count, np.uint8), np.arange(datatype.Get_size() * count)
    for out, data in ((memory, packed), (received, source.astype(np.uint8))):
        there = mpi.buffer.fromaddress(mpi.Get_address(out) - low, max(high, 1))
        ends = ([there, count, datatype], [data, mpi.BYTE])
        ends = ends if data is packed else ends[::-1]
        mpi.COMM_SELF.Sendrecv(ends[0], 0, 0, ends[1], 0, 0)
    return packed.tobytes().hex(), received.tobytes().hex()


def own_copies(_mpi, datatype, count):
    """Return packed and unpacked bytes of spawnsim."""
    low, high = span(datatype, count)
    memory, received = np.arange(high - low).astype(np.uint8), np.zeros(high - low, np.uint8)
    datatype.layout.scatter(received, np.arange(datatype.Get_size() * count).astype(np.uint8), low)
    return datatype.layout.gather(memory, count, low).tobytes().hex(), received.tobytes().hex()


def describe(mpi, copies, cases, seed=5):
    """Return what the library says of `cases` random types."""
    maker = Maker(mpi, seed)
    rows = []
    for _ in range(cases):
        datatype = maker.datatype(maker.draw.randint(1, 3)).Commit()
        status, counts = mpi.Status(), []
        for nbytes in (0, 4, datatype.Get_size(), 2 * datatype.Get_size() + 8):
            status.Set_elements(mpi.BYTE, nbytes)
            counts.append(status.Get_count(datatype))
        known = (
            datatype.Get_size(),
            datatype.Get_extent(),
            datatype.Get_true_extent(),
            datatype.Get_envelope(),
        )
        rows.append(
            [*known, datatype.Get_contents()[:3], counts, copies(mpi, datatype, maker.draw.randint(1, 3))]
        )
    return json.loads(json.dumps(rows))


if __name__ == "__main__":
    from mpi4py import MPI

    json.dump(describe(MPI, real_copies, int(sys.argv[1])), sys.stdout)
