"""Requests over the wire: sends that are complete when their memory is free, receives that wait for their letter.

Knows the mailbox; waiting and reporting are those of all real requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spawnsim.comm.failures import Truncated
from spawnsim.comm.regions import Buffer
from spawnsim.real.rank.pending import Pending
from spawnsim.real.torch.mailbox import Slot
from spawnsim.real.torch.memory import Target
from spawnsim.real.torch.wire import Sent, gone


class Outgoing(Pending):
    """A send."""

    __slots__ = ("payload", "sent")
    sent: Sent
    payload: Any

    @classmethod
    def of(cls, home: Any, what: tuple[str, int, Any], sent: Sent, payload: Any) -> Outgoing:
        """Return the request of a send; it holds the payload's memory."""
        self = cls()
        self.sent, self.payload = sent, payload
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        if self.sent.complete:
            self.payload = None
        return self.sent.complete


class Incoming(Pending):
    """A receive: of an object when it has no buffer."""

    __slots__ = ("_after", "_buffer", "_cancelled", "_context", "slot")
    slot: Slot
    _context: int
    _cancelled: bool
    _buffer: Buffer | None
    _after: Callable[[int], object] | None

    @classmethod
    def of(cls, home: Any, what: tuple[str, int, Any], slot: Slot, where: tuple[int, Target]) -> Incoming:
        """Return the request of a receive that is posted already; `where` is (context, target)."""
        self = cls()
        self.slot, self._context, self._cancelled = slot, where[0], False
        self._buffer, self._after = where[1].buffer, where[1].after
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        letter = self.slot.letter
        if letter is None or letter.data is None:
            return False
        if self._buffer is None:
            self.value = self._home.pickle.loads(letter.data.data)
        elif not letter.direct:
            if letter.nbytes > self._buffer.nbytes:
                bytes_ = f"{letter.nbytes} bytes from rank {letter.source}"
                raise Truncated(14, f"{self._text()}: {bytes_} do not fit a buffer of {self._buffer.nbytes}")
            self._buffer.unpack(letter.data)
        if self._after is not None:
            self._after(letter.nbytes)
        return True

    def _describe(self, status: Any) -> None:
        letter = self.slot.letter
        if letter is not None:
            status.fill(letter.source, letter.tag, letter.nbytes)
        status.Set_cancelled(self._cancelled)

    def Cancel(self) -> None:
        super().Cancel()
        if not self._complete and self._home.mailbox.cancel(self._context, self.slot):
            self._cancelled = self._complete = True


class Working(Pending):
    """A collective of torch that goes on by itself."""

    __slots__ = ("_after", "_work")
    _work: Any
    _after: Callable[[], object] | None

    @classmethod
    def of(
        cls, home: Any, what: tuple[str, int, Any], work: Any, after: Callable[[], object] | None = None
    ) -> Working:
        """Return the request over a `Work`; `after` runs when it is complete."""
        self = cls()
        self._work, self._after = work, after
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise gone(self._text(), error) from None
        if self._after is not None:
            self._after()
        return True


class Together(Pending):
    """Several requests that are one call; `after` makes the result of them."""

    __slots__ = ("_after", "_parts")
    _parts: list[Pending]
    _after: Callable[[], object] | None

    @classmethod
    def of(
        cls,
        home: Any,
        what: tuple[str, int, Any],
        parts: list[Pending],
        after: Callable[[], object] | None = None,
    ) -> Together:
        """Return one request for all of them."""
        self = cls()
        self._parts, self._after = parts, after
        self.begin(home, what)
        return self

    def _try(self) -> bool:
        if sum(part.advance() for part in self._parts) < len(self._parts):
            return False
        for part in self._parts:
            part._take()
        if self._after is not None:
            self.value = self._after()
        return True
