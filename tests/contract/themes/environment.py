"""The environment of a program: time, versions, memory, hints; how mistakes are raised; types that serve as numbers.

A mistake raises at once, on the rank that made it. Ranks, tags and counts may be of other types than Python's own:
whatever C can be given.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from contract.cases import claim, fails, needs, refused, same


def time_moves_forward(MPI, comm):
    """Wtime never goes back, and its tick is positive."""
    before = MPI.Wtime()
    comm.Barrier()
    claim(MPI.Wtime() >= before and MPI.Wtick() > 0, "time moves forward")


def the_library_is_up(MPI, comm):
    """MPI is initialised and not finalised; the main thread asks."""
    same((MPI.Is_initialized(), MPI.Is_finalized(), MPI.Is_thread_main()), (True, False, True))
    claim(MPI.THREAD_SINGLE <= MPI.Query_thread() <= MPI.THREAD_MULTIPLE, "a level of threads")


def versions_and_names(MPI, comm):
    """Version, library and processor have names."""
    claim(min(MPI.Get_version()[0], MPI.VERSION) >= 3 and MPI.SUBVERSION >= 0, "a version of MPI")
    claim(MPI.Get_library_version() and MPI.Get_processor_name(), "names are not empty")
    name, numbers = MPI.get_vendor()
    claim(isinstance(name, str) and len(numbers) == 3, "a vendor has a name and three numbers")


def constants_differ(MPI, comm):
    """Special ranks differ from each other and from all ranks."""
    special = {MPI.ANY_SOURCE, MPI.PROC_NULL, MPI.ROOT, MPI.UNDEFINED}
    same((len(special), max(special) < 0), (4, True))
    same(MPI.SUCCESS, 0)
    same(len({MPI.IDENT, MPI.CONGRUENT, MPI.SIMILAR, MPI.UNEQUAL}), 4)


def allocated_memory(MPI, comm):
    """Memory of the library is a writable buffer of bytes."""
    memory = MPI.Alloc_mem(16)
    same((len(memory), memory.nbytes, memory.readonly, memory.itemsize), (16, 16, False, 1))
    numbers = np.frombuffer(memory, np.float64)
    numbers[:] = 2.5
    same(bytes(memory[:8]), bytes(memory[8:]))
    del numbers
    MPI.Free_mem(memory)


def buffer_objects(MPI, comm):
    """MPI.buffer views memory: items are integers, slices buffers."""
    source = bytearray(b"abcdef")
    view = MPI.buffer(source)
    view[0] = ord("X")
    view[1:3] = b"YZ"
    same((bytes(source), view[5], view[3:5].tobytes(), len(view)), (b"XYZdef", ord("f"), b"de", 6))
    same((view.readonly, MPI.buffer(b"abc").readonly, view.address), (False, True, MPI.Get_address(source)))
    same(view.cast("H").nbytes, 6)
    same(
        (len(MPI.buffer.allocate(4, clear=True)), MPI.buffer.allocate(4, clear=True).tobytes()), (4, bytes(4))
    )


def infos(MPI, comm):
    """Infos are mappings of strings."""
    info = MPI.Info.Create()
    info.Set("one", "1")
    info["two"] = "2"
    same((sorted(info.items()), len(info), info.Get_nkeys()), ([("one", "1"), ("two", "2")], 2, 2))
    same((info.Get("one"), info.Get("none"), info.get("none", "x"), "two" in info), ("1", None, "x", True))
    twin = info.Dup()
    info.Delete("one")
    same((list(info), sorted(twin.keys()), twin.pop("one")), (["two"], ["one", "two"], "1"))
    fails(MPI, MPI.ERR_INFO_NOKEY, info.Delete, "one")
    with refused(KeyError):
        info["one"]
    info.Free()
    twin.Free()
    claim(info == MPI.INFO_NULL, "a freed info is null")


def statuses(MPI, comm):
    """A fresh status is empty, and its fields can be set."""
    status = MPI.Status()
    same(
        (status.source, status.tag, status.error, status.count), (MPI.ANY_SOURCE, MPI.ANY_TAG, MPI.SUCCESS, 0)
    )
    status.Set_source(3)
    status.Set_tag(4)
    status.Set_error(MPI.ERR_OTHER)
    status.Set_elements(MPI.INT, 5)
    status.Set_cancelled(True)
    same((status.Get_source(), status.Get_tag(), status.Get_error()), (3, 4, MPI.ERR_OTHER))
    same((status.Get_count(MPI.INT), status.Get_elements(MPI.INT), status.Is_cancelled()), (5, 5, True))
    same(MPI.Status(status) == status, True)


def handles_survive_pickle(MPI, comm, own):
    """Predefined handles and constants are themselves after pickling; derived types and infos are equal in content."""
    for one in (MPI.SUM, MPI.DOUBLE, MPI.IN_PLACE, MPI.BOTTOM, MPI.INFO_NULL, MPI.DATATYPE_NULL):
        same(pickle.loads(pickle.dumps(one)) == one, True)
    vector = own(MPI.DOUBLE.Create_vector(3, 1, 2).Commit())
    same(pickle.loads(pickle.dumps(vector)).Get_extent(), vector.Get_extent())
    info = own(MPI.Info.Create({"a": "b"}))
    same(pickle.loads(pickle.dumps(info)).items(), [("a", "b")])


def own_pickle(MPI, comm):
    """Programs choose how objects become bytes, and the protocol."""
    chosen = MPI.Pickle(protocol=2)
    same((chosen.PROTOCOL, chosen.loads(chosen.dumps([1]))), (2, [1]))
    data, buffers = MPI.Pickle(protocol=5, threshold=8).dumps_oob(np.arange(100.0))
    same((len(data) < 800, len(buffers)), (True, 1))
    same(MPI.pickle.loads_oob(data, buffers), np.arange(100.0))


def truth_of_handles(MPI, comm):
    """Null handles are false, all others true."""
    for kind in ["COMM", "DATATYPE", "OP", "GROUP", "REQUEST", "INFO", "WIN"]:
        same(bool(getattr(MPI, f"{kind}_NULL")), False)
    for one in (comm, MPI.INT, MPI.SUM, comm.Get_group(), MPI.GROUP_EMPTY):
        same(bool(one), True)
    same(MPI.Comm() == MPI.COMM_NULL, True)


def what_does_not_exist(MPI, comm, rank, size):
    """A peer outside the communicator is ERR_RANK, a root ERR_ROOT, a negative tag ERR_TAG, in every call."""
    buf = np.zeros(1)
    for other in (size, -77):
        for call in (comm.Send, comm.Isend, comm.Ssend, comm.Irecv, comm.Recv):
            fails(MPI, MPI.ERR_RANK, call, buf, other)
        for call in (comm.Bcast, comm.Ibcast):
            fails(MPI, MPI.ERR_ROOT, call, buf, root=other)
    fails(MPI, MPI.ERR_RANK, comm.send, 1, dest=size)
    fails(MPI, MPI.ERR_RANK, comm.recv, source=size)
    fails(MPI, MPI.ERR_RANK, comm.Iprobe, size)
    fails(MPI, MPI.ERR_TAG, comm.Isend, buf, dest=rank, tag=-5)
    fails(MPI, MPI.ERR_TAG, comm.isend, 1, dest=rank, tag=MPI.ANY_TAG)


def null_communicators(MPI, comm):
    """COMM_NULL is of no use: ERR_COMM."""
    for name in ("Get_rank", "Get_size", "Barrier", "Free"):
        fails(MPI, MPI.ERR_COMM, lambda name=name: getattr(MPI.COMM_NULL, name)())


def a_communicator_works_on_after_errors(MPI, comm, rank, size):
    """An error leaves the communicator as it was."""
    fails(MPI, MPI.ERR_RANK, comm.Send, np.zeros(1), dest=size)
    # MPI promises nothing after an error; mpi4py's programs catch such mistakes and go on.
    same(comm.allreduce(1), size)
    same(comm.sendrecv("still here", dest=rank, source=rank), "still here")


def exceptions_are_codes(MPI, comm):
    """MPI.Exception compares with codes, knows its class and text, and is a RuntimeError."""
    try:
        comm.Send(np.zeros(1), dest=comm.Get_size())
    except MPI.Exception as error:
        claim(isinstance(error, RuntimeError), "MPI.Exception is a RuntimeError")
        same(error.Get_error_class(), MPI.ERR_RANK)
        claim(str(error) and error.Get_error_string() and error.error_string, "it has a text")
        claim(bool(error) and int(error) == error.Get_error_code() == error.error_code, "it is its code")
    made = MPI.Exception(MPI.ERR_TAG)
    claim(made == MPI.ERR_TAG and made != MPI.ERR_RANK and made > MPI.SUCCESS, "it compares as a number")
    same((hash(made), made.Get_error_class()), (hash(MPI.ERR_TAG), MPI.ERR_TAG))


def texts_of_errors(MPI, comm):
    """Every error class has a text, and is its own class."""
    for name in [
        "SUCCESS",
        "ERR_BUFFER",
        "ERR_COUNT",
        "ERR_TYPE",
        "ERR_TAG",
        "ERR_COMM",
        "ERR_RANK",
        "ERR_ROOT",
        "ERR_OP",
    ]:
        code = getattr(MPI, name)
        claim(MPI.Get_error_string(code), f"{name} has a text")
        same(MPI.Get_error_class(code), code)


def errors_return_by_default(MPI, comm, own):
    """Errors are exceptions in Python; the handler of a duplicate is its parent's."""
    twin = own(comm.Dup())
    fails(MPI, MPI.ERR_RANK, twin.Send, np.zeros(1), dest=comm.Get_size())
    handler = own(twin.Get_errhandler())
    same(handler == MPI.ERRORS_RETURN, True)


