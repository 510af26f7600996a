"""The world of a program: time, versions, memory, hints, pickling."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from spawnsim.testing.claims import claim, fails, refused, same


def time_moves_forward(MPI: Any, comm: Any) -> None:
    """Wtime never goes back, and its tick is positive."""
    before = MPI.Wtime()
    comm.Barrier()
    claim(MPI.Wtime() >= before and MPI.Wtick() > 0, "time moves forward")


def the_library_is_up(MPI: Any, comm: Any) -> None:
    """MPI is initialised and not finalised; the main thread asks."""
    same((MPI.Is_initialized(), MPI.Is_finalized(), MPI.Is_thread_main()), (True, False, True))
    claim(MPI.THREAD_SINGLE <= MPI.Query_thread() <= MPI.THREAD_MULTIPLE, "a level of threads")


def versions_and_names(MPI: Any, comm: Any) -> None:
    """Version, library and processor have names."""
    claim(min(MPI.Get_version()[0], MPI.VERSION) >= 3 and MPI.SUBVERSION >= 0, "a version of MPI")
    claim(MPI.Get_library_version() and MPI.Get_processor_name(), "names are not empty")
    name, numbers = MPI.get_vendor()
    claim(isinstance(name, str) and len(numbers) == 3, "a vendor has a name and three numbers")


def constants_differ(MPI: Any, comm: Any) -> None:
    """Special ranks differ from each other and from all ranks."""
    special = {MPI.ANY_SOURCE, MPI.PROC_NULL, MPI.ROOT, MPI.UNDEFINED}
    same((len(special), max(special) < 0), (4, True))
    same(MPI.SUCCESS, 0)
    same(len({MPI.IDENT, MPI.CONGRUENT, MPI.SIMILAR, MPI.UNEQUAL}), 4)


def allocated_memory(MPI: Any, comm: Any) -> None:
    """Memory of the library is a writable buffer of bytes."""
    memory = MPI.Alloc_mem(16)
    same((len(memory), memory.nbytes, memory.readonly, memory.itemsize), (16, 16, False, 1))
    numbers = np.frombuffer(memory, np.float64)
    numbers[:] = 2.5
    same(bytes(memory[:8]), bytes(memory[8:]))
    del numbers
    MPI.Free_mem(memory)


def buffer_objects(MPI: Any, comm: Any) -> None:
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


def infos(MPI: Any, comm: Any) -> None:
    """Infos are mappings of strings."""
    info = MPI.Info.Create()
    info.Set("one", "1")
    info["two"] = "2"
    same((sorted(info.items()), len(info), info.Get_nkeys()), ([("one", "1"), ("two", "2")], 2, 2))
    same((info.Get("one"), info.Get("none"), info.get("none", "x"), "two" in info), ("1", None, "x", True))
    twin = info.Dup()
    info.Delete("one")
    same((list(info), sorted(twin.keys()), twin.pop("one")), (["two"], ["one", "two"], "1"))
    with fails(MPI, MPI.ERR_INFO_NOKEY):
        info.Delete("one")
    with refused(KeyError):
        info["one"]
    info.Free()
    twin.Free()
    claim(info == MPI.INFO_NULL, "a freed info is null")


def statuses(MPI: Any, comm: Any) -> None:
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


def handles_survive_pickle(MPI: Any, comm: Any) -> None:
    """Predefined handles and constants are themselves after pickling; derived types and infos are equal in content."""
    for one in (MPI.SUM, MPI.DOUBLE, MPI.IN_PLACE, MPI.BOTTOM, MPI.INFO_NULL, MPI.DATATYPE_NULL):
        same(pickle.loads(pickle.dumps(one)) == one, True)
    vector = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    same(pickle.loads(pickle.dumps(vector)).Get_extent(), vector.Get_extent())
    info = MPI.Info.Create({"a": "b"})
    same(pickle.loads(pickle.dumps(info)).items(), [("a", "b")])
    vector.Free()
    info.Free()


def own_pickle(MPI: Any, comm: Any) -> None:
    """Programs choose how objects become bytes, and the protocol."""
    chosen = MPI.Pickle(protocol=2)
    same((chosen.PROTOCOL, chosen.loads(chosen.dumps([1]))), (2, [1]))
    data, buffers = MPI.Pickle(protocol=5, threshold=8).dumps_oob(np.arange(100.0))
    same((len(data) < 800, len(buffers)), (True, 1))
    same(MPI.pickle.loads_oob(data, buffers), np.arange(100.0))


def truth_of_handles(MPI: Any, comm: Any) -> None:
    """Null handles are false, all others true."""
    for name in (
        "COMM_NULL",
        "DATATYPE_NULL",
        "OP_NULL",
        "GROUP_NULL",
        "REQUEST_NULL",
        "INFO_NULL",
        "WIN_NULL",
    ):
        same(bool(getattr(MPI, name)), False)
    for one in (comm, MPI.INT, MPI.SUM, comm.Get_group(), MPI.GROUP_EMPTY):
        same(bool(one), True)
    same(MPI.Comm() == MPI.COMM_NULL, True)
