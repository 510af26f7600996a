"""What communicators over torch.distributed have not, and what to use instead. Knows names only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spawnsim.errors import UnsupportedError
from spawnsim.real.rank.namespace import namespace as names

INSTEAD = {
    "Send_init": "Isend", "Recv_init": "Irecv", "Ssend_init": "Issend", "Bcast_init": "Ibcast",
    "Psend_init": "Isend", "Precv_init": "Irecv", "Attach_buffer": "bsend, which has its own", "Spawn": "torchrun",
    "Create_cart": "Split and rank arithmetic", "Create_graph": "Split", "Create_dist_graph": "Split",
    "Create_intercomm": "Split of one communicator",
}  # fmt: skip
SURVIVAL = "to survive a rank's death use torchrun --max-restarts, or --backend mpi --survive"


class Missing(UnsupportedError, AttributeError):
    """A name that is not here, so that `hasattr` says False."""


def refusal(name: str) -> Missing:
    """Return the error for one of mpi4py's methods that is not here."""
    if name in INSTEAD:
        return Missing(f"{name}: not over torch.distributed; use {INSTEAD[name]}, or --backend mpi")
    return Missing(f"{name}: not over torch.distributed; --backend mpi has all of mpi4py's calls")


def namespace(comm: Any) -> SimpleNamespace:
    """Return `MPI` for programs on `comm`: mpi4py's names in spawnsim's words."""
    found = names(comm)
    return Lacking(**vars(found))


class Lacking(SimpleNamespace):
    """A namespace that says what is missing, and what to do."""

    def __getattr__(self, name: str) -> Any:
        raise Missing(f"MPI.{name}: not over torch.distributed; --backend mpi has all of mpi4py's names")
