"""The status of a received message: its source, tag and size. The code that completes a receive fills it in."""

from __future__ import annotations

from typing import Any

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, UNDEFINED
from spawnsim.comm.datatypes import BYTE, Datatype
from spawnsim.comm.failures import ERR_ARG, SUCCESS, CallError, SpecTypeError, lacking
from spawnsim.comm.handles import integer


@lacking
class Status:
    """Source, tag, error and size of a message, with mpi4py's method names. Implementers set the slots directly."""

    __slots__ = ("cancelled", "error", "nbytes", "source", "tag")

    def __init__(self, status: Status | None = None) -> None:
        self.source, self.tag, self.error = ANY_SOURCE, ANY_TAG, SUCCESS
        self.nbytes, self.cancelled = 0, False
        if status is not None:
            if not isinstance(status, Status):
                raise SpecTypeError(f"Status({status!r}): give another status, or nothing")
            self.copy_from(status)

    def copy_from(self, status: Status) -> None:
        """Take over all that another status says."""
        self.source, self.tag, self.error = status.source, status.tag, status.error
        self.nbytes, self.cancelled = status.nbytes, status.cancelled

    def fill(self, source: int, tag: int, nbytes: int) -> None:
        """Note a message that has arrived."""
        self.source, self.tag, self.nbytes = source, tag, nbytes
        self.error, self.cancelled = SUCCESS, False

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Status):
            return NotImplemented
        return self.__getstate__() == other.__getstate__()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), self.__getstate__()

    def __getstate__(self) -> dict[str, int]:
        return {
            "source": self.source, "tag": self.tag, "error": self.error, "count": self.nbytes,
            "cancelled": self.cancelled,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, int]) -> None:
        self.fill(state["source"], state["tag"], state["count"])
        self.error, self.cancelled = state["error"], bool(state["cancelled"])

    def Get_source(self) -> int:
        return self.source

    def Set_source(self, source: int) -> None:
        self.source = integer(source)

    def Get_tag(self) -> int:
        return self.tag

    def Set_tag(self, tag: int) -> None:
        self.tag = integer(tag)

    def Get_error(self) -> int:
        return self.error

    def Set_error(self, error: int) -> None:
        self.error = integer(error)

    def Get_count(self, datatype: Datatype = BYTE) -> int:
        """Return how many elements of a datatype were received; `UNDEFINED` when the last one is not whole."""
        size = datatype.Get_size()
        if not size:
            return 0 if not self.nbytes else UNDEFINED
        return UNDEFINED if self.nbytes % size else self.nbytes // size

    def Get_elements(self, datatype: Datatype) -> int:
        """Return how many basic elements were received; `UNDEFINED` when the last one is not whole."""
        found = datatype.live().elements(self.nbytes)
        return UNDEFINED if found < 0 else found

    def Set_elements(self, datatype: Datatype, count: int) -> None:
        """Set the size to `count` basic elements of a datatype."""
        layout = datatype.live()
        per_type = int(layout.repeats.sum())
        whole, rest = divmod(count, per_type) if per_type else (0, count)
        sizes = [
            size
            for size, n in zip(layout.atoms.tolist(), layout.repeats.tolist(), strict=True)
            for _ in range(n)
        ]
        if rest and not sizes:
            raise CallError(ERR_ARG, f"{count} elements of a datatype without data")
        self.nbytes = whole * layout.size + sum(sizes[:rest])

    @property
    def count(self) -> int:
        """Bytes received."""
        return self.nbytes

    @count.setter
    def count(self, value: int) -> None:
        self.nbytes = value

    def Is_cancelled(self) -> bool:
        return self.cancelled

    def Set_cancelled(self, flag: bool) -> None:
        self.cancelled = bool(flag)

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, nbytes={self.nbytes}, error={self.error})"
