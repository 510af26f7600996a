"""Probes and matched probes. A probe is an observation: it waits for its time and costs the call overhead."""

from __future__ import annotations

from typing import Any, Self

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from spawnsim.comm.failures import ERR_REQUEST, CallError
from spawnsim.comm.handles import Handle
from spawnsim.comm.integers import integer
from spawnsim.comm.status import Status
from spawnsim.virtual.comm.payload import kept, loads, receiver
from spawnsim.virtual.comm.transport import Transport, receive_nothing
from spawnsim.virtual.engine.completion import Completion, Receive
from spawnsim.virtual.engine.completion import Message as Letter
from spawnsim.virtual.engine.kernel import current_world
from spawnsim.virtual.requests import Request
from spawnsim.virtual.several import fill
from spawnsim.virtual.waiting import check_alive


class Probes(Transport):
    """Looking at messages before receiving them."""

    __slots__ = ()

    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Return whether a message that fits has arrived."""
        return self._glance(source, tag, status) is not None

    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> bool:
        """Wait until a message that fits has arrived."""
        if integer(source) == PROC_NULL:
            _fill_status(status, None)
        else:
            self._stare(source, tag, status, "Probe")
        return True

    def Improbe(
        self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Return a message that fits and has arrived, out of reach of any other receive; or None."""
        if integer(source) == PROC_NULL:
            return Message.of_nobody()
        letter = self._glance(source, tag, status, hold=True)
        return None if letter is None else Message.hold(self, letter)

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Message:
        """Wait for a message that fits; return it, out of reach of any other receive."""
        if integer(source) == PROC_NULL:
            _fill_status(status, None)
            return Message.of_nobody()
        return Message.hold(self, self._stare(source, tag, status, "Mprobe", hold=True))

    iprobe, probe, improbe, mprobe = Iprobe, Probe, Improbe, Mprobe

    def _glance(self, source: int, tag: int, status: Status | None, *, hold: bool = False) -> Letter | None:
        """Look once."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            letter: Letter | None = Letter(PROC_NULL, ANY_TAG, b"", 0)
            self._world.kernel.observe()
            self._check_source(source, tag)
        else:
            letter = self._visible(source, tag)
            if hold and letter is not None:
                self._mailbox.remove(
                    letter
                )  # now: while this task pays for the look, another of its rank may look
        self._world.charge_poll()
        if letter is None:
            self._world.kernel.fruitless()
        else:
            _fill_status(status, None if source == PROC_NULL else letter)
        return letter

    def _stare(
        self, source: int, tag: int, status: Status | None, operation: str, *, hold: bool = False
    ) -> Letter:
        """Wait for a letter, however long that takes; looking then costs what one look costs."""
        source, tag = integer(source), integer(tag)
        while (letter := self._visible(source, tag)) is None:
            self._await_letter(source, tag, operation)
        if hold:
            self._mailbox.remove(letter)
        self._world.charge_poll()
        _fill_status(status, letter)
        return letter

    def _visible(self, source: int, tag: int) -> Letter | None:
        """Return the letter that the running task sees at its time."""
        self._world.kernel.observe()
        self._check_source(source, tag)  # as of now: it may have been revoked meanwhile
        letter = self._mailbox.find(source, tag)
        return None if letter is None or letter.envelope_s > self._world.kernel.current.clock else letter

    def _await_letter(self, source: int, tag: int, operation: str) -> None:
        """Wait until the first letter known to come has come, or until a new one is sent."""
        world, watcher = self._world, Completion(self._world.kernel)
        waiting = self._waiting(operation, source, tag)
        check_alive(world, waiting)
        first_s = self._mailbox.earliest(source, tag)
        self._mailbox.watchers.append(watcher)
        watcher.waiter = task = world.kernel.current
        alarm = (
            None
            if first_s is None
            else world.kernel.env.at(
                max(first_s, world.kernel.env.now), self._rank.id, lambda: world.kernel.resume(task)
            )
        )
        try:
            world.kernel.block(waiting)
        finally:
            watcher.waiter = None
            if watcher in self._mailbox.watchers:
                self._mailbox.watchers.remove(watcher)
            if alarm is not None:
                alarm.cancel()
        self._rank.reach(task, world.kernel.env.now)


NOBODY = object()


class Message(Handle):
    """A message that a matched probe has taken out of the queue."""

    __slots__ = ("_letter", "_owner")
    _letter: Letter | None
    _owner: Transport | None

    def __new__(cls, message: Message | None = None) -> Self:
        """Return a null message, or a copy of the handle of another."""
        self = super().__new__(cls)
        self._identity = None if message is None else message._identity
        self._letter = None if message is None else message._letter
        self._owner = None if message is None else message._owner
        return self

    @classmethod
    def hold(cls, owner: Transport, letter: Letter) -> Self:
        """Return the handle of a message taken out for `owner`."""
        self = cls.__new__(cls)
        self._identity = self._letter = letter
        self._owner = owner
        return self

    @classmethod
    def of_nobody(cls) -> Self:
        """Return the message that a matched probe of PROC_NULL finds: receiving it receives nothing, ever again."""
        self = cls.__new__(cls)
        self._identity = NOBODY
        return self

    @classmethod
    def Probe(
        cls, comm: Probes, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message:
        """Wait for a message that fits and take it out."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(
        cls, comm: Probes, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None
    ) -> Message | None:
        """Take out a message that fits and has arrived, if there is one."""
        return comm.Improbe(source, tag, status)

    probe, iprobe = Probe, Iprobe

    def Recv(self, buf: Any, status: Status | None = None) -> None:
        """Receive the message into a buffer."""
        self.Irecv(buf).Wait(status)

    def recv(self, status: Status | None = None) -> Any:
        """Receive the message's object."""
        return self.irecv().wait(status)

    def Irecv(self, buf: Any) -> Request:
        """Start to receive the message into a buffer."""
        return self._receive(receiver(kept(buf)), kept(buf))

    def irecv(self) -> Request:
        """Start to receive the message's object."""
        return self._receive(loads)

    def _receive(self, collect: Any, buf: Any = None) -> Request:
        letter, owner = self._letter, self._owner
        if self._identity is NOBODY:
            if self is not MESSAGE_NO_PROC:
                self._identity = None
            return Request.over(current_world(), receive_nothing)
        if letter is None or owner is None:
            raise CallError(ERR_REQUEST, "the message is null: it was received before")
        self._identity = self._letter = self._owner = None
        receive = Receive(owner._world.kernel, letter.source, letter.tag, owner._world.kernel.current.clock)
        receive.card = owner._mailbox.card
        receive.take(letter)
        letter.meet()

        def deliver(status: Status) -> Any:
            fill(status, letter.source, letter.tag, letter.nbytes)
            return owner._taken(letter, collect, buf)

        waiting = owner._waiting("Mrecv", letter.source, letter.tag)
        return Request.start(owner._world, receive, waiting, deliver, writes=buf is not None)


MESSAGE_NULL = Message()
MESSAGE_NO_PROC = Message.of_nobody()


def _fill_status(status: Status | None, letter: Letter | None) -> None:
    if status is not None and letter is not None:
        fill(status, letter.source, letter.tag, letter.nbytes)
    elif status is not None:
        fill(status, PROC_NULL, ANY_TAG, 0)
