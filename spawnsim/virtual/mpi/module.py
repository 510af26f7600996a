"""`MPI`: the module that a program on virtual ranks gets when it imports `mpi4py.MPI`.

The module has every name of mpi4py's, assembled from the vocabulary (`spawnsim.comm`), the virtual communicators and
windows, and `functions`. It holds no state: each use refers to the calling rank. Names outside the simulation
(sessions, ports) may be mentioned, but using them is an error (`comm.failures.ABSENT`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from spawnsim import comm as words
from spawnsim.comm.failures import absent
from spawnsim.virtual.mpi import functions
from spawnsim.virtual.mpi.comm import COMM_NULL, Comm
from spawnsim.virtual.mpi.communicators import COMM_SELF, COMM_WORLD, Intercomm, Intracomm
from spawnsim.virtual.mpi.files import FILE_NULL, File
from spawnsim.virtual.mpi.generalized import Grequest
from spawnsim.virtual.mpi.payload import pickler
from spawnsim.virtual.mpi.point_to_point import MESSAGE_NO_PROC, MESSAGE_NULL, Message
from spawnsim.virtual.mpi.requests import Prequest, Request
from spawnsim.virtual.mpi.topology import Cartcomm, Distgraphcomm, Graphcomm, Topocomm
from spawnsim.virtual.mpi.windows import Win

CLASSES = (
    Comm, Intracomm, Topocomm, Cartcomm, Graphcomm, Distgraphcomm, Intercomm, Request, Prequest, Grequest, Message,
    Win, File,
)  # fmt: skip


class Namespace(ModuleType):
    """A module with placeholders for the names that virtual ranks lack: only their use is an error."""

    _absent = absent("")

    def __getattr__(self, name: str) -> Any:
        try:
            return self._absent[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


def _own(source: ModuleType) -> dict[str, Any]:
    """Return the functions that a module defines."""
    return {
        name: value
        for name, value in vars(source).items()
        if callable(value)
        and getattr(value, "__module__", "") == source.__name__
        and not isinstance(value, type)
    }


def build() -> Any:
    """Return the assembled module."""
    module: Any = Namespace("mpi4py.MPI", "The virtual MPI of spawnsim, under mpi4py's names.")
    vars(module).update(words.namespace())
    vars(module).update({each.__name__: each for each in CLASSES})
    vars(module).update(_own(functions))
    module.COMM_WORLD, module.COMM_SELF, module.COMM_NULL = COMM_WORLD, COMM_SELF, COMM_NULL
    module.REQUEST_NULL, module.WIN_NULL = Request(), Win()
    module.FILE_NULL = FILE_NULL
    module.MESSAGE_NULL, module.MESSAGE_NO_PROC = MESSAGE_NULL, MESSAGE_NO_PROC
    module.__pyx_capi__, module._typedict_c, module._typedict_f = {}, module._typedict, module._typedict
    module.pickle = pickler
    for name in ("_world", "_here"):
        delattr(module, name)
    return module


MPI = build()
