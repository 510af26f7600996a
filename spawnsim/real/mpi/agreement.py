"""Agreement among the survivors of a death: which ranks continue together, and from which step.

A *lineage* is a communicator together with all communicators that recoveries have created from it. Its members meet in
numbered rounds:

1. "come": each member announces its arrival and its current step.
2. "decided": once every other member has arrived or is dead, the lowest arrived member decides on members and step.
3. "agreed": each decided member confirms that it knows the decision.
4. "made": each member creates the new communicator and confirms that it has done so.

A member that misses a message of another member begins the next round, and all members that hear of that round join it.
`ShutdownBarrier` lets the ranks of such a job end together. All of this runs in the watchdog's thread, over the
watchdogs' messages.
"""

# Why not MPI's own agreement: only ULFM has one, MPICH lacks ULFM, and even ULFM's agreement waits forever for a
# stopped rank (SIGSTOP, a debugger, a machine that swaps). This protocol is the same on all libraries, and gives up a
# rank that sends nothing for `SILENT_S`. If such a rank returns, it is notified that it is *fenced*, and leaves.
#
# Why "agreed" and "made" are two steps: creating the communicator is the only library collective in a recovery, and
# libraries tolerate a death inside it least (MPICH creates no further communicators after two such deaths, Open MPI may
# crash). After "agreed", all members are known to be alive and about to create it, so a death can do harm only within a
# few ms. After "made", every member has it. If a rank dies in between, some members miss it and begin the next round,
# which also involves the members that were already done: `Agreement._on_come` revokes the new communicator on them. So
# no death leaves a rank waiting in an old round.
#
# Limits: the protocol has no majority rule, since it would not allow one rank of two to continue. A network partition
# produces two jobs. Silence decides that a rank is given up, so a rank that holds the interpreter for longer than
# `SILENT_S` is lost although it is alive; a larger limit would delay the recovery from every real death without a
# detector.

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from spawnsim.real.runtime.abort import AbortProtocol
from spawnsim.real.runtime.watchdog import GRACE_S

BEAT_S = 0.3  # interval at which waiting ranks report that they are alive
POLL_S = 2e-3
# Giving up a living rank is worse than waiting: on a busy machine some ranks answer late.
SILENT_S = 2 * GRACE_S
MAKING_S = SILENT_S  # for living members that create the communicator: no call of the program sets a deadline

AGREED, MADE = "agreed", "made"

FENCED = (
    "the other ranks have given this rank up, because it was silent for too long (stopped, or busy in code "
    "that holds the interpreter), and continue without it: it must leave"
)


@dataclass(frozen=True)
class Decision:
    """The world ranks that continue, and their step; `by` is the rank that has decided."""

    by: int
    members: tuple[int, ...]
    step: int | None


@dataclass(frozen=True)
class Round:
    """One rank's part in one round. `members`: world ranks; `limit_s`: for living members that do not arrive."""

    lineage: str
    members: tuple[int, ...]
    number: int
    step: int | None
    limit_s: float


