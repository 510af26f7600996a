"""The averaging steps of one averager: search, wait for the trigger, all-reduce; again while the deadline allows.

`Step` is a state machine over the search and the all-reduce, driven by messages and time. Its deadline applies only to
the search: an all-reduce ends by itself, since its members limit their waits, and leaving it early would cost all other
members a time-out. `StepQueue` holds the current step, the steps that wait for it, and messages that arrived too early.
The averager holds the state that survives a step (group bits, round).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spawnsim.policies.averaging.butterfly import Butterfly, Group
from spawnsim.policies.averaging.interface import (
    AveragingFailed,
    Cancelled,
    Stage,
    StepControl,
    result_of,
    why_no_average,
)
from spawnsim.policies.averaging.matchmaking import Matchmaker, Position, Reply, Search, declined
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing

if TYPE_CHECKING:
    from spawnsim.policies.averaging.averager import DecentralizedAverager

SEARCH_KINDS = (Kind.JOIN, Kind.REPLY, Kind.LEAVE, Kind.DISBAND, Kind.BEGIN, Kind.CALL)
BURST = 64  # parts sent between two polls for messages


@dataclass(frozen=True, slots=True)
class StepRequest:
    """The arguments of `step`. `patience_s`: maximum wait for a message without a time-out."""

    gathered: Any
    deadline_s: float
    retry: bool
    patience_s: float = math.inf


class Step:
    """One active step. `missed`: members of its static group requested this rank before the step began."""

    def __init__(
        self, queue: StepQueue, control: StepControl, request: StepRequest, now_s: float, *, missed: bool
    ) -> None:
        self.queue, self.averager, self.control, self.request = queue, queue.averager, control, request
        self.out: deque[Outgoing] = deque()
        self.matchmaker: Matchmaker | None = None
        self.butterfly: Butterfly | None = None
        self.group: Group | None = None
        self.led = False
        self.next_round = self.averager.round + 1
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self._early: list[tuple[int, Message]] = []  # messages of the group from before the trigger
        self._begin_search(now_s, missed)

    # ------------------------------------------------------------------------------------------ matchmaking
    def _begin_search(self, now_s: float, missed: bool = False) -> None:
        self.control.stage = Stage.LOOKING_FOR_GROUP
        until_s = max(self.control.scheduled_time, now_s + self.averager.settings.min_matchmaking_time)
        until_s = min(until_s, self.request.deadline_s)
        self.matchmaker = Matchmaker(self.averager, self.request.gathered, until_s, now_s, missed=missed)
        self._continue_search(now_s)

    def _continue_search(self, now_s: float) -> None:
        """Join the group that the search has found, or handle a search without a group."""
        self._collect()
        search = self.matchmaker.search if self.matchmaker is not None else None
        if search is not None and search.group is not None:
            self._retire()
            self._joined(search.group, search.led)
        elif search is not None and search.over:
            self._found_none(search, now_s)

    def _found_none(self, search: Search, now_s: float) -> None:
        """Search again if that may help. A rank that is late for a round joins a later round, to catch up."""
        terms, ahead = search.terms, search.ahead
        again, why = True, f"too few peers under {terms.key} by {terms.expires_s:.6g} s"
        if search.late:
            why = f"the group of {terms.key} was formed before this rank arrived"
            self.counts["rounds missed"] += 1
        elif terms.expected and now_s < terms.expires_s:
            again, why = False, f"no other member of {terms.key} will come"
        if ahead is not None and ahead.round_ > self.averager.round:
            again, self.averager.round, self.next_round = ahead.searching, ahead.round_, ahead.round_
        elif search.late:
            again = False
        if search.mismatched:
            why += f" (rank {sorted(search.mismatched)[0]} has other tensors, compression or part sizes)"
        self._failed(why, now_s, again=again)

    def _joined(self, group: Group, led: bool) -> None:
        self.group, self.led = group, led
        self.control.stage = Stage.AWAITING_TRIGGER
        self.next_round = self.averager.round + 1
        self.averager.formed(group, led)
        self._early += self.queue.early(group.number)

    # ----------------------------------------------------------------------------------------------- messages
    def handle(self, source: int, message: Message, now_s: float) -> bool:
        """Handle a message of this step's search or group; return whether it was one."""
        if self.group is not None:
            return self._handle_member(self.group, source, message, now_s)
        if self.matchmaker is None or message.kind not in SEARCH_KINDS:
            return False
        self.matchmaker.search.handle(source, message, now_s)
        if self.matchmaker.search.ended:
            self._continue_search(now_s)
        return True

    def _handle_member(self, group: Group, source: int, message: Message, now_s: float) -> bool:
        if message.kind is Kind.BEGIN and Group.of(message.meta).number == group.number:
            return True  # a duplicate
        if message.kind is Kind.JOIN and self.led and source in group.ranks and message.meta[1] == group.key:
            # The first BEGIN was lost.
            self.out.append((source, Message(Kind.BEGIN, message.number, meta=group.plain())))
            return True
        if message.number != group.number or message.kind not in (Kind.PART, Kind.DELTA, Kind.ABSENT):
            return False
        if self.butterfly is None:
            self._early.append((source, message))
        else:
            self.butterfly.handle(source, message, now_s)
        return True

    def lost(self, rank: int, now_s: float) -> None:
        """Handle the death of a rank."""
        if self.matchmaker is not None:
            self.matchmaker.search.gone(rank, now_s)
        if self.butterfly is not None:
            self.butterfly.lost(rank, now_s)

    # ------------------------------------------------------------------------------------------------ time
    def tick(self, now_s: float) -> None:
        if self.control.cancel_requested:
            self._withdraw()
            self.control.finish(error=self.queue.cancelled())
        elif self.matchmaker is not None:
            self._tick_search(self.matchmaker, now_s)
        if self.group is not None and self.butterfly is None and self.control.triggered:
            self._begin(self.group, now_s)
        if self.butterfly is not None and not self.control.done():
            self._tick_butterfly(self.butterfly, now_s)
        self._collect()

    def _tick_search(self, matchmaker: Matchmaker, now_s: float) -> None:
        matchmaker.tick(now_s)
        # The deadline ends a search, never a group: the members have been promised this rank's values.
        if now_s >= self.request.deadline_s and not matchmaker.search.ended:
            matchmaker.search.leave()
        self._continue_search(now_s)

    def _begin(self, group: Group, now_s: float) -> None:
        averager = self.averager
        if not averager.acquire_tensors():
            return
        self.control.stage, self.control.began_allreduce = Stage.RUNNING_ALLREDUCE, True
        self.butterfly = Butterfly(
            averager.rank, group, averager.vector, weight=self.control.weight,
            limits=averager.settings.limits(self.request.patience_s), now_s=now_s,
        )  # fmt: skip
        averager.release_tensors()
        for rank in sorted(averager.endpoint.failed & set(group.ranks)):
            self.butterfly.lost(rank, now_s)
        early, self._early = self._early, []
        for source, message in early:
            self.butterfly.handle(source, message, now_s)

    def _tick_butterfly(self, butterfly: Butterfly, now_s: float) -> None:
        butterfly.send_some(BURST, now_s)
        butterfly.tick(now_s)
        if not butterfly.finished:
            return
        nothing = why_no_average(butterfly)
        if nothing is not None:
            self._collect()
            self._failed(nothing, now_s)
        elif self.averager.acquire_tensors():
            self._apply(butterfly)

    def _apply(self, butterfly: Butterfly) -> None:
        averager, deltas = self.averager, butterfly.deltas
        alpha = averager.settings.averaging_alpha
        averager.vector.add(deltas if alpha == 1 else [delta * delta.dtype.type(alpha) for delta in deltas])
        averager.release_tensors()
        self._retire()
        averaged = result_of(butterfly)
        self.counts["partial steps"] += not averaged.complete
        averager.averaged(averaged)
        self.control.finish(averaged)

    def wake_s(self) -> float:
        if self.matchmaker is not None:
            return min(self.request.deadline_s, self.matchmaker.wake_s())
        if self.butterfly is None:
            return math.inf
        return -math.inf if self.butterfly.sending.can_send else self.butterfly.wake_s()

    # ---------------------------------------------------------------------------------------------- endings
    def _failed(self, why: str, now_s: float, again: bool = True) -> None:
        self.failures.append(why)
        # In a static matchmaking the other members continue with the next round: a retry would find no member.
        gone_on = self.group is not None and self.averager.settings.matchmaking is not None
        self._withdraw()
        if self.request.retry and again and not gone_on and now_s < self.request.deadline_s:
            self._begin_search(now_s)
        else:
            shown = self.failures if len(self.failures) < 4 else [*self.failures[:2], "…", self.failures[-1]]
            self.control.finish(error=AveragingFailed(f"rank {self.averager.rank}: {'; '.join(shown)}"))

    def _withdraw(self) -> None:
        """Leave search and group, and notify all ranks that expect this rank."""
        if self.matchmaker is not None:
            self.matchmaker.search.leave()
        if self.group is not None:
            absent = Message(Kind.ABSENT, self.group.number)
            self.out.extend((rank, absent) for rank in self.group.ranks if rank != self.averager.rank)
        self._retire()
        self.group = None
        self._early.clear()

    def _retire(self) -> None:
        """Drop the state machines, and keep their counts."""
        self._collect()
        if self.matchmaker is not None:
            self.matchmaker.end()
            self.out.extend(self.matchmaker.out)
            self.counts.update(self.matchmaker.counts)
        if self.butterfly is not None:
            self.counts.update(self.butterfly.counts)
        self.matchmaker = self.butterfly = None

    def _collect(self) -> None:
        for machine in (self.matchmaker, self.butterfly):
            if machine is not None:
                self.out.extend(machine.out)
                machine.out.clear()


