"""The watchdog thread of a real rank: reports the active calls of its rank, and ends calls that never return.

A blocking collective cannot be interrupted from Python. So each rank's watchdog checks the active calls of its rank.
When a call has exceeded its deadline, the watchdog asks all other watchdogs for the active calls of their ranks, and
ends the job with a message that names the missing ranks. The backend provides a channel for small messages.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from spawnsim.errors import program_place

TICK_S = 0.1  # interval between a watchdog's checks: 10 checks per second cost under 0.1 % of a core
GRACE_S = 1.5  # how long a watchdog may take to answer before its rank counts as silent


class Channel(Protocol):
    """Small messages between watchdogs; only the watchdog thread uses it."""

    rank: int
    size: int

    def send(self, to: int, message: dict[str, Any]) -> None:
        """Send without waiting."""

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the sender and the next message, or None."""


class Scope(Protocol):
    """A communicator as the watchdog sees it: a name that all members share, and its world ranks."""

    @property
    def label(self) -> str:
        """The name."""

    @property
    def members(self) -> tuple[int, ...]:
        """The world ranks."""


Call = tuple[str, int, Scope, float, float]
"""operation, sequence number, communicator, perf_counter at its start, limit in seconds (inf: not watched)."""


@dataclass(frozen=True)
class Where:
    """The answer of one rank: its active calls, otherwise its last action."""

    rank: int
    # Operation, sequence number, communicator's name, seconds in the call, line of the program.
    calls: tuple[tuple[str, int, str, float, str], ...] = ()
    note: str = "no answer: dead, stopped, or busy in code that holds the interpreter"
    answered: bool = False

    def __str__(self) -> str:
        text = "; ".join(
            f"in {call_name(op, number)} on {label} for {s:.1f} s{line and f' ({line})'}"
            for op, number, label, s, line in self.calls
        )
        return f"rank {self.rank}: {text or self.note}"


def call_name(operation: str, sequence: int) -> str:
    """Return the call's name in messages."""
    return f"{operation} number {sequence}" if sequence >= 0 else operation