@dataclass
class Lineage:
    """One rank's knowledge of the rounds of a lineage."""

    done: int = 0  # the latest round that has created a communicator here
    highest: int = 0  # the latest round that any member is in
    came: dict[int, dict[int, int | None]] = field(default_factory=lambda: defaultdict(dict))
    decided: dict[int, Decision] = field(default_factory=dict)
    said: dict[tuple[str, int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    alive_s: dict[int, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # members with an ended program: alive, but not awaited


class Agreement:
    """One rank's side. `revoke(lineage)` ends its calls there; `over()` returns whether its program has ended."""

    def __init__(self, abort: AbortProtocol, revoke: Callable[[str], None], over: Callable[[], bool]) -> None:
        self._watchdog = watchdog = abort.watchdog
        self._channel, self._me = watchdog.channel, watchdog.channel.rank
        self._revoke, self._over = revoke, over
        self.lineages: dict[str, Lineage] = defaultdict(Lineage)
        self.lost = abort.lost  # world ranks that were given up
        self.suspects: set[int] = set()  # world ranks that did not answer the latest query
        self.dead: Callable[[], Collection[int]] = tuple  # world ranks that the library reports as dead
        self.fenced = False
        watchdog.handlers |= {
            "come": self._on_come, "alive": self._note_alive, "ended": self._on_ended, "decided": self._on_decided,
            AGREED: self._on_said, MADE: self._on_said, "fenced": self._on_fenced,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------ messages
    def _on_come(self, sender: int, message: dict[str, Any]) -> None:
        if sender in self.lost:
            self._channel.send(sender, {"kind": "fenced"})
            return
        state, number = self._note_alive(sender, message), message["number"]
        if self._over():
            self._channel.send(sender, {"kind": "ended", "lineage": message["lineage"]})
            return
        state.came[number][sender] = message["step"]
        state.highest = max(state.highest, number)
        if number > state.done:
            self._revoke(message["lineage"])
        self._channel.send(sender, {"kind": "alive", "lineage": message["lineage"]})

    def _note_alive(self, sender: int, message: dict[str, Any]) -> Lineage:
        state = self.lineages[message["lineage"]]
        self.suspects.discard(sender)
        state.alive_s[sender] = time.perf_counter()
        return state

    def _on_ended(self, sender: int, message: dict[str, Any]) -> None:
        self._note_alive(sender, message).ended.add(sender)

    def _on_decided(self, sender: int, message: dict[str, Any]) -> None:
        state, number = self._note_alive(sender, message), message["number"]
        if number <= state.done or sender in self.lost:
            return
        if self._me not in message["members"]:
            self._on_fenced(sender, message)
            return
        known = state.decided.setdefault(number, Decision(sender, message["members"], message["step"]))
        if known.by != sender:  # two ranks have decided, since one believed the other dead: one more round
            state.highest = max(state.highest, number + 1)

    def _on_said(self, sender: int, message: dict[str, Any]) -> None:
        state = self._note_alive(sender, message)
        state.said[message["kind"], message["number"], message["by"]].add(sender)

    def _on_fenced(self, _sender: int, _message: dict[str, Any]) -> None:
        self.fenced = True
        self._revoke("")

    # -------------------------------------------------------------------------------------------------- rounds
    def meet(self, meeting: Round) -> Decision | None:
        """Join a round; return its decision, or None if this rank is fenced or another round has begun."""
        state, number = self.lineages[meeting.lineage], meeting.number
        state.came[number][self._me] = meeting.step
        began_s = time.perf_counter()
        coming = {"kind": "come", "lineage": meeting.lineage, "number": number, "step": meeting.step}
        beat = Heartbeat(self, meeting, coming)
        while not self.fenced and state.highest <= number:
            if number in state.decided:
                return state.decided[number]
            beat()
            self._watchdog.serve()
            going_on = self._settled(meeting, began_s)
            if going_on and min(going_on) == self._me:
                return self._decide(meeting, going_on)
            time.sleep(POLL_S)
        return None

    def _settled(self, meeting: Round, began_s: float) -> list[int]:
        """Return the living members that have arrived, or [] while any other member is still awaited."""
        state, now_s = self.lineages[meeting.lineage], time.perf_counter()
        came, here = state.came[meeting.number], []
        patient = now_s - began_s < max(meeting.limit_s, SILENT_S)
        for member in meeting.members:
            lives = member == self._me or not self._silent(state, member, began_s, now_s)
            if lives and member in came:
                here.append(member)
            elif lives and patient and member not in state.ended and member not in self.lost:
                return []
        return here

    def _silent(self, state: Lineage, member: int, began_s: float, now_s: float) -> bool:
        if member in self.lost or member in self.dead():
            return True
        # The watchdog has already waited GRACE_S for the answer of a suspect.
        limit_s = SILENT_S - GRACE_S if member in self.suspects else SILENT_S
        return now_s - max(state.alive_s.get(member, began_s), began_s) > limit_s

    def _decide(self, meeting: Round, members: list[int]) -> Decision:
        state = self.lineages[meeting.lineage]
        steps = [step for member, step in state.came[meeting.number].items() if member in members]
        step = min((step for step in steps if step is not None), default=None)
        decision = state.decided[meeting.number] = Decision(self._me, tuple(members), step)
        message = {
            "kind": "decided", "lineage": meeting.lineage, "number": meeting.number, "members": decision.members,
            "step": step,
        }  # fmt: skip
        for member in meeting.members:
            if member != self._me and member not in state.ended:
                self._channel.send(member, message)
        return decision

    def agreed(self, meeting: Round, decision: Decision) -> bool:
        """Wait until all decided members have confirmed the decision; return whether they have."""
        limit_s = max(meeting.limit_s, 2 * SILENT_S)
        return self._all_say(AGREED, meeting, decision, ready=lambda: True, limit_s=limit_s)

    def confirm(self, meeting: Round, decision: Decision, ready: Callable[[], bool]) -> bool:
        """Wait until all decided members have created their communicator; this rank has when `ready()` is true.

        A rank that waits for longer than `MAKING_S`, or for a silent rank, gives up this round and begins the next. All
        other members join that round, so they all try again together.
        """
        made = self._all_say(MADE, meeting, decision, ready=ready, limit_s=MAKING_S)
        if made:
            self.lineages[meeting.lineage].done = meeting.number
        return made

    def _all_say(
        self, stage: str, meeting: Round, decision: Decision, *, ready: Callable[[], bool], limit_s: float
    ) -> bool:
        state, number = self.lineages[meeting.lineage], meeting.number
        began_s = time.perf_counter()
        beat = Heartbeat(self, meeting, {"kind": "alive", "lineage": meeting.lineage})
        said = state.said[stage, number, decision.by]
        while not self.fenced and state.highest <= number:
            if self._me not in said and ready():
                said.add(self._me)
                self._send_to(
                    decision.members,
                    {"kind": stage, "lineage": meeting.lineage, "number": number, "by": decision.by},
                )
            if said >= set(decision.members):
                return True
            beat()
            awaited, now_s = set(decision.members) - said - {self._me}, time.perf_counter()
            silent = any(self._silent(state, member, began_s, now_s) for member in awaited)
            if silent or now_s - began_s > limit_s:
                state.highest = number + 1
            self._watchdog.serve()
            time.sleep(POLL_S)
        return False

    def _send_to(self, members: tuple[int, ...], message: dict[str, Any]) -> None:
        for member in members:
            if member != self._me:
                self._channel.send(member, message)

    def notify_lost(self) -> None:
        self._send_to(tuple(sorted(self.lost)), {"kind": "fenced"})


class Heartbeat:
    """Sends a message to all members of a round, every `BEAT_S` seconds."""

    def __init__(self, agreement: Agreement, meeting: Round, message: dict[str, Any]) -> None:
        self._agreement, self._message, self._due_s = agreement, message, 0.0
        self._members = tuple(member for member in meeting.members if member not in agreement.lost)

    def __call__(self) -> None:
        now_s = time.perf_counter()
        if now_s >= self._due_s:
            self._due_s = now_s + BEAT_S
            self._agreement._send_to(self._members, self._message)


class ShutdownBarrier:
    """A barrier of living ranks. `gone()`: world ranks that are dead or given up; `fence()` raises if this rank is.

    A barrier of the library would wait for dead ranks, and so does `MPI_Finalize`: 16 of 36 kills at the end of a job
    made it hang or fail. A recovery at the end, in place of this barrier, gave up healthy ranks that were still
    shutting down.
    """

    def __init__(self, abort: AbortProtocol, gone: Callable[[], set[int]], fence: Callable[[], None]) -> None:
        self._watchdog, self._gone, self._fence = abort.watchdog, gone, fence
        self._met = 0  # number of barriers that this rank has reached
        self._others: dict[int, int] = {}  # the same number for each other rank
        self._watchdog.handlers["shutdown"] = self._on_shutdown

    def begin_barrier(self) -> Callable[[], bool]:
        """Begin to wait for all living ranks; the result returns whether they have arrived."""
        self._met += 1
        number, channel = self._met, self._watchdog.channel
        others = set(range(channel.size)) - {channel.rank}
        self._watchdog.do(lambda: self._watchdog.notify_all({"kind": "shutdown", "met": number}))

        def all_here() -> bool:
            self._fence()
            missing = {rank for rank in others if self._others.get(rank, 0) < number}
            return not missing or missing <= self._gone()

        return all_here

    def lowest(self) -> int:
        """Return the lowest rank that has reached the last barrier; it may have left since."""
        came = {rank for rank, met in self._others.items() if met >= self._met}
        return min({self._watchdog.channel.rank, *came})

    def _on_shutdown(self, sender: int, message: dict[str, Any]) -> None:
        self._others[sender] = message["met"]
