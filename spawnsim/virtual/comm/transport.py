"""What all calls between two ranks are made of: one message out, one message in, waiting or not.

This room knows matching, the wire and requests. It must not know buffers or pickles.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, PROC_NULL
from spawnsim.comm.failures import Truncated, Unreadable
from spawnsim.comm.integers import integer
from spawnsim.comm.status import Status
from spawnsim.errors import WorldError
from spawnsim.virtual.comm.context import Member
from spawnsim.virtual.comm.mistakes import check_type, watched
from spawnsim.virtual.engine.completion import Message, Receive, take_in
from spawnsim.virtual.engine.wire import Mode, Transfer, send
from spawnsim.virtual.requests import Request
from spawnsim.virtual.several import fill
from spawnsim.virtual.waiting import Waiting, await_one, check_alive


class Transport(Member):
    """What all the calls below are made of: one message out, one message in."""

    __slots__ = ()

    def _dispatch(self, payload: Any, dest: int, tag: int, mode: Mode, *, buf: Any = None) -> Transfer | None:
        """Send a payload (bytes, or anything with `nbytes`), made of `buf`. Returns what to wait for, if anything."""
        if dest == PROC_NULL:
            self._need()
            return None
        self._check_peer(dest, tag)
        world = self._world
        if world.failed:
            check_alive(world, self._waiting("Send", dest, tag, "dest"))
        message = Message(self._me, tag, payload, len(payload) if type(payload) is bytes else payload.nbytes)
        if buf is not None:
            message.dtype = getattr(buf if type(buf) is np.ndarray else payload, "dtype", None)
        return send(world, self._context.mailbox(self._peers[dest]), message, mode)

    def _deliver(
        self, payload: Any, dest: int, tag: int, mode: Mode, *, operation: str, buf: Any = None
    ) -> None:
        """Send and wait until the program may go on."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        transfer = self._dispatch(payload, dest, tag, mode, buf=buf)
        if transfer is not None:
            await_one(self._world, transfer, self._waiting(operation, dest, tag, "dest"))

    def _post(self, source: int, tag: int, *, blocking: bool = False) -> Receive:
        """Post a receive that was checked. A wildcard is an observation."""
        kernel = self._world.kernel
        if source == ANY_SOURCE:
            kernel.observe()
        task = kernel.current
        receive = Receive(kernel, source, tag, task.clock)
        if blocking and self._world.plan is None and not self._rank.company:  # only its deadline will end it
            receive.stays_s = task.clock + task.deadline_s
        self._mailbox.post(receive)
        return receive

    def _accept(self, source: int, tag: int, operation: str) -> Message:
        """Receive one message, blocking. `source` and `tag` are plain integers."""
        if source >= 0:
            self._check_peer(source, tag if tag != ANY_TAG else 0)
            message = self._mailbox.ready(source, tag)
            if message is not None and self._take_now(message):
                return message
        else:
            self._check_source(source, tag)
        return self._accept_later(source, tag, operation)

    def _take_now(self, message: Message) -> bool:
        """Take a message whose data are on their way, without parking; False if that is to be done at its time."""
        task, mailbox, arrival_s = self._world.kernel.current, self._mailbox, message.arrival_s
        now_s = task.clock
        assert arrival_s is not None
        if (
            arrival_s + message.receive_s > now_s + task.deadline_s
        ):  # so late that its place at the card stays free
            return False
        if mailbox.card is not None:
            if self._rank.company and arrival_s > now_s:  # its card may let in requests to a window first
                return False
            arrival_s = take_in(message, mailbox.card)
            if arrival_s + message.receive_s > now_s + task.deadline_s:
                return False
        mailbox.take_ready(message)
        finish_s = (arrival_s if arrival_s > now_s else now_s) + message.receive_s
        if finish_s > now_s:
            self._rank.reach(task, finish_s)
            if self._rank.company:  # its memory is exposed: what it does next must be done at its own time
                self._world.kernel.observe()
        self._rank.trace.note((task.clock, 3, message.source, message.nbytes, message.tag))
        return True

    def _accept_later(self, source: int, tag: int, operation: str) -> Message:
        """Receive one message that may have to be waited for."""
        receive = self._post(source, tag, blocking=True)
        try:
            await_one(self._world, receive, self._waiting(operation, source, tag))
        except WorldError:  # the program may go on: the receive must not swallow a later message
            self._mailbox.give_up(receive, self._world.kernel.current.clock)
            raise
        message, receive.message = receive.message, None
        assert message is not None
        self._rank.trace.note(
            (self._world.kernel.current.clock, 3, message.source, message.nbytes, message.tag)
        )
        return message

    def _waiting(self, operation: str, peer: int, tag: int, keyword: str = "source") -> Waiting:
        context = self._context
        acknowledged = context.notes.get(("acknowledged", self._rank.id), ())
        return Waiting(operation, self._label, self._peers, peer, tag, keyword, acknowledged, context)

    def _isend(
        self, payload: Any, dest: int, tag: int, mode: Mode, *, operation: str, buf: Any = None
    ) -> Request:
        """Start a send; if it is one of a buffer that the program must leave alone, that is watched."""
        if type(dest) is not int or type(tag) is not int:
            dest, tag = integer(dest), integer(tag)
        transfer = self._dispatch(payload, dest, tag, mode, buf=buf)
        collected = None if buf is None else watched(self._world, buf, payload, (operation, dest))
        if transfer is None:
            return Request.over(self._world, collected, writes=False)
        waiting = self._waiting(operation, dest, tag, "dest")
        return Request.start(self._world, transfer, waiting, collected, writes=False)

    def _irecv(self, source: int, tag: int, operation: str, collect: Any, *, buf: Any = None) -> Request:
        """Post a receive; `collect(payload)` makes the request's result, or writes it to `buf`."""
        if type(source) is not int or type(tag) is not int:
            source, tag = integer(source), integer(tag)
        if source == PROC_NULL:
            self._need()
            return Request.over(self._world, receive_nothing)
        self._check_source(source, tag)
        receive = self._post(source, tag)

        def deliver(status: Status) -> Any:
            message, receive.message = receive.message, None  # the mailbox may still know of the receive
            if message is None:  # cancelled
                status.Set_cancelled(True)
                return None
            fill(status, message.source, message.tag, message.nbytes)
            return self._taken(message, collect, buf)

        waiting = self._waiting(operation, source, tag)
        request = Request.start(self._world, receive, waiting, deliver, writes=buf is not None)
        request._withdraw = self._withdraw
        return request

    def _withdraw(self, request: Request, now_s: float) -> None:
        receive = request._completion
        if (
            isinstance(receive, Receive)
            and not (receive.message is None and receive.finish_s is not None)  # cancelled before
            and self._mailbox.withdraw(receive, now_s)
        ):
            receive.complete(self._world.kernel.current.clock)

    def _taken(self, message: Message, collect: Any, buf: Any) -> Any:
        """Return what is made of a message, maybe the contents of `buf`."""
        try:
            made = collect(message.payload)
        except Exception as error:  # noqa: BLE001 - whatever a pickle raises
            raise self._unfit(error, message) from None
        if buf is not None:
            self._check_type(buf, message)
        return made

    def _check_type(self, buf: Any, message: Message) -> None:
        """Warn if a message was received into a buffer of another type; the usual case costs next to nothing."""
        dtype = message.dtype
        if dtype is not None and buf.dtype is not dtype:
            check_type(self._world, self._label, buf, message)

    def _unfit(self, error: Exception, message: Message) -> Exception:
        """Return the error of a message that cannot be received as the program wants it: it names the message."""
        name = f"rank {message.source} with tag {message.tag} on {self._label}"
        if isinstance(error, Truncated):
            return Truncated(message=f"{error.message}; it is from {name}")
        if isinstance(error, (pickle.UnpicklingError, EOFError)):
            return Unreadable(
                f"the {message.nbytes:,} bytes from {name} are no pickled object ({error}): were they sent by Send? "
                "Then receive them by Recv, for upper-case and lower-case calls do not mix"
            )
        error.add_note(f"raised by the object that came from {name}, while it was unpickled")
        return error


def receive_nothing(status: Status) -> None:
    """Write into a status what a receive from PROC_NULL gets."""
    fill(status, PROC_NULL, ANY_TAG, 0)
