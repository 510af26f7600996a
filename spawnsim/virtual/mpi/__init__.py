"""`MPI`: what a program gets that imports `mpi4py.MPI` on virtual ranks.

A module with every name of mpi4py's, put together from the floor of words (`spawnsim.comm`), the virtual
communicators and windows, and the functions of this folder. It holds no state: each use means the calling rank.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from spawnsim import comm as words
from spawnsim.virtual.comm.calling import COMM_SELF, COMM_WORLD
from spawnsim.virtual.comm.communicators import COMM_NULL, Comm, Intracomm
from spawnsim.virtual.comm.intercomm import Intercomm
from spawnsim.virtual.comm.payload import pickler
from spawnsim.virtual.comm.probing import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from spawnsim.virtual.comm.topologies import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from spawnsim.virtual.mpi import functions, insides, refused
from spawnsim.virtual.mpi.grequests import Grequest
from spawnsim.virtual.onesided import Win
from spawnsim.virtual.requests import Prequest, Request

CLASSES = (
    Comm, Intracomm, Topocomm, Cartcomm, Graphcomm, Distgraphcomm, Intercomm, Request, Prequest, Grequest, Message, Win,
    refused.File, refused.Session,
)  # fmt: skip


def _own(room: ModuleType) -> dict[str, Any]:
    """Return the functions that a room defines."""
    return {
        name: value
        for name, value in vars(room).items()
        if callable(value)
        and getattr(value, "__module__", "") == room.__name__
        and not isinstance(value, type)
    }


def build() -> Any:
    """Return the module."""
    module: Any = ModuleType("mpi4py.MPI", "The virtual MPI of spawnsim, under mpi4py's names.")
    vars(module).update(words.namespace())
    vars(module).update({each.__name__: each for each in CLASSES})
    vars(module).update(refused.functions() | _own(functions) | _own(insides))
    module.COMM_WORLD, module.COMM_SELF, module.COMM_NULL = COMM_WORLD, COMM_SELF, COMM_NULL
    module.REQUEST_NULL, module.WIN_NULL = Request(), Win()
    module.MESSAGE_NULL, module.MESSAGE_NO_PROC = MESSAGE_NULL, MESSAGE_NO_PROC
    module.FILE_NULL, module.SESSION_NULL = refused.File(), refused.Session()
    module.__pyx_capi__, module._typedict_c, module._typedict_f = {}, module._typedict, module._typedict
    module.pickle = pickler
    for name in ("_world", "_here"):
        delattr(module, name)
    return module


MPI = build()
