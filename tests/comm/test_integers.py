"""What counts as an integer where MPI wants one."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from spawnsim.comm.failures import SpecTypeError, TooLarge
from spawnsim.comm.handles import AINT, each_integer, integer
from spawnsim.errors import UsageError


class Index:
    """An integer by `__index__` alone."""

    def __index__(self):
        return 3


@pytest.mark.parametrize(
    "value", [3, np.int64(3), np.uint8(3), np.array(3), 3.9, np.float32(3.5), Fraction(10, 3), Decimal("3.2")]
)
def test_one_number_is_truncated_as_in_c(value):
    """Whatever has `__int__`; it comes out as Python's own."""
    assert integer(value) == 3
    assert type(integer(value)) is int


@pytest.mark.parametrize("value", ["3", None, [3], 3j, b"3", Index(), object()])
def test_what_is_no_number(value):
    """A TypeError, and the program's fault."""
    with pytest.raises(SpecTypeError, match="an integer is required") as caught:
        integer(value)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, UsageError)


def test_lists_take_integers_only():
    """By `__index__`, as mpi4py does: no floats."""
    assert each_integer([True, np.int8(2), Index()]) == [1, 2, 3]
    assert [type(each) for each in each_integer(np.arange(2))] == [int, int]
    with pytest.raises(TypeError):
        each_integer([1.0])


def test_numbers_that_do_not_fit():
    """They would come out as something else in C."""
    assert integer(np.int64(2**31 - 1)) == 2**31 - 1
    assert integer(2**40, AINT) == 2**40
    for call in (lambda: integer(2**31), lambda: each_integer([-(2**31) - 1]), lambda: integer(1e30, AINT)):
        with pytest.raises(TooLarge, match="too large") as caught:
            call()
        assert isinstance(caught.value, OverflowError)