class Watchdog(threading.Thread):
    """One per rank. `active` maps a thread to its active call: a dict store on entry, a pop on exit.

    A call pays for nothing else and needs no lock: single operations on a dict are atomic, and the watchdog reads a
    copy. A call past its deadline may end while the watchdog asks the other ranks, so the watchdog checks again
    afterwards: the job ends only if the same entry is still present.
    """

    def __init__(self, channel: Channel, expired: Callable[[Call, list[Where]], None]) -> None:
        super().__init__(name="spawnsim-watchdog", daemon=True)
        self.channel = channel
        self.active: dict[int, Call] = {}
        self.last: Call | None = None
        self.note: Callable[[], str] = lambda: ""  # describes the rank's activity outside of calls
        self.progress: Callable[[], None] = lambda: None  # called on each check while the rank is in a call
        self.looked: Callable[[], None] = lambda: None  # called after each check
        self.handlers: dict[str, Callable[[int, dict[str, Any]], object]] = {
            "ask": self._answer,
            "here": self._note_answer,
        }
        self.silent: set[int] = set()  # ranks that did not answer the latest query
        self._expired = expired
        self._answers: dict[int, Where] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    # ---------------------------------------------------------------------------------- asked by other threads
    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread; the channel is unused after this returns."""
        self._jobs.put(None)
        if threading.current_thread() is not self and self.is_alive():
            self.join()

    def ask_all(self) -> list[Where]:
        """Return the answers of all ranks; callable from any thread but the watchdog's."""
        found: queue.SimpleQueue[list[Where]] = queue.SimpleQueue()
        self.do(lambda: found.put(self.inquire(range(self.channel.size), lambda: True)))
        return found.get()

    # --------------------------------------------------------------------------------------- in the thread itself
    def run(self) -> None:
        """Check the active calls every `TICK_S` seconds until stopped."""
        while True:
            try:
                job = self._jobs.get(timeout=TICK_S)
            except queue.Empty:
                self.serve()
                self._check()
                self.looked()
                continue
            if job is None:
                return
            job()
            self.serve()

    def serve(self) -> None:
        while (received := self.channel.receive()) is not None:
            sender, message = received
            self.handlers[message["kind"]](sender, message)

    def notify_all(self, message: dict[str, Any]) -> None:
        for rank in range(self.channel.size):
            if rank != self.channel.rank:
                self.channel.send(rank, message)

    def serve_until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Handle messages until `done()`, at most `limit_s` seconds; return whether it was done."""
        end = time.perf_counter() + limit_s
        while not done():
            if time.perf_counter() > end:
                return False
            self.serve()
            time.sleep(2e-3)
        return True

    def inquire(self, ranks: Iterable[int], still_wanted: Callable[[], bool]) -> list[Where]:
        """Query the active calls of `ranks`; return an answer for each, also for silent ranks."""
        wanted = sorted(ranks)
        self._answers = {self.channel.rank: self.here()}
        for rank in wanted:
            if rank != self.channel.rank:
                self.channel.send(rank, {"kind": "ask"})
        self.serve_until(lambda: len(self._answers) >= len(wanted) or not still_wanted(), GRACE_S)
        self.silent = set(wanted) - set(self._answers)
        return [self._answers.get(rank, Where(rank)) for rank in wanted]

    def here(self) -> Where:
        now, frames = time.perf_counter(), sys._current_frames()
        calls = [
            (op, number, scope.label, now - began, program_place(traceback.walk_stack(frames[thread])))
            for thread, (op, number, scope, began, _) in list(self.active.items())
            if thread in frames
        ]
        return Where(self.channel.rank, tuple(calls), self.note() or self._after(), answered=True)

    def _after(self) -> str:
        if self.last is None:
            return "in its own code, before its first call"
        return f"in its own code, after {call_name(self.last[0], self.last[1])} on {self.last[2].label}"

    def _answer(self, sender: int, _message: dict[str, Any]) -> None:
        here = self.here()
        self.channel.send(sender, {"kind": "here", "calls": here.calls, "note": here.note})

    def _note_answer(self, sender: int, message: dict[str, Any]) -> None:
        self._answers[sender] = Where(sender, message["calls"], message["note"], answered=True)

    def _in(self, thread: int, call: Call) -> bool:
        return self.active.get(thread) is call

    def _check(self) -> None:
        now = time.perf_counter()
        if self.active:
            self.progress()
        for thread, call in list(self.active.items()):
            if now - call[3] > call[4]:
                found = self.inquire(call[2].members, partial(self._in, thread, call))
                if self._in(thread, call):
                    self._expired(call, found)


def verdict(call: Call, found: list[Where]) -> tuple[list[int], str]:
    """Return the missing ranks (of the communicator) and the message for a collective past its deadline."""
    operation, number, scope, _, limit_s = call
    mine = (operation, number, scope.label)
    place = next((c[4] for where in found for c in where.calls if c[:3] == mine and c[4]), "")
    missing = [i for i, where in enumerate(found) if mine not in [c[:3] for c in where.calls]]
    others = "\n".join(f"  {found[i]}" for i in missing)
    who = (
        f"missing: rank {', '.join(str(found[i].rank) for i in missing)}"
        if missing
        else "all ranks are in it"
    )
    wrong = any(c[2] == scope.label for i in missing for c in found[i].calls)
    advice = (
        "ranks are in different calls of one communicator: every rank must make the same collective calls in order; "
        "on virtual ranks (spawnsim run FILE --ranks N) the error names both calls, with their lines"
        if wrong
        else "a rank that is only slow needs a larger deadline (deadline_s, or comm.clock.deadline)"
    )
    late = f"missed its deadline of {limit_s:g} s{place and f' ({place})'}"
    text = f"{call_name(operation, number)} on {scope.label} {late}; {who}"
    text = f"{text}\n{others}\n  {advice}"
    return missing, text
