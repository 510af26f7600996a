"""mpi4py's namespace in the house's words: what a program that says `MPI.ANY_SOURCE` means on wrapped ranks.

Numbers, ops, types and statuses are spawnsim's (each MPI numbers them its own way); requests, windows and messages are
those that meet deadlines; all else is mpi4py's. Knows names only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mpi4py import MPI

from spawnsim import comm as words
from spawnsim.real.mpi import MPIComm, wrap
from spawnsim.real.requests import MPIPersistent, MPIRequest


class Win:
    """`MPI.Win.Allocate(…, comm=comm)` and its kin: windows of the communicator that is given."""

    @staticmethod
    def Allocate(size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over new memory; collective over `comm`."""
        return comm.Win.Allocate(size, disp_unit, info)

    @staticmethod
    def Allocate_shared(size: int, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over new memory that the ranks of one node share; collective over `comm`."""
        return comm.Win.Allocate_shared(size, disp_unit, info)

    @staticmethod
    def Create_dynamic(info: Any = None, comm: Any = None) -> Any:
        """Return a window without memory; collective over `comm`."""
        return comm.Win.Create_dynamic(info)

    @staticmethod
    def Create(memory: Any, disp_unit: int = 1, info: Any = None, comm: Any = None) -> Any:
        """Return a window over memory that exists; collective over `comm`."""
        return comm.Win.Create(memory, disp_unit, info)


class Message(MPI.Message):
    """`MPI.Message`, whose class methods take wrapped communicators."""

    @classmethod
    def Probe(cls, comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for a message and match it."""
        return comm.Mprobe(*args, **kwargs)

    @classmethod
    def probe(cls, comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for an object's message and match it."""
        return comm.mprobe(*args, **kwargs)

    @classmethod
    def Iprobe(cls, comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Match a message if one is there."""
        return comm.Improbe(*args, **kwargs)

    @classmethod
    def iprobe(cls, comm: Any, *args: Any, **kwargs: Any) -> Any:
        """Match an object's message if one is there."""
        return comm.improbe(*args, **kwargs)


def namespace(world: MPIComm) -> SimpleNamespace:
    """Return `MPI` for programs on `world`: pass it to whoever expects `mpi4py.MPI` beside a spawnsim communicator."""
    own: dict[str, Any] = {
        "COMM_WORLD": world, "COMM_SELF": wrap(MPI.COMM_SELF), "COMM_NULL": None, "WIN_NULL": None,
        "Comm": MPIComm, "Intracomm": MPIComm,
        "Request": MPIRequest, "Prequest": MPIPersistent, "REQUEST_NULL": MPIRequest(), "Win": Win, "Message": Message,
    }  # fmt: skip
    theirs = {name: value for name, value in vars(MPI).items() if not name.startswith("__")}
    return SimpleNamespace(**theirs | words.namespace() | own)
