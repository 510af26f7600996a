"""The numbers and singletons of MPI, under mpi4py's names.

The values are spawnsim's own: a real MPI may use other values for the same names, so a wrapper over it translates the
arguments that it passes on (`ANY_SOURCE`, `PROC_NULL`, lock types) by name.
"""

from __future__ import annotations

import sys
from typing import Any, Final

UNDEFINED: Final = -32766
# Values that no MPI uses: MPICH's ANY_SOURCE is Open MPI's PROC_NULL, and the other way round, so mpi4py's values of
# these, or the `rank - 1` of rank 0, must be invalid here.
ANY_SOURCE: Final = -101
PROC_NULL: Final = -102
ANY_TAG: Final = -1
ROOT: Final = -3
BSEND_OVERHEAD: Final = 96

KEYVAL_INVALID: Final = 0x24000000
TAG_UB: Final = 0x64400001
IO: Final = 0x64400005
WTIME_IS_GLOBAL: Final = 0x64400007
UNIVERSE_SIZE: Final = 0x64400009
LASTUSEDCODE: Final = 0x6440000B
APPNUM: Final = 0x6440000D
WIN_BASE: Final = 0x66000001
WIN_SIZE: Final = 0x66000003
WIN_DISP_UNIT: Final = 0x66000005
WIN_CREATE_FLAVOR: Final = 0x66000007
WIN_FLAVOR: Final = WIN_CREATE_FLAVOR
WIN_MODEL: Final = 0x66000009
TAG_UB_VALUE: Final = 2**28 - 1
"""The largest tag: the value of the attribute `TAG_UB`."""

IDENT: Final = 0
CONGRUENT: Final = 1
SIMILAR: Final = 2
UNEQUAL: Final = 3

GRAPH: Final = 1
CART: Final = 2
DIST_GRAPH: Final = 3
WEIGHTS_EMPTY: Final = 0x6E300001
UNWEIGHTED: Final = 0x6E300002

COMM_TYPE_SHARED: Final = 1
COMM_TYPE_HW_GUIDED: Final = 2
COMM_TYPE_HW_UNGUIDED: Final = 3
COMM_TYPE_RESOURCE_GUIDED: Final = 4

WIN_FLAVOR_CREATE: Final = 1
WIN_FLAVOR_ALLOCATE: Final = 2
WIN_FLAVOR_DYNAMIC: Final = 3
WIN_FLAVOR_SHARED: Final = 4
WIN_SEPARATE: Final = 1
WIN_UNIFIED: Final = 2
LOCK_EXCLUSIVE: Final = 234
LOCK_SHARED: Final = 235
MODE_NOCHECK: Final = 1024
MODE_NOSTORE: Final = 2048
MODE_NOPUT: Final = 4096
MODE_NOPRECEDE: Final = 8192
MODE_NOSUCCEED: Final = 16384

MODE_CREATE: Final = 1
MODE_RDONLY: Final = 2
MODE_WRONLY: Final = 4
MODE_RDWR: Final = 8
MODE_DELETE_ON_CLOSE: Final = 16
MODE_UNIQUE_OPEN: Final = 32
MODE_EXCL: Final = 64
MODE_APPEND: Final = 128
MODE_SEQUENTIAL: Final = 256
SEEK_SET: Final = 600
SEEK_CUR: Final = 602
SEEK_END: Final = 604
DISPLACEMENT_CURRENT: Final = -54278278
DISP_CUR: Final = DISPLACEMENT_CURRENT

ORDER_C: Final = 56
ORDER_FORTRAN: Final = 57
ORDER_F: Final = ORDER_FORTRAN
DISTRIBUTE_BLOCK: Final = 121
DISTRIBUTE_CYCLIC: Final = 122
DISTRIBUTE_NONE: Final = 123
DISTRIBUTE_DFLT_DARG: Final = -49767
TYPECLASS_REAL: Final = 1
TYPECLASS_INTEGER: Final = 2
TYPECLASS_COMPLEX: Final = 3
TYPECLASS_LOGICAL: Final = 4

