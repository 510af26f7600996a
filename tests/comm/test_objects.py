"""Status, Info, Group, errors and singletons."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import spawnsim
from spawnsim import comm
from spawnsim.comm import failures
from spawnsim.comm.datatypes import BY_NAME
from spawnsim.comm.handles import ERRORS_ARE_FATAL
from spawnsim.comm.packing import Pickle, copied


def test_status_counts():
    """Counts follow the datatype; a rest makes them undefined, and elements count basic parts."""
    status = comm.Status()
    status.fill(source=3, tag=7, nbytes=20)
    assert (status.Get_source(), status.Get_tag(), status.count) == (3, 7, 20)
    assert (status.Get_count(comm.INT), status.Get_count(comm.DOUBLE)) == (5, comm.UNDEFINED)
    pair = BY_NAME["DOUBLE_INT"]
    assert (status.Get_count(pair), status.Get_elements(pair)) == (comm.UNDEFINED, 3)


def test_status_elements_can_be_set():
    """Set_elements is the inverse of Get_elements."""
    status, pair = comm.Status(), BY_NAME["DOUBLE_INT"]
    for count in range(5):
        status.Set_elements(pair, count)
        assert status.Get_elements(pair) == count


def test_status_is_copied_and_pickled_by_value():
    """Copies are equal and independent."""
    status = comm.Status()
    status.fill(1, 2, 3)
    for twin in (comm.Status(status), pickle.loads(pickle.dumps(status))):
        assert twin == status
        twin.Set_tag(9)
        assert status.tag == 2


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda info: info.Delete("zz"), failures.ERR_INFO_NOKEY), (lambda info: info.Get_nthkey(5), failures.ERR_ARG),
        (lambda info: info.Set("x" * 300, "a"), failures.ERR_INFO_KEY),
        (lambda info: info.Set("a", "v" * 2000), failures.ERR_INFO_VALUE),
        (lambda _info: comm.INFO_NULL.Set("a", "b"), failures.ERR_ARG),
    ],
)  # fmt: skip
def test_info_errors(call, code):
    """Mistakes have MPI's error classes."""
    with pytest.raises(comm.MPIException) as error:
        call(comm.Info.Create())
    assert error.value.Get_error_class() == code


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda g: g.Incl([7]), failures.ERR_RANK), (lambda g: g.Incl([0, 0]), failures.ERR_RANK),
        (lambda g: g.Range_incl([(0, 3, 0)]), failures.ERR_ARG),
        (lambda g: g.Range_incl([(0, 9, 1)]), failures.ERR_ARG),
        (lambda g: g.Translate_ranks([9], g), failures.ERR_RANK),
        (lambda _g: comm.GROUP_NULL.Get_size(), failures.ERR_GROUP),
    ],
)  # fmt: skip
def test_group_errors(call, code):
    """Ranks outside the group and null groups have MPI's error classes."""
    with pytest.raises(comm.MPIException) as error:
        call(comm.Group.of(range(4)))
    assert error.value.Get_error_class() == code


def test_exceptions_compare_as_codes():
    """MPI.Exception is its code, says its text, and is rebuilt from its arguments."""
    error = comm.CallError(failures.ERR_RANK, "rank 9 of 4")
    assert (int(error), error == failures.ERR_RANK, str(error)) == (6, True, "invalid rank: rank 9 of 4")
    assert str(type(error)(*error.args)) == str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_every_error_class_has_a_text():
    """No two classes share a number, and each has words."""
    classes = {
        name: value for name, value in vars(failures).items() if name.startswith("ERR_") and value < 1000
    }
    assert len(set(classes.values())) == len(classes)
    assert all(failures.Get_error_string(value) for value in classes.values())


@pytest.mark.parametrize("one", [comm.IN_PLACE, comm.BOTTOM, comm.BUFFER_AUTOMATIC])
def test_singletons_stay_single(one):
    """Pickling and copying give the same object."""
    assert pickle.loads(pickle.dumps(one)) is one is copy.deepcopy(one)


def test_error_handlers():
    """Predefined handlers stay, copies can be freed."""
    with pytest.raises(comm.CallError):
        comm.ERRORS_RETURN.Free()
    handler = comm.Errhandler(comm.ERRORS_RETURN)
    assert handler == comm.ERRORS_RETURN != comm.ERRORS_ARE_FATAL
    handler.Free()
    assert handler == comm.ERRHANDLER_NULL


def test_copied_objects_are_independent():
    """What a receiver gets is its own; plain values cost nothing."""
    original = {"a": [1, 2]}
    twin = copied(original)
    assert twin == original
    assert twin["a"] is not original["a"]
    assert copied("text") == "text"
    assert Pickle(protocol=2).PROTOCOL == 2


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", ">i4", "f8", "g", "D", "M8[s]"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1), (0, 3), (4096,), (300, 200)])
def test_the_pickle_of_an_array_is_that_of_pickle(dtype, shape):
    """The frame around its bytes is remembered: the second is put together, and read, without pickle."""
    own = Pickle()
    for value in range(3):
        array = np.full(shape, value).astype(dtype)
        for each in (array, array[::2] if shape else array, np.asfortranarray(array)):
            data, found = own.dumps(each), own.loads(own.dumps(each))
            expected = pickle.loads(data)
            assert data == pickle.dumps(each, 5)
            assert (found.dtype, found.shape, found.tobytes()) == (
                expected.dtype,
                expected.shape,
                expected.tobytes(),
            )
            assert found.flags.c_contiguous == expected.flags.c_contiguous
            assert found.flags.writeable == expected.flags.writeable
    array.flags.writeable = False
    assert own.dumps(array) == pickle.dumps(array, 5)


PREDEFINED = ["MAX", "OP_NULL", "INT", "INFO_NULL", "GROUP_EMPTY", "GROUP_NULL", "ERRORS_RETURN"]


@pytest.mark.parametrize("name", PREDEFINED)
def test_predefined_objects_and_copies_of_them_are_pickled(name):
    """A copy comes back as a copy; it was refused."""
    one = getattr(comm, name)
    assert pickle.loads(pickle.dumps(one)) is one
    again = pickle.loads(pickle.dumps(type(one)(one)))
    assert again == one
    assert again is not one


def test_communicators_with_a_topology_inherit_the_error_handler():
    """As MPI has it for whatever is made of a communicator: grids, graphs, merged groups."""

    def main(comm):
        comm.Set_errhandler(ERRORS_ARE_FATAL)
        half = comm.Split(comm.rank % 2)
        between = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
        made = [
            comm.Create_cart([comm.size]),
            comm.Create_dist_graph_adjacent([0], [0]),
            half,
            between,
            between.Merge(),
        ]
        assert [each.Get_errhandler() == ERRORS_ARE_FATAL for each in made] == [True] * 5

    spawnsim.run(main, ranks=10)


def test_comm_loads_no_foreign_library():
    """Importing the vocabulary loads neither torch, MPI, simpy nor greenlet."""
    code = "import sys, spawnsim.comm; sys.exit(bool({'torch', 'mpi4py', 'simpy', 'greenlet'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