def calls_that_cannot_be(MPI, comm, rank):
    """Python's own errors are raised for missing arguments, and for counts that are no whole numbers of at least 0."""
    refused(TypeError, comm.Send, np.zeros(1))
    refused(TypeError, comm.send)
    refused(TypeError, comm.Bcast, np.zeros(1), root="zero")
    refused(AttributeError, getattr, comm, "no_such_call")
    refused(ValueError, comm.Isend, [np.zeros(2), -1, MPI.DOUBLE], dest=rank)
    refused(TypeError, comm.Isend, [np.zeros(2), 1.5, MPI.DOUBLE], dest=rank)
    refused(ValueError, comm.Isend, [None, 1, MPI.DOUBLE], dest=rank)


def keyvals_are_checked(MPI, comm):
    """A keyval that nobody made is refused."""
    refused(MPI.Exception, comm.Set_attr, MPI.KEYVAL_INVALID, 1)


def handles_that_stay(MPI, comm, size):
    """Null requests and operations, predefined operations and COMM_WORLD cannot be freed, nor a null one cancelled."""
    fails(MPI, MPI.ERR_REQUEST, MPI.REQUEST_NULL.Cancel)
    fails(MPI, MPI.ERR_REQUEST, MPI.Request().Free)
    fails(MPI, MPI.ERR_OP, MPI.Op(MPI.OP_NULL).Free)
    fails(MPI, MPI.ERR_OP, MPI.Op(MPI.SUM).Free)
    fails(MPI, MPI.ERR_COMM, MPI.COMM_WORLD.Free)
    same(MPI.COMM_WORLD.Get_size(), size)