COMBINER_NAMED: Final = 1
COMBINER_DUP: Final = 2
COMBINER_CONTIGUOUS: Final = 3
COMBINER_VECTOR: Final = 4
COMBINER_HVECTOR: Final = 6
COMBINER_INDEXED: Final = 7
COMBINER_HINDEXED: Final = 9
COMBINER_INDEXED_BLOCK: Final = 10
COMBINER_STRUCT: Final = 12
COMBINER_SUBARRAY: Final = 13
COMBINER_DARRAY: Final = 14
COMBINER_F90_REAL: Final = 15
COMBINER_F90_COMPLEX: Final = 16
COMBINER_F90_INTEGER: Final = 17
COMBINER_RESIZED: Final = 18
COMBINER_HINDEXED_BLOCK: Final = 19
COMBINER_VALUE_INDEX: Final = 20

THREAD_SINGLE: Final = 0
THREAD_FUNNELED: Final = 1
THREAD_SERIALIZED: Final = 2
THREAD_MULTIPLE: Final = 3

F_SOURCE: Final = 2
F_TAG: Final = 3
F_ERROR: Final = 4
F_STATUS_SIZE: Final = 5
VERSION: Final = 4
SUBVERSION: Final = 1
MAX_PROCESSOR_NAME: Final = 128
MAX_ERROR_STRING: Final = 512
MAX_PORT_NAME: Final = 1024
MAX_INFO_KEY: Final = 255
MAX_INFO_VAL: Final = 1024
MAX_OBJECT_NAME: Final = 128
MAX_DATAREP_STRING: Final = 128
MAX_LIBRARY_VERSION_STRING: Final = 8192
MAX_PSET_NAME_LEN: Final = 256
MAX_STRINGTAG_LEN: Final = 256


class _Singleton(int):
    """An `int` of which each subclass has one instance, also after pickling."""

    _one: _Singleton | None = None
    _name = ""
    _value = 0

    def __new__(cls, *_: Any) -> _Singleton:
        if cls._one is None:
            cls._one = super().__new__(cls, cls._value)
        return cls._one

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), ())


class BottomType(_Singleton):
    """Type of `BOTTOM`, the start of the address range."""

    _name = "BOTTOM"


class InPlaceType(_Singleton):
    """Type of `IN_PLACE`, the buffer argument that stands for the call's other buffer."""

    _name, _value = "IN_PLACE", -1


class BufferAutomaticType(_Singleton):
    """Type of `BUFFER_AUTOMATIC`, a buffer for `Bsend` that the library manages."""

    _name, _value = "BUFFER_AUTOMATIC", -2


def is_in_place(spec: object) -> bool:
    """Return whether a buffer argument is `IN_PLACE`, or mpi4py's, which packages may use with our communicators.

    Args:
        spec: the buffer argument of a call.

    Returns:
        Whether the call must use its other buffer.
    """
    return spec is IN_PLACE or type(spec).__name__ == InPlaceType.__name__


def of_mpi4py(rank: int) -> str:
    """Return an addition to the error about an invalid rank: the program may have used mpi4py's value of a constant.

    Args:
        rank: the rank argument of a call.

    Returns:
        Text to append to the error; "" if the rank is not one of mpi4py's constants, or mpi4py is not loaded.
    """
    theirs = vars(sys.modules.get("mpi4py.MPI", sys)).get
    name = next((name for name in ("ANY_SOURCE", "PROC_NULL") if theirs(name) == rank), None)
    return f"; {rank} is {name} of mpi4py: from spawnsim.comm import {name}" if name else ""


BOTTOM: Final = BottomType()
IN_PLACE: Final = InPlaceType()
BUFFER_AUTOMATIC: Final = BufferAutomaticType()
