"""`DecentralizedAverager`: averages tensors with small groups of peers, over any communicator.

This room ties the state machines (directory, search, all-reduce, state sharing) to a communicator's messages and
clock. Nothing here waits without bound. Progress is made inside every call; `run_in_background` makes it between
calls as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

from spawnsim.comm import Comm, as_comm
from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.codecs import Codec
from spawnsim.policies.groups.butterfly import Group, Member
from spawnsim.policies.groups.control import AveragingFailed, Cancelled, StepControl, check_weight
from spawnsim.policies.groups.desk import Desk
from spawnsim.policies.groups.keys import check_bits, next_bits
from spawnsim.policies.groups.loading import Donor, Loading
from spawnsim.policies.groups.parts import Values, Vector
from spawnsim.policies.groups.rounds import Round, Wish
from spawnsim.policies.groups.settings import Settings
from spawnsim.policies.groups.sharing import Download, State, state_key
from spawnsim.policies.groups.static import Matchmaking
from spawnsim.policies.groups.steps import Steps
from spawnsim.policies.groups.words import Kind, Word


class DecentralizedAverager:
    """Averages `averaged_tensors`, in place, with groups of peers found among the ranks of a communicator.

    `step()` looks for a group and averages once with it. Groups come from a protocol (ranks that look for a group at
    the same time and under the same key find each other, and stragglers are left out), or from a static
    `matchmaking` (`Grid`, `RandomGroups`, `Pairs`, `Exponential`, `Everyone`).

    Args:
        averaged_tensors: tensors of any dtype and shape, the same on all ranks; they are changed in place.
        comm: a `spawnsim.Comm`, or what `as_comm` can wrap. Every rank that has an averager keeps a share of the
            directory, so it should make progress now and then.
        start: whether to make progress in the background from now on.
        prefix: shared by all averagers that may meet.
        target_group_size: members at most (a power of two is best). min_group_size: members at least.
        initial_group_bits: the first group key, such as "0110"; its length stays.
        min_matchmaking_time: seconds that a leader waits for followers. request_timeout: seconds that a follower
            waits for a leader's answer; must be smaller.
        averaging_alpha: the share of the way towards the average that the tensors go.
        part_size_bytes: tensors travel in parts of at most so many bytes.
        allreduce_timeout, next_chunk_timeout, sender_timeout, reducer_timeout: see `butterfly`; senders default to
            `next_chunk_timeout`, reducers to twice the senders'.
        compression, state_compression: "none", "float16", "scaled16", "uniform8", "quantile8", "blockwise8", or a
            codec. error_feedback: add what compression lost to what is sent next time.
        bandwidth: bytes a second of this rank; None: as the others on average; 0: others reduce.
        min_vector_size: reducers with fewer elements than this get none.
        auxiliary: only reduce for others. client_mode: only send; join groups that others lead.
        allow_state_sharing: whether newcomers may download this rank's state; by default if neither of these.
        declare_state_period: seconds between declarations as a donor.
        step_timeout: seconds that a step may take if `step(timeout=...)` does not say.

    Raises:
        ParameterError: a parameter is out of range, or two contradict each other.
    """

    # fmt: off
    def __init__(
        self, averaged_tensors: Sequence[torch.Tensor], comm: Any, *, prefix: str, start: bool = False,
        target_group_size: int | None = None, min_group_size: int = 2, initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0, request_timeout: float = 3.0, averaging_alpha: float = 1.0,
        part_size_bytes: int = 2**19, allreduce_timeout: float | None = None, next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None, reducer_timeout: float | None = None,
        compression: str | Codec | None = None, state_compression: str | Codec | None = None,
        bandwidth: float | None = None, min_vector_size: int = 0, auxiliary: bool = False,
        allow_state_sharing: bool | None = None, declare_state_period: float = 30.0, client_mode: bool = False,
        shutdown_timeout: float = 5.0, step_timeout: float = 60.0, error_feedback: bool = False,
        matchmaking: Matchmaking | None = None, burst: int = 64, tag: int = 7101,
    ) -> None:
        self.settings = Settings(
            prefix, target_group_size, min_group_size, min_matchmaking_time, request_timeout, averaging_alpha,
            part_size_bytes, allreduce_timeout, next_chunk_timeout, sender_timeout, reducer_timeout, compression,
            state_compression, bandwidth, min_vector_size, auxiliary, client_mode, declare_state_period,
            shutdown_timeout, step_timeout, error_feedback, matchmaking, burst, tag=tag,
        )
        # fmt: on
        self.comm: Comm = as_comm(comm)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.vector = Vector(averaged_tensors)
        self.residuals: list[Values] | None = self.vector.zeros() if error_feedback else None
        self.bits, self.round = check_bits(initial_group_bits), 0
        self.desk = Desk(self.comm, self.settings, self)
        self.asker = self.desk.asker
        shares = not (client_mode or auxiliary) if allow_state_sharing is None else bool(allow_state_sharing)
        self.donor = Donor(self.desk, sharing=shares)
        self.steps = Steps(self, self.desk)
        self._loading: Loading | None = None
        self._tensors = Lock()
        self._closed = False
        if start:
            self.run_in_background()

    # ----------------------------------------------------------------------------------------------- averaging
    def step(
        self, gather: Any = None, scheduled_time: float | None = None, weight: float | None = None,
        timeout: float | None = None, allow_retries: bool = True, require_trigger: bool = False, wait: bool = True,
    ) -> dict[int, Any] | StepControl | None:  # fmt: skip
        """Look for a group and average with it once.

        Args:
            gather: any small object; the result holds those of all members.
            scheduled_time: when the all-reduce is expected to begin (default: `min_matchmaking_time` from now).
            weight: this rank's weight in the average, above 0 (default 1).
            timeout: seconds for the whole step.
            allow_retries: look again after a failure while they last.
            require_trigger: begin the all-reduce only after `StepControl.allow_allreduce()`.
            wait: if false, return a `StepControl`; it goes on with every call (and in the background).

        Returns:
            What the members gave to `gather`, by rank; None if no average came about.
        """
        if self._closed:
            raise UsageError(f"rank {self.rank}: step() after shutdown()")
        self.steps.check_free()
        now_s = self.comm.clock.now()
        deadline_s = now_s + (self.settings.step_timeout if timeout is None else timeout)
        control = StepControl(
            self.desk.drive, weight=1.0 if weight is None else check_weight(weight),
            scheduled_s=-math.inf if scheduled_time is None else scheduled_time, triggered=not require_trigger,
        )  # fmt: skip
        self.steps.begin(Round(self, control, Wish(gather, deadline_s, allow_retries), now_s), now_s)
        if not wait:
            self.progress()
            return control
        try:
            return control.result()
        except (AveragingFailed, Cancelled):
            return None

    @contextmanager
    def get_tensors(self) -> Iterator[list[torch.Tensor]]:
        """Lend the averaged tensors: inside the block, averaging neither reads nor changes them."""
        while not self.borrow():
            self.comm.clock.sleep(self.settings.poll_interval_s)
        try:
            yield self.vector.tensors
        finally:
            self.hand_back()

    def borrow(self) -> bool:
        """Take the tensors if nobody else has them."""
        return self._tensors.acquire(blocking=False)

    def hand_back(self) -> None:
        """Give the tensors back."""
        self._tensors.release()

    # ------------------------------------------------------------------------------------------ state sharing
    def get_current_state(self) -> State:
        """Return (small metadata, tensors) for newcomers. Meant to be overridden."""
        return None, self.vector.tensors

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> State | Loading | None:
        """Download the state of the donor with the highest priority, or of the next one if it fails.

        Returns (metadata, tensors), or None if no donor gave its state within `timeout` seconds (`step_timeout` by
        default). With `wait=False`, a `Loading` that has `done()` and `result()`.
        """
        now_s = self.comm.clock.now()
        until_s = now_s + (self.settings.step_timeout if timeout is None else timeout)
        order = self.comm.rng("groups.donors")
        self._loading = Loading(self.desk, Download(self.number(), self.settings.chunk_timeout_s, order), until_s)
        self.progress()
        return self._loading.result() if wait else self._loading

    @property
    def allow_state_sharing(self) -> bool:
        """Whether newcomers may download this rank's state."""
        return self.donor.sharing

    @allow_state_sharing.setter
    def allow_state_sharing(self, allowed: bool) -> None:
        if self.settings.client_mode and allowed:
            raise ParameterError("allow_state_sharing: a peer in client_mode cannot be asked by others")
        self.donor.change(sharing=bool(allowed))

    @property
    def state_sharing_priority(self) -> float:
        """Newcomers ask donors of higher priority first."""
        return self.donor.priority

    @state_sharing_priority.setter
    def state_sharing_priority(self, priority: float) -> None:
        self.donor.change(priority=float(priority))

    # ------------------------------------------------------------------------------------------------ progress
    def progress(self) -> None:
        """Handle all that has arrived and all that is due; never waits."""
        self.desk.progress()

    def serve(self, seconds: float) -> None:
        """Make progress for so many seconds: what an auxiliary, or a rank that has nothing else to do, is for."""
        self.desk.drive(lambda: False, seconds)

    def run_in_background(self) -> None:
        """Make progress beside the rank's program, until `shutdown`."""
        self.desk.run_in_background()

    def handle(self, source: int, word: Word, now_s: float) -> None:
        """Take a word. The desk calls this."""
        if word.kind is Kind.FETCH:
            self.donor.asked(source, word)
        elif word.kind is Kind.STATE:
            if self._loading is not None:
                self._loading.download.handle(source, word, now_s)
        else:
            self.steps.handle(source, word, now_s)

    def listed(self, key: str, now_s: float) -> None:
        """Take note that the directory has answered. The desk calls this."""
        step = self.steps.current
        if step is not None and step.seeking is not None and key == step.seeking.key:
            step.seeking.listed(now_s)
        if self._loading is not None and key == state_key(self.settings.prefix):
            self._loading.listed(now_s)

    def tick(self, now_s: float, dead: set[int], changed: set[str]) -> None:
        """Do what is due. The desk calls this."""
        self.steps.tick(now_s, dead, changed)
        if self._loading is not None and not self._loading.done():
            self._loading.tick(now_s, dead)
        self.donor.declare(now_s)
        if self.donor.waiting and self.borrow():
            try:
                self.donor.answer(self.get_current_state)
            finally:
                self.hand_back()

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""
        times = [self.donor.wake_s(), self.steps.wake_s()]
        if self._loading is not None and not self._loading.done():
            times.append(self._loading.wake_s())
        return min(times)

    def early(self, number: int) -> list[tuple[int, Word]]:
        """Return the words of a group that came before the group was known here."""
        return self.steps.early(number)

    def formed(self, group: Group, led: bool) -> None:
        """Take note of a formed group: the members scatter over the keys of the next round."""
        index, size = group.ranks.index(self.rank), len(group.members)
        target = self.settings.target_group_size
        self.bits = next_bits(self.bits, group.number, index=index, group_size=size, target=target)
        if led:
            self.comm.record.event("group", key=group.key, members=list(group.ranks), size=size, round=self.round)

    def number(self) -> int:
        """Draw a number that nobody else draws."""
        return int(self.comm.rng("groups.number").integers(1, 2**62))

    def shuffled(self, members: list[Member]) -> list[Member]:
        """Return the members in a random order."""
        order = self.comm.rng("groups.order").permutation(len(members))
        return [members[index] for index in order]

    # ------------------------------------------------------------------------------------------------ the rest
    def get_group_bits(self) -> str:
        """Return the bits of this rank's group key."""
        return self.bits

    def set_group_bits(self, group_bits: str) -> None:
        """Set the bits of this rank's group key, from the next search on."""
        self.bits = check_bits(group_bits)

    @property
    def stats(self) -> dict[str, float]:
        """What this rank's averager did and met."""
        states = {"states given": self.donor.given}
        return {**self.steps.counts, **self.desk.post.counts, **self.asker.counts, **states}

    def shutdown(self, timeout: float | None = None) -> bool:
        """Cancel what is under way, take back all declarations, stop the background; return whether it stopped.

        Not collective; may be called twice. Waits `timeout` seconds (default `shutdown_timeout`) at most.
        """
        step = self.steps.current
        if step is not None:
            step.control.cancel()
        if not self._closed:
            self._closed = True
            self.donor.retire()
        return self.desk.stop(self.settings.shutdown_timeout if timeout is None else timeout)
