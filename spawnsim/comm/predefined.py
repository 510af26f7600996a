"""The predefined datatypes, and the tables from typecodes and numpy dtypes to them.

One line per type: MPI's name, numpy's dtype of its storage, typecode, family. The family says which operations
it allows: integer, float, complex, logical, byte, fortran (an integer without logical operations), pair, opaque.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from spawnsim.comm.datatypes import BY_NAME as BY_NAME
from spawnsim.comm.datatypes import NAMED as NAMED
from spawnsim.comm.datatypes import VALUE_INDEX, Datatype
from spawnsim.comm.datatypes import typedict as typedict
from spawnsim.comm.layouts import BF16, Recipe, atom, place

_TABLE: Final = """
PACKED u1 B opaque | BYTE u1 B byte | AINT i8 p integer | OFFSET i8 p integer | COUNT i8 p integer
CHAR i1 c integer | WCHAR u4 U opaque | SIGNED_CHAR b b integer | SHORT h h integer | INT i i integer | LONG l l integer
LONG_LONG q q integer | UNSIGNED_CHAR B B integer | UNSIGNED_SHORT H H integer | UNSIGNED I I integer
UNSIGNED_LONG L L integer | UNSIGNED_LONG_LONG Q Q integer | FLOAT f f float | DOUBLE d d float | LONG_DOUBLE g g float
C_BOOL ? b1 logical | INT8_T i1 i1 integer | INT16_T i2 i2 integer | INT32_T i4 i4 integer | INT64_T i8 i8 integer
UINT8_T u1 u1 integer | UINT16_T u2 u2 integer | UINT32_T u4 u4 integer | UINT64_T u8 u8 integer | FLOAT16_T e e float
C_FLOAT_COMPLEX F F complex | C_DOUBLE_COMPLEX D D complex | C_LONG_DOUBLE_COMPLEX G G complex
CXX_BOOL ? ? logical | CXX_FLOAT_COMPLEX F F complex | CXX_DOUBLE_COMPLEX D D complex
CXX_LONG_DOUBLE_COMPLEX G G complex | CHARACTER i1 c integer | LOGICAL i4 i logical | INTEGER i i fortran
REAL f f float | DOUBLE_PRECISION d d float | COMPLEX F F complex | DOUBLE_COMPLEX D D complex
LOGICAL1 i1 b logical | LOGICAL2 i2 h logical | LOGICAL4 i4 i logical | LOGICAL8 i8 l logical
INTEGER1 i1 i1 fortran | INTEGER2 i2 i2 fortran | INTEGER4 i4 i4 fortran | INTEGER8 i8 i8 fortran
REAL2 e e float | REAL4 f f4 float | REAL8 d f8 float | REAL16 g f16 float
COMPLEX8 F c8 complex | COMPLEX16 D c16 complex | COMPLEX32 G c32 complex
"""
_ALIASES: Final = """
FLOAT32_T FLOAT | FLOAT64_T DOUBLE | C_COMPLEX C_FLOAT_COMPLEX | TWOINT INT_INT | UNSIGNED_INT UNSIGNED | BOOL C_BOOL
SIGNED_SHORT SHORT | SIGNED_INT INT | SIGNED_LONG LONG | SIGNED_LONG_LONG LONG_LONG | SINT8_T INT8_T | SINT16_T INT16_T
SINT32_T INT32_T | SINT64_T INT64_T | F_BOOL LOGICAL | F_INT INTEGER | F_FLOAT REAL | F_DOUBLE DOUBLE_PRECISION
F_COMPLEX COMPLEX | F_FLOAT_COMPLEX COMPLEX | F_DOUBLE_COMPLEX DOUBLE_COMPLEX
"""
_MPI_NAMES: Final = {
    "LONG_LONG": "MPI_LONG_LONG_INT", "C_FLOAT_COMPLEX": "MPI_C_COMPLEX", "INT_INT": "MPI_2INT",
}  # fmt: skip
_PAIRS: Final = {"SHORT_INT": "h", "INT_INT": "i", "LONG_INT": "l", "FLOAT_INT": "f", "DOUBLE_INT": "d",
                 "LONG_DOUBLE_INT": "g"}  # fmt: skip


def _named(name: str, dtype: np.dtype[Any], code: str, family: str) -> Datatype:
    """Return a predefined type; the bytes of a pair type lie apart where C would pad."""
    layout = atom(dtype.itemsize, dtype.alignment)
    if family == "pair":
        value, index = dtype["value"].itemsize, dtype.fields["index"][1] if dtype.fields else 0
        layout = place([(atom(value), 1, 0), (atom(4), 1, index)]).resized(0, dtype.itemsize)
    new = Datatype.of(layout, Recipe("NAMED", None, {}))
    new.dtype, new.code, new.family = dtype, code, family
    new.committed = new.is_predefined = True
    new.Set_name(_MPI_NAMES.get(name, f"MPI_{name}"))
    return new


def _pair(code: str) -> np.dtype[Any]:
    return np.dtype([("value", code), ("index", np.int32)], align=True)


def _build() -> dict[str, Datatype]:
    rows = (row.split() for line in _TABLE.strip().splitlines() for row in line.split("|"))
    types = {name: _named(name, np.dtype(dtype), code, family) for name, dtype, code, family in rows}
    types |= {name: _named(name, _pair(code), "", "pair") for name, code in _PAIRS.items()}
    types["BFLOAT16_T"] = _named("BFLOAT16_T", BF16, "", "float")
    types |= dict.fromkeys(("DATATYPE_NULL", "COMPLEX4", "INTEGER16", "LOGICAL16"), Datatype())
    pairs = (pair.split() for line in _ALIASES.strip().splitlines() for pair in line.split("|"))
    return types | {alias: types[name] for alias, name in pairs}


BY_NAME.update(_build())
NAMED.update((each.Get_name() if each else "DATATYPE_NULL", each) for each in BY_NAME.values())

DATATYPE_NULL = BY_NAME["DATATYPE_NULL"]
BYTE, PACKED, CHAR, BOOL, AINT = (BY_NAME[name] for name in ("BYTE", "PACKED", "CHAR", "C_BOOL", "AINT"))
INT, LONG, FLOAT, DOUBLE = (BY_NAME[name] for name in ("INT", "LONG", "FLOAT", "DOUBLE"))
INT32_T, INT64_T, UINT8_T, UINT64_T = (
    BY_NAME[name] for name in ("INT32_T", "INT64_T", "UINT8_T", "UINT64_T")
)
BFLOAT16_T, DOUBLE_INT, FLOAT_INT, INT_INT = (
    BY_NAME[name] for name in ("BFLOAT16_T", "DOUBLE_INT", "FLOAT_INT", "INT_INT")
)

_C_CODES: Final = """
? C_BOOL b SIGNED_CHAR h SHORT i INT l LONG q LONG_LONG B UNSIGNED_CHAR H UNSIGNED_SHORT I UNSIGNED L
UNSIGNED_LONG Q UNSIGNED_LONG_LONG e FLOAT16_T f FLOAT d DOUBLE g LONG_DOUBLE Zf C_FLOAT_COMPLEX Zd
C_DOUBLE_COMPLEX F C_FLOAT_COMPLEX D C_DOUBLE_COMPLEX Zg C_LONG_DOUBLE_COMPLEX G C_LONG_DOUBLE_COMPLEX i1
INT8_T i2 INT16_T i4 INT32_T i8 INT64_T f4 FLOAT f8 DOUBLE f16 LONG_DOUBLE c8 C_FLOAT_COMPLEX c16
C_DOUBLE_COMPLEX c32 C_LONG_DOUBLE_COMPLEX b1 C_BOOL u1 UINT8_T u2 UINT16_T u4 UINT32_T u8 UINT64_T f2
FLOAT16_T n COUNT N UNSIGNED_LONG p AINT P UNSIGNED_LONG c CHAR a CHAR S CHAR S1 CHAR s CHAR 1s CHAR U WCHAR
U1 WCHAR u UINT16_T 1u UINT16_T w WCHAR 1w WCHAR M INT64_T M8 INT64_T m INT64_T m8 INT64_T bf16 BFLOAT16_T
"""
_words = _C_CODES.split()
typedict.update((code, BY_NAME[name]) for code, name in zip(_words[::2], _words[1::2], strict=True))
VALUE_INDEX.update(((BY_NAME[name.removesuffix("_INT")], INT), BY_NAME[name]) for name in _PAIRS)

BY_DTYPE: Final[dict[np.dtype[Any], Datatype]] = {
    np.dtype(char): typedict[char] for char in "?bhilqBHILQefdgFDG"
} | {np.dtype("S1"): CHAR, np.dtype("U1"): typedict["U"], BF16: BFLOAT16_T}
"""Native numpy dtypes to datatypes, as mpi4py finds them from the buffer's format."""
