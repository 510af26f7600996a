"""Operations: values as MPI's C code gives them, on arrays and objects."""

import pickle

import numpy as np
import pytest

from spawnsim import comm
from spawnsim.comm import ops
from spawnsim.comm.datatypes import BY_NAME

nan = float("nan")


def reduced(op, first, second, dtype):
    """Return first op second of two lists."""
    return op.reduce(np.array(first, dtype), np.array(second, dtype)).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("SUM", [5, 7]), ("PROD", [6, 12]), ("MAX", [3, 4]), ("MIN", [2, 3]), ("LAND", [1, 1]), ("LOR", [1, 1]),
     ("LXOR", [0, 0]), ("BAND", [2, 0]), ("BOR", [3, 7]), ("BXOR", [1, 7]), ("REPLACE", [2, 4]), ("NO_OP", [3, 3])],
)  # fmt: skip
def test_integers(name, expected):
    """Every operation on integers."""
    assert reduced(ops.BY_NAME[name], [2, 4], [3, 3], np.int32) == expected


def test_integers_wrap():
    """Sums overflow as in C, without a warning."""
    assert reduced(comm.SUM, [127], [1], np.int8) == [-128]


@pytest.mark.parametrize("op", [comm.MAX, comm.MIN])
def test_nan_in_extrema_is_as_in_mpi(op):
    """MPI's C macro keeps the incoming value unless the local one beats it, NaN included."""
    found = op.reduce(np.array([nan, 1.0, 0.0, -0.0]), np.array([1.0, nan, -0.0, 0.0]))
    assert np.array_equal(found, [nan, 1.0, 0.0, -0.0], equal_nan=True)
    assert np.signbit(found[2:]).tolist() == [False, True]


def test_locations():
    """The pair with the better value wins, ties go to the lower index."""
    pair = BY_NAME["DOUBLE_INT"].dtype
    first, second = [(1.0, 5), (2.0, 1), (3.0, 0)], [(1.0, 2), (5.0, 7), (0.0, 9)]
    assert reduced(comm.MAXLOC, first, second, pair) == [(1.0, 2), (5.0, 7), (3.0, 0)]
    assert reduced(comm.MINLOC, first, second, pair) == [(1.0, 2), (2.0, 1), (0.0, 9)]


def test_bfloat16_rounds_once():
    """bfloat16 is added in float32 and rounded to nearest even, as torch does."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(2000, generator=generator).to(torch.bfloat16) for _ in range(2))
    expected = first + second
    target = comm.as_buffer(second)
    target.unpack(comm.SUM.reduce(comm.as_buffer(first).pack(), target.pack()))
    assert torch.equal(second, expected)


@pytest.mark.parametrize(
    ("op", "name", "allowed"),
    [("SUM", "DOUBLE", True), ("SUM", "BYTE", False), ("SUM", "C_BOOL", False), ("LAND", "DOUBLE", False),
     ("LAND", "C_BOOL", True), ("BAND", "BYTE", True), ("MAX", "COMPLEX", False), ("MAXLOC", "DOUBLE", False),
     ("MAXLOC", "FLOAT_INT", True), ("REPLACE", "DOUBLE", False), ("SUM", "BFLOAT16_T", True)],
)  # fmt: skip
def test_operations_take_the_types_of_the_standard(op, name, allowed):
    """A pair of operation and type that MPI forbids is ERR_OP."""
    if allowed:
        ops.BY_NAME[op].check(BY_NAME[name])
    else:
        with pytest.raises(comm.CallError, match=f"{op} does not take MPI_{name}") as error:
            ops.BY_NAME[op].check(BY_NAME[name])
        assert error.value == 9


def test_objects():
    """On Python objects an operation is what its name says; pairs are (value, index)."""
    assert [comm.SUM("a", "b"), comm.LAND(3, 4), comm.LXOR(3, 4), comm.MAX(3, 4)] == ["ab", True, False, 4]
    assert [comm.MAXLOC((3, 1), (3, 0)), comm.MINLOC((nan, 1), (2.0, 0))] == [(3, 0), (2.0, 0)]
    assert [comm.REPLACE(3, 4), comm.NO_OP(3, 4)] == [4, 3]


def test_functions_of_the_program():
    """A user's function gets buffers and the datatype, and writes in place."""
    seen = []

    def add(inbuf, inoutbuf, datatype):
        seen.append(datatype)
        np.frombuffer(inoutbuf)[:] += np.frombuffer(inbuf)

    op = comm.Op.Create(add, commute=True)
    assert reduced(op, [1.0, 2.0], [10.0, 20.0], np.float64) == [11.0, 22.0]
    assert seen == [comm.DOUBLE]
    assert (op.Is_commutative(), op.is_predefined, comm.SUM.is_predefined) == (True, False, True)


def test_functions_see_derived_types_with_their_gaps():
    """For a derived type the function's buffers have the type's extent."""

    def add(inbuf, inoutbuf, datatype):
        assert len(inbuf) == datatype.Get_extent()[1] * 2
        np.frombuffer(inoutbuf)[::2] += np.frombuffer(inbuf)[::2]

    every_other = comm.DOUBLE.Create_resized(0, 16).Commit()
    source, target = np.arange(4.0), np.full(4, 10.0)
    comm.Op.Create(add).Reduce_local([source, 2, every_other], [target, 2, every_other])
    assert target.tolist() == [10.0, 10.0, 12.0, 10.0]


def test_reduce_local_checks_its_arguments():
    """Counts and types of both buffers must agree."""
    with pytest.raises(ValueError, match="count 2 and receive count 3"):
        comm.SUM.Reduce_local(np.zeros(2), np.zeros(3))
    with pytest.raises(ValueError, match="mismatch in send and receive MPI datatypes"):
        comm.SUM.Reduce_local(np.zeros(2), np.zeros(2, np.float32))


def test_operations_are_shown_by_their_names():
    """As the reference prints the defaults of calls; one of the program, by its function."""
    assert (repr(comm.SUM), repr(comm.OP_NULL)) == ("SUM", "OP_NULL")
    assert repr(comm.Op.Create(min)) == "Op.Create(<built-in function min>)"


def test_null_and_predefined_handles():
    """The null operation cannot be used, predefined ones cannot be freed, all survive pickle."""
    for call in (comm.OP_NULL.Is_commutative, comm.OP_NULL.Free, comm.SUM.Free):
        with pytest.raises(comm.CallError):
            call()
    assert pickle.loads(pickle.dumps(comm.MAXLOC)) is comm.MAXLOC
    assert comm.Op(comm.SUM) == comm.SUM != comm.PROD