def integer_types() -> Iterator[Callable[[int], Any]]:
    """Yield types that are integers: they serve as ranks and tags, and in lists. Torch's if it is loaded already."""
    yield from (np.int64, np.int32, np.uint8, np.array)
    if "torch" in sys.modules:
        yield sys.modules["torch"].tensor


def number_types() -> Iterator[Callable[[int], Any]]:
    """Yield types that C takes for a rank or a tag: floats are cut off."""
    yield from integer_types()
    yield from (float, np.float64, Fraction, lambda value: value + 0.75)


def integers_in_messages(MPI, comm, rank, left, right):
    """Sends, receives and probes take them for ranks and tags, and match those of any other type."""
    for made in number_types():
        target, status = np.zeros(1), MPI.Status()
        request = comm.Irecv(target, made(left), made(3))
        comm.Send(np.full(1, float(rank)), made(right), made(3))
        request.Wait(status)
        same((target[0], status.source, status.tag), (left, left, 3))
        sent = comm.isend("x", made(right), made(4))
        claim(comm.Probe(made(left), made(4)), "a probe finds the message")
        claim(comm.Iprobe(made(left), made(4)), "a probe finds the message again")
        same(comm.recv(source=made(left), tag=made(4)), "x")
        sent.wait()
        same(comm.sendrecv(rank, made(right), made(5), None, made(left), made(5)), left)
        comm.Sendrecv(np.full(1, float(rank)), made(right), made(6), target, made(left), made(6))
        same(target[0], left)


