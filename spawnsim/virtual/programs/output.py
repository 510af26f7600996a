"""What ranks print: whole lines, each with its rank in front, on the process's own streams.

This room knows text. Who prints is told by a function.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, TextIO

Who = Callable[[], int | None]  # the rank that runs, or None outside of ranks
Told = Callable[[int, str], None]  # is told what a rank prints, in pieces of any length


class Lines(io.TextIOBase):
    """A text stream for all ranks: keeps each rank's unfinished line until it is whole, so that none is torn."""

    def __init__(
        self,
        target: TextIO,
        who: Who,
        prefix: bool = True,
        heard: Callable[[], bool] = lambda: True,
        *,
        told: Told = lambda rank, text: None,
    ) -> None:
        self._target, self._who, self._prefix, self._heard, self._told = target, who, prefix, heard, told
        self._unfinished: dict[int, str] = {}
        self._bytes = RawLines(self)

    @property
    def buffer(self) -> Any:
        """The stream for bytes beneath."""
        return self._bytes

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the process's own stream."""
        return getattr(self._target, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """What becomes of characters that cannot be encoded."""
        return getattr(self._target, "errors", None) or "strict"

    def writable(self) -> bool:
        """Return True."""
        return True

    def isatty(self) -> bool:
        """Return False, as under mpiexec."""
        return False

    def fileno(self) -> int:
        """Return the descriptor of the process's own stream."""
        return self._target.fileno()

    def write(self, text: str) -> int:
        """Write text of the calling rank; its whole lines appear, the rest waits for its end."""
        rank = self._who()
        if rank is None:
            return self._target.write(text)
        if not self._heard():
            return len(text)
        self._told(rank, text)
        lines = (self._unfinished.pop(rank, "") + text).split("\n")
        if lines[-1]:
            self._unfinished[rank] = lines[-1]
        if len(lines) > 1:
            front = f"[rank {rank}] " if self._prefix else ""
            self._target.write("".join(f"{front}{line}\n" for line in lines[:-1]))
        return len(text)

    def flush(self) -> None:
        """Pass on what is whole."""
        self._target.flush()

    def close(self) -> None:
        """Stay open: the stream is all ranks'."""

    def finish(self) -> None:
        """Write the lines that no rank has ended."""
        for rank, line in sorted(self._unfinished.items()):
            front = f"[rank {rank}] " if self._prefix else ""
            self._target.write(f"{front}{line}\n")
        self._unfinished.clear()
        self._target.flush()


class RawLines(io.RawIOBase):
    """The bytes beneath `Lines`: decoded, and written as text."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes of the calling rank."""
        raw = bytes(data)
        self._lines.write(raw.decode(self._lines.encoding, "replace"))
        return len(raw)

    def flush(self) -> None:
        """Pass on what is whole."""
        self._lines.flush()

    def close(self) -> None:
        """Stay open."""
