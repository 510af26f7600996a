"""What mpi4py's own Python modules (`mpi4py.util.…`) ask of `mpi4py.MPI` beyond its public names.

This room knows communicators and datatypes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import RLock
from typing import Any, NoReturn

import numpy as np

from spawnsim.comm.datatypes import Datatype
from spawnsim.errors import UnsupportedError
from spawnsim.virtual.comm.communicators import Intracomm
from spawnsim.virtual.comm.intercomm import Intercomm


def _comm_lock(comm: Any, key: Hashable | None = None) -> Any:
    """Return a lock: nobody competes for it, since a rank's calls come from one line of execution."""
    return RLock()


def _comm_lock_table(comm: Any) -> dict[Hashable, Any]:
    """Return no locks."""
    return {}


def _commctx_intra(comm: Intracomm) -> tuple[Intracomm, int]:
    """Return a communicator for messages behind the program's back, and a tag; the first call is collective."""
    notes = comm._context.notes.setdefault("contexts of pkl5", {})
    if comm._me not in notes:
        notes[comm._me] = [comm.Dup(), 0]
    entry = notes[comm._me]
    entry[1] += 1
    return entry[0], entry[1] - 1


def _commctx_inter(comm: Intercomm) -> tuple[Intercomm, int, Intracomm, bool]:
    """Return likewise for two groups, with a communicator of the own group; and whether that is the first."""
    notes = comm._context.notes.setdefault("contexts of pkl5", {})
    me = comm._side, comm._me
    if me not in notes:
        both = comm.Merge(high=bool(comm._side))
        notes[me] = [comm.Dup(), 0, both.Split(comm._side, comm._me)]
    entry = notes[me]
    entry[1] += 1
    return entry[0], entry[1] - 1, entry[2], comm._side == 0


def _typecode(datatype: Datatype) -> str | None:
    """Return the typecode of a datatype, or None."""
    return datatype.code or None


def _typealign(datatype: Datatype) -> int | None:
    """Return the alignment of a datatype in bytes, or None."""
    return int(np.dtype(datatype.dtype).alignment) if datatype.is_predefined and datatype.dtype else None


def _datatype_decode(datatype: Datatype, mark: bool = False) -> tuple[Datatype, str, dict[str, Any]]:
    """Return base type, combiner and parameters of a datatype."""
    return datatype.decode()


def _datatype_create(
    datatype: Datatype, combiner: str, params: dict[str, Any], free: bool = False
) -> Datatype:
    """Return the datatype that `_datatype_decode` took apart."""
    if combiner in ("NAMED", "DUP"):
        return datatype if combiner == "NAMED" else datatype.Dup()
    made: Datatype = getattr(datatype, f"Create_{combiner.lower()}")(**params)
    return made


def _refused(name: str) -> Callable[[Any], NoReturn]:
    def refuse(arg: Any) -> NoReturn:
        raise UnsupportedError(
            f"MPI.{name}: a virtual rank has no MPI library and no handles that C could be given; call from Python"
        )

    refuse.__module__, refuse.__name__ = __name__, name
    refuse.__doc__ = "Refuse: there are no handles of C."
    return refuse


_sizeof, _addressof, _handleof = _refused("_sizeof"), _refused("_addressof"), _refused("_handleof")
