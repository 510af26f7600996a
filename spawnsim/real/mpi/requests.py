"""Requests over mpi4py's: the raw request holds the buffer, the registry holds the raw request.

A dropped `Isend` handle corrupts messages on both MPIs, silently; here nothing is dropped before it is complete. Knows
mpi4py's requests; waiting and reporting are those of all real requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from spawnsim.real.mpi.words import failure, rank_back
from spawnsim.real.rank.pending import Pending

if TYPE_CHECKING:
    from spawnsim.real.mpi.home import Home
    from spawnsim.real.rank.staging import Stage


class MPIRequest(Pending):
    """A request: mpi4py's methods, with deadlines."""

    __slots__ = ("_raw", "_stage", "_status")
    _raw: MPI.Request
    _status: MPI.Status
    _stage: Stage | None

    @classmethod
    def of(
        cls, raw: MPI.Request, home: Home, what: tuple[str, int, Any], stage: Stage | None = None
    ) -> MPIRequest:
        """Return the request over one of mpi4py's; `what` is (operation, peer or -1, communicator).

        `stage`: of GPU tensors among the buffers, which receive when the request is complete.
        """
        self = cls()
        self._raw, self._status, self._stage = raw, MPI.Status(), stage
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        try:
            done = self._raw.Test(self._status)
        except MPI.Exception as error:
            raise failure(error, self._what[2]._raw, self._text(), self._what[1]) from None
        if done and self._stage is not None:
            land(self._stage, self._status)
            if not self._persistent:
                self._stage = None
        return done

    def _describe(self, status: Any) -> None:
        fill(status, self._status)

    def Cancel(self) -> None:
        super().Cancel()
        if not self._complete:
            self._raw.Cancel()


class MPIPersistent(MPIRequest):
    """A persistent or partitioned request: inactive until started, never null until freed."""

    __slots__ = ()

    @classmethod
    def of(
        cls, raw: MPI.Request, home: Home, what: tuple[str, int, Any], stage: Stage | None = None
    ) -> MPIRequest:
        self = cls()
        self._raw, self._status, self._persistent, self._stage = raw, MPI.Status(), True, stage
        self._home, self._what = home, what
        return self

    def Start(self) -> None:
        """Begin one more time."""
        if self._stage is not None:
            self._stage.begin()
        self._raw.Start()  # type: ignore[attr-defined]
        self.begin(self._home, self._what)

    @classmethod
    def Startall(cls, requests: list[MPIPersistent]) -> None:
        """Begin all of them."""
        for request in requests:
            request.Start()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("P"):  # Pready, Pready_range, Pready_list, Parrived
            return getattr(self._raw, name)
        raise AttributeError(name)

    def Free(self) -> None:
        super().Free()
        self._raw.Free()


def wrapped(
    raw: MPI.Request, home: Home, what: tuple[str, int, Any], stage: Stage | None = None
) -> MPIRequest:
    """Return the request over one of mpi4py's of any kind."""
    return (MPIPersistent if isinstance(raw, MPI.Prequest) else MPIRequest).of(raw, home, what, stage)


def land(stage: Stage | None, status: MPI.Status) -> None:
    """Copy what has come to the GPU tensors of a call that is complete; nothing of one that was cancelled."""
    if stage is not None and not status.Is_cancelled():
        stage.end(status.Get_count(MPI.BYTE) if stage.partial else None)


def fill(status: Any, raw: MPI.Status) -> None:
    """Copy what a receive has found into the caller's status, spawnsim's or mpi4py's."""
    if status is None:
        return
    source, tag, nbytes = raw.Get_source(), raw.Get_tag(), raw.Get_count(MPI.BYTE)
    if isinstance(status, MPI.Status):
        status.Set_source(source)
        status.Set_tag(tag)
        status.Set_elements(MPI.BYTE, nbytes)
    else:
        status.fill(rank_back(source), tag, nbytes)
    status.Set_cancelled(raw.Is_cancelled())
