"""Status, Info, Group, errors and singletons."""

import copy
import pickle

import numpy as np
import pytest

import spawnsim
from spawnsim import comm
from spawnsim.comm import constants, failures
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


def test_info_is_a_mapping():
    """Info behaves as a dictionary of strings with MPI's limits."""
    info = comm.Info.Create({"a": "1"})
    info["b"] = "2"
    assert (info.items(), len(info), info.Get("z"), info.get("z", "0")) == (
        [("a", "1"), ("b", "2")],
        2,
        None,
        "0",
    )
    assert (info.Dup() == info, info.Dup().items() == info.items()) == (False, True)
    assert (info.Get_nthkey(1), info.pop("a"), "a" in info) == ("b", "1", False)


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


def test_group_algebra():
    """Union, intersection and difference keep the first group's order."""
    world = comm.Group.of(range(10, 16), me=12)
    even, low = world.Incl([4, 2, 0]), world.Range_incl([(0, 2, 1)])
    assert comm.Group.Union(even, low).members == (14, 12, 10, 11)
    assert comm.Group.Intersection(even, low).members == (12, 10)
    assert comm.Group.Difference(even, low).members == (14,)
    assert (world.rank, even.rank, world.Excl([2]).rank) == (2, 1, comm.UNDEFINED)
    assert world.Range_excl([(5, 1, -2)]).members == (10, 12, 14)


def test_group_comparison():
    """Same order, same members, or neither."""
    world = comm.Group.of(range(4))
    shuffled = world.Incl([1, 0, 2, 3])
    relations = [world.Compare(other) for other in (world.Dup(), shuffled, comm.GROUP_EMPTY)]
    assert relations == [constants.IDENT, constants.SIMILAR, constants.UNEQUAL]
    assert world.Incl([]) == comm.GROUP_EMPTY != comm.GROUP_NULL


def test_ranks_are_translated():
    """Ranks of one group are found in another; strangers are undefined, PROC_NULL stays."""
    world = comm.Group.of(range(4))
    part = world.Incl([3, 1])
    assert world.Translate_ranks([0, 1, comm.PROC_NULL, 3], part) == [comm.UNDEFINED, 1, comm.PROC_NULL, 0]
    assert part.Translate_ranks(None, world) == [3, 1]


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


def test_constants_are_distinct_where_they_meet():
    """Ranks' special values differ from each other and from every rank."""
    special = [comm.ANY_SOURCE, comm.PROC_NULL, comm.ROOT, comm.UNDEFINED]
    assert len(set(special)) == 4
    assert max(special) < 0


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
