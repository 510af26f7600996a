"""The door for groups of other libraries: whatever a user passes as a group becomes a `Comm`.

This room knows which building wraps what, by name; it imports a building only when it is needed.
"""

from __future__ import annotations

import importlib
from typing import Any

from spawnsim.comm.protocols import Comm
from spawnsim.errors import ParameterError

# Which building wraps a foreign group, by the package that its type comes from.
_WRAPPERS = {"mpi4py": "spawnsim.real.mpi", "torch": "spawnsim.real.torch"}


def as_comm(group: Any) -> Comm:
    """Return a spawnsim `Comm` for what a user passed as a group.

    A `Comm` comes back unchanged; an mpi4py communicator or a torch.distributed process group is wrapped by its
    building's `wrap(group)`, which is imported only then. Raises `ParameterError` for anything else.
    """
    if hasattr(group, "compute") and hasattr(group, "clock"):
        found: Comm = group
        return found
    package = type(group).__module__.partition(".")[0]
    if package not in _WRAPPERS:
        raise ParameterError(
            f"group={group!r}: pass a spawnsim Comm, an mpi4py communicator or a torch.distributed group"
        )
    wrapped: Comm = importlib.import_module(_WRAPPERS[package]).wrap(group)
    return wrapped
