"""Split, Create, groups, intercommunicators, Dup, attributes, topologies with neighbours."""

import numpy as np
from mpi4py import MPI

comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
half = comm.Split(rank % 2, -rank)
members = [r for r in range(size) if r % 2 == rank % 2][::-1]
assert half.allgather(rank) == members
group = comm.Get_group()
odd = group.Incl(list(range(0, size, 2)))
sub = comm.Create(odd)
assert (sub == MPI.COMM_NULL) == (rank % 2 == 1)
if sub:
    assert sub.Get_size() == len(range(0, size, 2))
    assert MPI.Group.Translate_ranks(odd, [0], group) == [0]
    sub.Free()
if rank % 2 == 0:
    created = comm.Create_group(odd)
    assert created.allreduce(1) == odd.size
    created.Free()
keyval = MPI.Comm.Create_keyval(copy_fn=lambda c, k, v: v + 1)
half.Set_attr(keyval, 41)
copy = half.Dup()
assert copy.Get_attr(keyval) == 42
assert MPI.Comm.Compare(half, copy) == MPI.CONGRUENT
copy.Free()
assert comm.Get_attr(MPI.TAG_UB) >= 32767
if size > 1:
    leader = max(r for r in range(size) if r % 2 != rank % 2)
    inter = half.Create_intercomm(0, comm, leader, tag=5)
    assert inter.Get_remote_size() == size - half.size
    merged = inter.Merge(high=bool(rank % 2))
    assert merged.size == size
    if inter.rank < inter.remote_size:
        inter.send(("from", rank), dest=inter.rank)
        assert inter.recv(source=inter.rank)[0] == "from"
    merged.Free()
    inter.Free()
half.Free()
ring = comm.Create_dist_graph_adjacent([(rank - 1) % size], [(rank + 1) % size])
got = np.empty(1, "i")
ring.Neighbor_allgather(np.array([rank], "i"), got)
assert got[0] == (rank - 1) % size
assert ring.neighbor_alltoall([rank * 10]) == [((rank - 1) % size) * 10]
ring.Free()
cart = comm.Create_cart([size], periods=True)
got = np.empty(2, "i")
cart.Neighbor_alltoall(np.array([rank, rank + 100], "i"), got)
assert cart.Get_topo()[0] == [size]
assert list(got) == [(rank - 1) % size + 100, (rank + 1) % size], got  # what goes up arrives from below
row = cart.Sub([True])
assert row.size == size
row.Free()
cart.Free()
node = comm.Split_type(MPI.COMM_TYPE_SHARED)
assert node.size >= 1
node.Free()
info = MPI.Info.Create({"mpi_hw_resource_type": "mpi_shared_memory"})
for guided in (MPI.COMM_TYPE_HW_GUIDED, MPI.COMM_TYPE_RESOURCE_GUIDED):
    assert comm.Split_type(guided) == MPI.COMM_NULL
    node = comm.Split_type(guided, info=info)
    assert node.size >= 1
    node.Free()
low = range((size + 1) // 2)
mine = comm.group.Incl([r for r in range(size) if (r in low) == (rank in low)])
others = comm.group.Excl(low) if rank in low else comm.group.Incl(low)
alone = MPI.Intracomm.Create_from_group(mine, "halves")
assert alone.allreduce(1) == mine.size
alone.Free()
if others.size:
    both = MPI.Intercomm.Create_from_groups(mine, 0, others, 0, "both")
    assert (both.size, both.remote_size) == (mine.size, others.size)
    both.Free()
comm.Set_name("everyone")
assert comm.Get_name() == "everyone"
if rank == 0:
    print("groups", size)