def integers_in_persistent_messages(MPI, comm, rank, left, right):
    """Persistent requests take them when they are prepared."""
    for made in number_types():
        target = np.zeros(1)
        requests = [
            comm.Recv_init(target, made(left), made(7)),
            comm.Send_init(np.full(1, float(rank)), made(right), made(7)),
        ]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        same(target[0], left)


def integers_as_roots(MPI, comm, rank, size):
    """Collectives take them for the root."""
    root = size - 1
    for made in number_types():
        same(comm.bcast(rank, made(root)), root)
        same(comm.gather(rank, made(root)), list(range(size)) if rank == root else None)
        same(comm.scatter([*range(size)] if rank == root else None, made(root)), rank)
        same(comm.reduce(1, root=made(root)), size if rank == root else None)
        target = np.full(1, float(rank))
        comm.Bcast(target, made(root))
        same(target[0], root)
        comm.Ibcast(target, made(0)).Wait()
        comm.Reduce(np.ones(1), np.zeros(1), root=made(root))


def integers_as_colors_and_keys(MPI, comm, rank, size):
    """Split takes them; the order follows their values."""
    for made in number_types():
        sub = comm.Split(made(rank % 2), made(size - rank))
        same(sub.Get_size(), len(range(rank % 2, size, 2)))
        same(sub.Get_rank(), len(range(rank + 2, size, 2)))
        sub.Free()


def integers_in_grids(MPI, comm, rank, size, left, right):
    """Dimensions, directions, displacements and coordinates of a grid."""
    for made in integer_types():
        grid = comm.Create_cart([made(size)], [made(1)])
        same(grid.Shift(made(0), made(1)), (left, right))
        same(grid.Get_coords(made(rank)), [rank])
        same(grid.Get_cart_rank([made(rank)]), rank)
        grid.Free()
        same(MPI.Compute_dims(made(6), [made(3), made(0)]), [3, 2])


def integers_in_lists(MPI, comm, rank, size):
    """Lists of ranks, counts and displacements: of integers only."""
    group = comm.Get_group()
    for made in integer_types():
        same(group.Incl([made(size - 1)]).Get_size(), 1)
        same(group.Translate_ranks([made(rank)]), [rank])
        datatype = MPI.INT.Create_indexed([made(1), made(2)], [made(0), made(2)])
        same(datatype.Get_size(), 12)
        same({type(each) for part in datatype.Get_contents()[:3] for each in part}, {int})
        datatype.Free()
        sums = np.zeros(1)
        comm.Reduce_scatter(np.ones(size), sums, [made(1)] * size)
        same(sums[0], size)
    for value in (0.0, np.float64(0), Fraction(0), "0", None):
        refused(TypeError, group.Incl, [value])


@needs(ranks=2)
def integers_in_one_sided_calls(MPI, comm, rank, left, right):
    """Windows take them for sizes, targets and displacements."""
    for made in integer_types():
        window = MPI.Win.Allocate(made(16), made(8), comm=comm)
        found = np.zeros(1)
        window.Lock(made(right))
        window.Put(np.full(1, float(rank)), made(right), made(1))
        window.Flush(made(right))
        window.Fetch_and_op(np.ones(1), found, made(right), made(1))
        window.Unlock(made(right))
        comm.Barrier()
        same(found[0], rank)
        same(np.frombuffer(window.tomemory(), "d")[1], left + 1.0)
        window.Free()


def what_is_no_integer(MPI, comm, rank):
    """Text, None and lists are a TypeError, in whatever place."""
    for value in ("0", None, [0], 1j):
        refused(TypeError, comm.send, "x", value)
        refused(TypeError, comm.isend, "x", rank, value)
        refused(TypeError, comm.Irecv, np.zeros(1), value)
        refused(TypeError, comm.Iprobe, rank, value)
        refused(TypeError, comm.Send_init, np.zeros(1), value)
        refused(TypeError, comm.bcast, 1, value)
        refused(TypeError, comm.Split, value)
    # Beyond C's int: cut off silently, it would be another colour.
    refused(OverflowError, comm.Split, 1 << 40)
