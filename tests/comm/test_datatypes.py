"""Datatypes: sizes, extents, copies and names, literally and against the real MPI."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import oracle_types

from spawnsim import comm
from spawnsim.comm import layouts
from spawnsim.comm.datatypes import BY_NAME, typedict

MPI = SimpleNamespace(**comm.namespace())


@pytest.mark.mpi
def test_random_types_are_as_in_the_real_mpi():
    """400 random nested types have MPI's size, extents, envelope, contents and counts, and copy the same bytes."""
    program = Path(oracle_types.__file__)
    real = subprocess.run([sys.executable, program, "400"], check=True, capture_output=True, timeout=120)
    assert oracle_types.describe(MPI, oracle_types.own_copies, 400) == json.loads(real.stdout)


@pytest.mark.parametrize(
    ("name", "size", "extent"),
    [("INT", 4, 4), ("DOUBLE_INT", 12, 16), ("LONG_INT", 12, 16), ("SHORT_INT", 6, 8), ("INT_INT", 8, 8),
     ("BFLOAT16_T", 2, 2), ("FLOAT16_T", 2, 2), ("C_BOOL", 1, 1), ("COMPLEX16", 16, 16)],
)  # fmt: skip
def test_predefined_sizes(name, size, extent):
    """Predefined types have C's sizes; pairs have its padding."""
    assert (BY_NAME[name].Get_size(), BY_NAME[name].Get_extent()) == (size, (0, extent))


def test_names_and_aliases():
    """Aliases are the same object; named types print MPI's name."""
    assert BY_NAME["TWOINT"] is BY_NAME["INT_INT"]
    assert BY_NAME["INT_INT"].Get_name() == "MPI_2INT"
    assert MPI.DOUBLE.Dup().Get_name() == ""


@pytest.mark.parametrize("code", ["d", "f8", "i", "?", "Zd", "l", "u4", "f2"])
def test_codes_go_to_types_of_the_same_dtype(code):
    """A typecode finds a type whose own code finds the same dtype again."""
    datatype = comm.Datatype.fromcode(code)
    assert typedict[datatype.tocode()].dtype == datatype.dtype


def test_unknown_code_is_an_error():
    """An unknown typecode is named."""
    with pytest.raises(KeyError, match="'zz'"):
        comm.Datatype.fromcode("zz")


def test_predefined_types_cannot_be_freed():
    """Freeing a predefined type is an error of class ERR_TYPE."""
    with pytest.raises(comm.CallError) as error:
        MPI.INT.Free()
    assert error.value.Get_error_class() == MPI.ERR_TYPE


def test_types_survive_pickle():
    """Predefined types come back as themselves, derived ones with the same layout."""
    vector = MPI.DOUBLE.Create_vector(3, 1, 2).Commit()
    assert pickle.loads(pickle.dumps(MPI.DOUBLE)) is MPI.DOUBLE
    assert pickle.loads(pickle.dumps(comm.DATATYPE_NULL)) == comm.DATATYPE_NULL
    again = pickle.loads(pickle.dumps(vector))
    assert (again.Get_size(), again.Get_extent(), again.committed) == (24, vector.Get_extent(), True)


def test_packing_beyond_the_buffer_is_truncation():
    """A packed buffer that is too short is an error, where C would write beyond it."""
    with pytest.raises(comm.Truncated, match="12 bytes at position 0 do not fit a buffer of 8"):
        MPI.INT.Pack(np.zeros(3, np.int32), np.zeros(8, np.uint8), 0, None)


def test_a_type_outlives_the_handles_of_those_it_was_made_of():
    """MPI says so; a base that was freed, by the program or by who took the type apart, was gone from its parts."""
    pair = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.INT, MPI.DOUBLE])
    padded = pair.Create_resized(0, 32)
    rows = MPI.Datatype.Create_struct([1, 1], [0, 64], [padded, pair])
    pair.Free()
    for _ in range(2):
        base, name, arguments = padded.decode()
        assert (name, arguments["extent"], base.combiner) == ("RESIZED", 32, MPI.COMBINER_STRUCT)
        base.Free()
        for part in (*rows.Get_contents()[3], *rows.decode()[2]["datatypes"]):
            part.Free()
    assert (rows.Get_size(), rows.Get_envelope()[3]) == (40, 2)


def test_types_of_several_parts_have_a_type_string():
    """It is V and their extent, as in mpi4py; numpy takes it for that many bytes."""
    pair = MPI.Datatype.Create_struct([1, 2], [0, 8], [MPI.INT, MPI.DOUBLE])
    assert (pair.typestr, pair.typechar, MPI.DOUBLE.typestr, MPI.DOUBLE.Dup().typechar) == (
        "V24",
        "V",
        "f8",
        "d",
    )
    assert (MPI.DATATYPE_NULL.typestr, MPI.DATATYPE_NULL.typechar) == ("", "")


TYPES_OF_BLOCKS = {
    "gaps": lambda: MPI.INT.Create_vector(3, 2, 5),
    "backwards": lambda: MPI.DOUBLE.Create_hindexed([2, 1], [40, 8]),
    "below the start": lambda: MPI.SHORT.Create_hindexed([1, 3], [-10, 4]),
    "resized": lambda: MPI.INT.Create_contiguous(3).Create_resized(-4, 20),
    "negative extent": lambda: MPI.CHAR.Create_contiguous(3).Create_resized(0, -8),
    "dense": lambda: MPI.CHAR.Create_contiguous(7),
}


@pytest.mark.parametrize("name", TYPES_OF_BLOCKS)
def test_long_blocks_are_copied_as_short_ones_are(name, monkeypatch):
    """Copying block by block moves the same bytes as copying by an index; also where a message ends inside a block."""

    def copies(long_nbytes):
        monkeypatch.setattr(layouts, "LONG", long_nbytes)
        layout = TYPES_OF_BLOCKS[name]().layout
        low, high = layout.span(4)
        memory = np.random.default_rng(1).integers(0, 256, high - low, np.uint8)
        data = layout.gather(memory, 4, low)
        for nbytes in range(len(data) + 1):
            written = np.zeros_like(memory)
            layout.scatter(written, data[:nbytes], low)
            yield written.tolist()
        yield data.tolist()

    assert list(copies(1)) == list(copies(1 << 60))


def test_blocks_of_gigabytes():
    """A block may be longer than the widest cell of numpy, and costs no index of its bytes."""
    kind = MPI.BYTE.Create_vector(2, 2**31, 2**31 + 8).Create_resized(0, 2**32 + 16).Commit()
    memory = np.zeros(2**32 + 16, np.uint8)  # takes room only where it is written
    message = comm.as_buffer([memory, 1, kind])
    assert message.unpack(np.arange(1, 5, dtype=np.uint8)) == 4
    assert memory[:5].tolist() == [1, 2, 3, 4, 0]
    assert comm.as_buffer([memory, 0, kind]).pack().tolist() == []
    dense = MPI.BYTE.Create_contiguous(2**31).Commit()
    assert comm.as_buffer([memory, 0, dense]).pack().tolist() == []
