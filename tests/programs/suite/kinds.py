"""Of what a handle may be made: of another one of its kind, and of nothing else."""

from mpi4py import MPI

KINDS = (
    MPI.Comm, MPI.Intracomm, MPI.Intercomm, MPI.Topocomm, MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm,
    MPI.Request, MPI.Prequest, MPI.Message, MPI.Win,
    MPI.Op, MPI.Datatype, MPI.Group, MPI.Info, MPI.Errhandler, MPI.Status,
)  # fmt: skip

comm, alone = MPI.COMM_WORLD, MPI.COMM_SELF
cart, graph = alone.Create_cart([1]), alone.Create_graph([0, 1], [0])
persistent = alone.Send_init(b"", MPI.PROC_NULL)
given = {
    "cart": cart, "cart as comm": MPI.Comm(cart), "graph": graph, "edges": alone.Create_dist_graph([], [], []),
    "world": comm, "world as intracomm": MPI.Intracomm(comm), "no comm": MPI.COMM_NULL,
    "persistent": persistent, "persistent as request": MPI.Request(persistent),
    "no request": MPI.REQUEST_NULL, "message": MPI.MESSAGE_NO_PROC, "no window": MPI.WIN_NULL,
    "op": MPI.SUM, "type": MPI.INT, "group": comm.Get_group(), "info": MPI.INFO_ENV, "handler": MPI.ERRORS_RETURN,
    "status": MPI.Status(), "number": 1234, "text": "abc", "numbers": (1, 2, 3),
}  # fmt: skip
if comm.size > 1:
    half = comm.rank % 2
    own = comm.Split(half)
    given["intercomm"] = own.Create_intercomm(0, comm, 1 - half)


def refused(kind: type, one: object) -> bool:
    """Return whether `kind(one)` is a TypeError."""
    try:
        kind(one)
    except TypeError:
        return True
    return False


for name, one in given.items():
    taken = [kind.__name__ for kind in KINDS if not refused(kind, one)]
    if comm.rank == 0:
        print(name, "makes", *taken)


class Tagged(MPI.Request):
    """A program's own class."""

    def __new__(cls, request: MPI.Request | None = None) -> "Tagged":
        return super().__new__(cls, request)


Tagged(alone.Isend(b"", MPI.PROC_NULL)).Wait()
# Copies of a handle do what the first one does.
again = MPI.Prequest(persistent)
again.Start()
again.Wait()
again.Free()