EARLY_AT_MOST = 4096  # messages kept for groups and rounds that this rank has yet to reach
GROUPS_AT_MOST = 64  # numbers of groups that are stored


# Ranks are not synchronized, so a message can reach a rank before the step that it belongs to. Two kinds are kept: a
# JOIN for a later static round, since that round's other members would otherwise wait for a time-out; and a PART or
# ABSENT of an unknown group, since messages of other members may overtake the leader's BEGIN (only messages of one rank
# stay in order). All other messages get an immediate answer that lets their sender continue: a refusal, a LEAVE or an
# ABSENT. Silence would be correct as well, but costs the sender a time-out.
class StepQueue:
    """Runs one step at a time; waiting steps begin in the order of their requests."""

    def __init__(self, averager: DecentralizedAverager) -> None:
        self.averager = averager
        self.counts: Counter[str] = Counter()
        self._step: Step | None = None
        self._waiting: deque[tuple[StepControl, StepRequest]] = deque()
        self._early: deque[tuple[int, Message, float]] = deque(maxlen=EARLY_AT_MOST)  # source, message, time
        self._groups: deque[int] = deque(maxlen=GROUPS_AT_MOST)  # numbers of the latest groups
        self._missed: set[int] = set()  # ranks that requested the next static round, and gave up
        self._formed = -1  # the last static round in which this rank was in a group

    @property
    def current(self) -> Step | None:
        return self._step if self._step is not None and not self._step.control.done() else None

    def ask(self, control: StepControl, request: StepRequest) -> None:
        self._waiting.append((control, request))

    def cancel_all(self) -> None:
        """Ask all steps to end without a result."""
        controls = [control for control, _ in self._waiting]
        for control in controls if self.current is None else [self.current.control, *controls]:
            control.cancel_requested = True

    def _begin_next(self, now_s: float) -> None:
        """Begin the next waiting step, and pass it the messages that arrived before."""
        while self.current is None and self._waiting:
            control, request = self._waiting.popleft()
            if control.cancel_requested:
                control.finish(error=self.cancelled())
                continue
            missed, self._missed = bool(self._missed), set()
            step = self._step = Step(self, control, request, now_s, missed=missed)
            if control.done():  # no other rank will reach its round
                self._end(step)
                continue
            early, self._early = self._early, deque(maxlen=EARLY_AT_MOST)
            for source, message, came_s in early:
                if message.kind is Kind.JOIN:
                    self.handle(source, message, now_s)
                elif now_s - came_s < request.patience_s:
                    self._early.append((source, message, came_s))

    def cancelled(self) -> Cancelled:
        return Cancelled(f"rank {self.averager.rank}: the averaging step was cancelled")

    def note_group(self, number: int) -> None:
        """Record that this rank is in a group of the current round."""
        self._groups.append(number)
        self._formed = max(self._formed, self.averager.round)

    def early(self, number: int) -> list[tuple[int, Message]]:
        """Remove and return the messages of a group that arrived before the group was known here."""
        found = [(source, message) for source, message, _ in self._early if message.number == number]
        if found:
            left = (item for item in self._early if item[1].number != number)
            self._early = deque(left, maxlen=EARLY_AT_MOST)
        return found

    # ---------------------------------------------------------------------------------------------------- messages
    def handle(self, source: int, message: Message, now_s: float) -> None:
        """Pass a message to its step, keep it for the next step, or refuse it."""
        step = self.current
        if message.kind is Kind.LEAVE and self._left(source, message):
            return
        if message.kind in (Kind.JOIN, Kind.CALL) and self.averager.settings.matchmaking is not None:
            self._static(source, message, now_s)
        elif step is None or not step.handle(source, message, now_s):
            self._unexpected(source, message, now_s)

    def _static(self, source: int, message: Message, now_s: float) -> None:
        """Handle a JOIN or CALL for a round: keep it if this rank has yet to reach it, else reply its position."""
        step = self.current
        prefix, _, number = str(message.meta[1]).rpartition(".round")
        round_ = int(number) if prefix == self.averager.settings.prefix and number.isdigit() else -1
        if round_ > self.averager.round or (round_ == self.averager.round and step is None):
            if message.kind is Kind.JOIN:
                self._early.append((source, message, now_s))
                if step is not None and step.matchmaker is not None:
                    step.matchmaker.search.on_position(source, Position(round_, True, -1), now_s)
        elif step is None or round_ < self.averager.round or not step.handle(source, message, now_s):
            position = Position(self.averager.round, step is not None, self._formed)
            if step is not None and step.group is not None:
                position = Position(step.next_round, False, self.averager.round)
            self._refuse(source, message, tuple(position))

    def _refuse(self, source: int, message: Message, position: tuple[int, ...] | None = None) -> None:
        reply = Message(Kind.REPLY, message.number, part=Reply.NOT_LOOKING_FOR_GROUP, meta=position)
        self.averager.endpoint.send(source, reply)

    def _unexpected(self, source: int, message: Message, now_s: float) -> None:
        kind, number = message.kind, message.number
        if kind is Kind.BEGIN:
            number = Group.of(message.meta).number
        if kind is Kind.JOIN:
            self._refuse(source, message)
        elif kind in (Kind.PART, Kind.ABSENT, Kind.BEGIN) and number in self._groups:  # a past group
            if kind is Kind.PART:  # its sender may still wait for an answer, if one was lost
                self.averager.endpoint.send(source, Message(Kind.ABSENT, number))
        # Other members may begin before this rank receives its BEGIN.
        elif kind in (Kind.PART, Kind.ABSENT):
            self._early.append((source, message, now_s))
        else:
            self.averager.endpoint.send_all(declined(self.averager.rank, source, message))

    def _left(self, source: int, message: Message) -> bool:
        """Drop a kept request whose rank has given up; return whether there was one."""
        kept = [item for item in self._early if (item[0], item[1].number) != (source, message.number)]
        if len(kept) == len(self._early):
            return False
        self._missed.add(source)
        self._early = deque(kept, maxlen=EARLY_AT_MOST)
        return True

    # ----------------------------------------------------------------------------------------------------- time
    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Advance the current step, and begin the next one when it has ended."""
        self._begin_next(now_s)
        step = self.current
        if step is None:
            return
        if step.matchmaker is not None:
            step.matchmaker.replicas_changed(changed, now_s)
        for rank in sorted(dead):
            step.lost(rank, now_s)
        step.tick(now_s)
        self.averager.endpoint.send_queue(step.out)
        if step.control.done():
            self._end(step)
            self._begin_next(now_s)

    def _end(self, step: Step) -> None:
        """Store a step's round and counts, and drop messages for its groups."""
        self.averager.endpoint.send_queue(step.out)
        self.averager.round = step.next_round
        kept = (item for item in self._early if item[1].number not in self._groups)
        self._early = deque(kept, maxlen=EARLY_AT_MOST)
        self.counts.update(step.counts)
        self.counts["steps"] += 1
        self.counts["failed steps"] += step.control.exception() is not None

    def wake_s(self) -> float:
        if self.current is None:
            return -math.inf if self._waiting else math.inf
        return self.current.wake_s()
