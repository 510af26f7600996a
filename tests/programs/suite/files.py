"""MPI-IO: explicit offsets, pointers of ranks and of all, views, errors; blocking or not, collective or split."""

import tempfile
from pathlib import Path

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
folder = Path(comm.bcast(tempfile.mkdtemp(prefix="files-") if rank == 0 else None))
status = MPI.Status()
lines = []


def class_of(call, *args):
    """Return the name of the error class that a call raises."""
    try:
        call(*args)
    except MPI.Exception as error:
        names = [name for name in dir(MPI) if name.startswith("ERR_") and not name.startswith("ERR_LAST")]
        return next(name for name in names if getattr(MPI, name) == error.Get_error_class())
    return "nothing"


# Explicit offsets: unequal blocks, written from the last one on, read by the neighbour.
create = MPI.MODE_CREATE | MPI.MODE_RDWR
path = folder / "blocks"
file = MPI.File.Open(comm, path, create)
assert file and file.Get_amode() == create and file.group_size == size and file.Get_size() == 0
comm.Barrier()
counts = [3 + other % 2 for other in range(size)]
starts = np.cumsum([0, *counts]) * 8
file.Write_at_all(int(starts[rank]), np.full(counts[rank], rank, "d"), status)
assert status.Get_count(MPI.DOUBLE) == counts[rank]
file.Sync()
comm.Barrier()
near = (rank + 1) % size
found = np.full(6, -1.0)
file.Read_at(int(starts[near]), [found, counts[near], MPI.DOUBLE], status)
assert (found == [near] * counts[near] + [-1] * (6 - counts[near])).all()
lines.append(("size", file.Get_size()))

# Behind the end there is nothing to read.
file.Read_at(int(starts[-1]) - 16, found, status)
lines.append(("short", status.Get_count(MPI.DOUBLE), found.tolist()))

# The rank's own pointer, in elements of the view.
file.Set_view(8, MPI.DOUBLE)
file.Seek(2)
file.Read([found, 1, MPI.DOUBLE])
lines.append(("own", file.Get_position(), found[0]))
file.Seek(-1, MPI.SEEK_END)
lines.append(("end", file.Get_position() * 8 - int(starts[-1]), file.Get_byte_offset(3)))
file.Read(found, status)
lines.append(("behind", status.Get_count(MPI.DOUBLE)))
lines.append(("before", class_of(file.Seek, -1000)))
request = file.Iread_at(0, found)
request.Wait(status)
lines.append(("iread", status.Get_count(MPI.DOUBLE) > 0, found[0]))
comm.Barrier()
file.Set_size(16)
comm.Barrier()
lines.append(("cut", file.Get_size()))
file.Preallocate(64)
lines.append(("longer", file.size))
file.Close()
assert not file

# Interleaved rows by a derived type: each rank sees every size-th pair.
path = folder / "rows"
file = MPI.File.Open(comm, path, create)
kind = MPI.INT32_T.Create_vector(3, 2, 2 * size).Create_resized(0, 4 * 6 * size).Commit()
file.Set_view(8 * rank, MPI.INT32_T, kind)
kind.Free()
mine = np.arange(9, dtype="i4") + 100 * rank
file.Write_all(mine[:5])
file.Iwrite_all(mine[5:]).Wait(status)
assert status.Get_count(MPI.INT32_T) == 4 and file.Get_position() == 9
file.Write_at_all_begin(9, np.full(3, rank, "i4"))
file.Write_at_all_end(np.full(3, rank, "i4"))
file.Sync()
view = file.Get_view()
lines.append(("view", view[0] - 8 * rank, view[1].Get_size(), view[2].Get_extent()[1], view[3]))
lines.append(("bytes", file.Get_byte_offset(7)))
file.Set_view()
every = np.zeros(12 * size, "i4")
file.Read_all(every)
lines.append(("rows", every.tolist()))
file.Set_view(0, MPI.INT32_T, MPI.INT32_T.Create_vector(6, 2, 4).Commit())
file.Seek(0, MPI.SEEK_END)
lines.append(("holes", file.Get_position()))
file.Close()

# The pointer of all ranks.
path = folder / "shared"
file = MPI.File.Open(comm, path, create | MPI.MODE_DELETE_ON_CLOSE)
file.Set_view(0, MPI.INT)
file.Write_ordered(np.full(rank + 1, rank, "i4"), status)
assert status.Get_count(MPI.INT) == rank + 1
lines.append(("ordered", file.Get_position_shared()))
comm.Barrier()
file.Write_shared(np.full(2, 1000, "i4"))
comm.Barrier()
lines.append(("shared", file.Get_position_shared()))
comm.Barrier()
file.Seek_shared(0)
got = np.zeros(2, "i4")
file.Read_ordered(got)
lines.append(("read", got.tolist()))
file.Seek_shared(-2, MPI.SEEK_END)
if rank == size - 1:
    file.Iread_shared(got).Wait()
    assert (got == 1000).all()
comm.Barrier()
file.Write_ordered_begin(got)
file.Write_ordered_end(got)
assert file.Get_atomicity() is False
file.Set_atomicity(True)
assert file.atomicity
comm.Barrier()
lines.append(("grown", file.Get_size()))
file.Close()
lines.append(("deleted", not path.exists()))

# Modes and errors.
path = folder / "rows"
for mode in (MPI.MODE_RDONLY, MPI.MODE_WRONLY | MPI.MODE_APPEND):
    file = MPI.File.Open(comm, path, mode)
    lines.append(("mode", file.Get_position(), file.Get_position_shared(), file.amode == mode))
    lines.append(("refused", class_of(file.Write if mode == MPI.MODE_RDONLY else file.Read, got)))
    file.Close()
missing = folder / "missing"
lines.append(("open", class_of(MPI.File.Open, comm, missing)))
lines.append(("exists", class_of(MPI.File.Open, MPI.COMM_SELF, path, create | MPI.MODE_EXCL)))
lines.append(("amode", class_of(MPI.File.Open, comm, path, MPI.MODE_RDONLY | MPI.MODE_RDWR)))
lines.append(("creates", class_of(MPI.File.Open, comm, path, MPI.MODE_RDONLY | MPI.MODE_CREATE)))
lines.append(("null", class_of(MPI.FILE_NULL.Get_size)))
lines.append(("delete", class_of(MPI.File.Delete, missing)))
comm.Barrier()
own = MPI.File.Open(MPI.COMM_SELF, folder / f"own{rank}", create)
own.Write(b"text")
own.Seek(0)
text = bytearray(6)
own.Read(text)
own.Close()
assert bytes(text) == b"text\0\0" and (folder / f"own{rank}").read_bytes() == b"text"
MPI.File.Delete(str(folder / f"own{rank}"))
comm.Barrier()
if rank == 0:
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()
for line in lines:
    print(rank, *line)
