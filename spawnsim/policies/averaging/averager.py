"""`DecentralizedAverager`: averages tensors with small groups of peers, over any communicator.

It connects the state machines (directory, search, all-reduce, state sharing) to a communicator's messages and clock,
and holds the state that survives a step: the tensors, the group key, the round, the share of the directory, the donor.
No wait is unbounded: without a time-out, the communicator's deadline applies. Every call makes progress;
`run_in_background` also makes progress between calls. Source: hivemind's `DecentralizedAverager`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields
from threading import Lock
from typing import Any

import torch

from spawnsim.comm import as_comm
from spawnsim.errors import ParameterError, Timeout, UsageError
from spawnsim.policies.averaging.butterfly import Group
from spawnsim.policies.averaging.directory import (
    DirectoryClient,
    DirectoryShard,
    Loaded,
    State,
    StateDonor,
    StateDownload,
)
from spawnsim.policies.averaging.interface import (
    Averaged,
    AveragingFailed,
    Cancelled,
    Matchmaking,
    Settings,
    StepControl,
    check_bits,
    check_weight,
    next_bits,
)
from spawnsim.policies.averaging.steps import StepQueue, StepRequest
from spawnsim.policies.averaging.vector import Vector
from spawnsim.policies.exchange.endpoint import PAUSE_S, Endpoint, ProgressEngine
from spawnsim.policies.exchange.messages import Kind, Message
from spawnsim.policies.state.codecs import (
    Choices,
    Codec,
    CompressionInfo,
    check_infos,
    codecs_for,
    infos_by_place,
)


class DecentralizedAverager:
    """Averages `averaged_tensors`, in place, with groups of peers found among the ranks of a communicator.

    `step()` looks for a group and averages once with it. Groups come from a protocol (ranks that look for a group at
    the same time and under the same key find each other, and stragglers are left out), or from a static
    `matchmaking` (`Grid`, `RandomGroups`, `Exponential`, `Everyone`).

    Times are seconds of `comm.clock`. Without a time-out, the maximum wait for a message is the communicator's deadline
    (`comm.clock.deadline`, 30 s by default); an all-reduce as a whole has no limit.

    Args:
        averaged_tensors: tensors of any dtypes and shapes, the same on all ranks; they are changed in place.
        comm: a `spawnsim.Comm`, or an object that `as_comm` can wrap. Every rank with an averager keeps a share of the
            directory, so it should make progress regularly.
        start: whether to make progress in the background from now on.
        prefix: name shared by all averagers that may meet. A rank may have averagers with several prefixes on one
            communicator, but only one per prefix at a time.
        target_group_size: maximum number of members (a power of two is best). min_group_size: minimum number.
        initial_group_bits: the first group key, such as "0110"; the length of keys is fixed.
        min_matchmaking_time: seconds that a leader waits for followers. request_timeout: seconds that a follower
            waits for a leader's answer; must be smaller.
        averaging_alpha: the share of the difference to the average that is added to the tensors.
        part_size_bytes: maximum compressed size of the parts in which tensors travel.
        allreduce_timeout: maximum duration of an all-reduce in seconds; parts that arrive by then count.
        next_chunk_timeout: seconds that a peer may be silent in an all-reduce or download before the other ranks
            continue without it. sender_timeout: the limit for senders only (default: `next_chunk_timeout`).
            reducer_timeout: the limit for reducers only (default: twice the senders' limit; must be larger).
        compression, state_compression: codecs of all-reduces and downloads: "none", "float16", "scaled16", "uniform8",
            "quantile8", "blockwise8", a codec, a list or mapping of these, one for each tensor, or
            `SizeAdaptiveCompression`, `RoleAdaptiveCompression`, `PerTensorCompression`.
        tensor_infos: a `CompressionInfo` for each tensor (key, shape, dtype, role), for compression by key or role.
        bandwidth: this rank's bandwidth in bytes per second; None: the mean of the other ranks; 0: do not reduce.
        min_vector_size: reducers with fewer elements than this get none.
        auxiliary: only reduce. client_mode: only send, and only join groups that other ranks lead.
        allow_state_sharing: whether newcomers may download this rank's state; default: unless one of these is set.
        declare_state_period: seconds between declarations as a donor.
        shutdown_timeout: maximum wait of `shutdown` for the background, in seconds.
        step_timeout: seconds for finding a group without `step(timeout=...)` (default: the deadline).
        matchmaking: a rule that defines the groups of each round, instead of the protocol.
        tag: tag of all messages; by default a tag derived from the prefix, from 16384 to 32767.

    Raises:
        ParameterError: a parameter is out of range, or two parameters contradict each other.
        UsageError: this rank has an averager on this communicator that was not shut down, with the same prefix or the
            same tag.
    """

    # fmt: off
    def __init__(
        self, averaged_tensors: Sequence[torch.Tensor], comm: Any, *, start: bool, prefix: str,
        target_group_size: int | None = None, min_group_size: int = 2, initial_group_bits: str = "",
        min_matchmaking_time: float = 5.0, request_timeout: float = 3.0, averaging_alpha: float = 1.0,
        part_size_bytes: int = 2**19, allreduce_timeout: float | None = None, next_chunk_timeout: float | None = None,
        sender_timeout: float | None = None, reducer_timeout: float | None = None,
        compression: Choices = None, state_compression: Choices = None,
        tensor_infos: Sequence[CompressionInfo] | None = None,
        bandwidth: float | None = None, min_vector_size: int = 0, auxiliary: bool = False,
        allow_state_sharing: bool | None = None, declare_state_period: float = 30.0, client_mode: bool | None = None,
        shutdown_timeout: float = 5.0, step_timeout: float | None = None, matchmaking: Matchmaking | None = None,
        tag: int | None = None,
    ) -> None:
        given = dict(locals())  # only the arguments are local yet; all but three are settings
        # fmt: on
        # By name, not by position: 25 values have few types, so two swapped values would pass every check.
        self.settings = settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
        self.comm = as_comm(comm)
        self.vector = Vector(averaged_tensors, self.codecs(averaged_tensors))
        self.rank, self.size, self.round = self.comm.Get_rank(), self.comm.Get_size(), 0
        self.bits = initial_group_bits
        self.endpoint = Endpoint(
            self.comm, settings.tag_or_default, channel=settings.channel, prefix=settings.prefix
        )
        self.endpoint.allocate = self.vector.allocate
        self.engine = ProgressEngine(self.endpoint, self)
        self.directory = DirectoryClient(self.rank, self.size, request_timeout)
        self.shard = DirectoryShard()
        self.donor = StateDonor(settings, self.directory, self.endpoint)
        self.steps = StepQueue(self)
        self.loading: StateDownload | None = None
        self._tensors = Lock()
        self._closed = False
        if start:
            self.run_in_background()

    # ----------------------------------------------------------------------------------------------- averaging
    def step(
        self, gather: Any = None, scheduled_time: float | None = None, weight: float | None = None,
        timeout: float | None = None, allow_retries: bool = True, require_trigger: bool = False, wait: bool = True,
    ) -> Averaged | StepControl | None:  # fmt: skip
        """Find a group and average with it once. Several steps run one after the other.

        Args:
            gather: any small object; the result holds the objects of all averaged ranks.
            scheduled_time: when the all-reduce is expected to begin (default: `min_matchmaking_time` from now).
            weight: this rank's weight in the average, above 0 (default 1).
            timeout: seconds for finding a group (default: `step_timeout`). An all-reduce may take longer.
            allow_retries: search again after a failure until the time-out.
            require_trigger: begin the all-reduce only after `StepControl.allow_allreduce()`; needs `wait=False`.
            wait: if false, return a `StepControl`; the step proceeds in every call (and in the background).

        Returns:
            The `gather` objects of the averaged ranks, by rank. `complete`: whether all ranks of the group were
            averaged in all elements; `received` and `missing`: the missing shares. None if there was no average.
        """
        if self._closed:
            raise UsageError(f"rank {self.rank}: step() after shutdown()")
        if wait and require_trigger:
            raise UsageError(
                f"rank {self.rank}: step(wait=True, require_trigger=True) would wait for a trigger that cannot "
                "come: use wait=False and StepControl.allow_allreduce()"
            )
        control = StepControl(
            self.engine.drive, weight=1.0 if weight is None else check_weight(weight),
            scheduled_s=-math.inf if scheduled_time is None else scheduled_time, triggered=not require_trigger,
        )  # fmt: skip
        patience_s = self.comm.clock.limit_s()
        deadline_s = self.comm.clock.now() + self.search_s(timeout)
        if control.scheduled_time >= deadline_s:
            raise ParameterError(
                f"scheduled_time={scheduled_time} s does not lie before the end of the search at {deadline_s:.6g} s"
            )
        self.steps.ask(control, StepRequest(gather, deadline_s, allow_retries, patience_s))
        if not wait:
            self.progress()
            return control
        try:
            return control.result()
        except (AveragingFailed, Cancelled):
            return None

    def search_s(self, timeout: float | None = None) -> float:
        """Return how long a search may take: `timeout`, else `step_timeout`, else the communicator's deadline."""
        given = self.settings.step_timeout if timeout is None else timeout
        return self.comm.clock.limit_s() if given is None else given

    @contextmanager
    def get_tensors(self) -> Iterator[list[torch.Tensor]]:
        """Lend the averaged tensors, live: inside the block, averaging neither reads nor changes them."""
        while not self.acquire_tensors():
            self.comm.clock.sleep(PAUSE_S)
        try:
            yield self.vector.tensors
        finally:
            self.release_tensors()

    # ------------------------------------------------------------------------------------------ state sharing
    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> Loaded | StateDownload | None:
        """Download the state of the donor with the highest priority, or of the next one if it fails.

        Each call looks up donors and their priorities.

        Args:
            wait: if false, return a `StateDownload`, which has `done()` and `result()`.
            timeout: seconds in which to search for donors again until one sends its state. By default each donor of
                one list is asked once.

        Returns:
            (metadata, tensors), or None if no donor sent its state.
        """
        now_s, chunk_s = self.comm.clock.now(), self.settings.next_chunk_timeout
        if chunk_s is None:
            chunk_s = min(self.comm.clock.limit_s(), math.inf if timeout is None else timeout / 2)
        # In `hold`, since a background task may be routing messages to the former download.
        with self.engine.hold():
            self.loading = StateDownload(self, chunk_s, None if timeout is None else now_s + timeout)
        self.progress()
        return self.loading.result() if wait else self.loading

    @property
    def allow_state_sharing(self) -> bool:
        """Whether newcomers may download this rank's state."""
        return self.donor.sharing

    @allow_state_sharing.setter
    def allow_state_sharing(self, allowed: bool) -> None:
        if self.settings.client_mode and allowed:
            raise ParameterError("allow_state_sharing: other peers cannot reach a peer in client_mode")
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
        """Handle all arrived messages and due timers; never waits."""
        self.engine.progress()

    def serve(self, seconds: float) -> None:
        """Make progress for some seconds, for auxiliaries and idle ranks."""
        self.engine.drive(lambda: False, seconds)

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """Make progress in parallel with the rank's program, until `shutdown`.

        With `await_ready`, wait until this rank answers other ranks. Raise `Timeout` after `timeout` seconds (default:
        the communicator's deadline).
        """
        self.engine.run_in_background()
        if await_ready and not self.engine.await_ready(self.comm.clock.limit_s() if timeout is None else timeout):
            raise Timeout((), "run_in_background", -1, f"rank {self.rank}: the background task was not ready in time")

    # ------------------------------------------------------------------------------------------------ the rest
    def get_group_bits(self, wait: bool = True) -> str | Future[str]:
        """Return the bits of this rank's group key; with `wait=False` a future of them, as hivemind does."""
        return self.bits if wait else _future(self.bits)

    def set_group_bits(self, group_bits: str, wait: bool = True) -> Future[None] | None:
        """Set the bits of this rank's group key, a string of 0 and 1, from the next search on."""
        self.bits = check_bits(group_bits)
        return None if wait else _future(None)

    @property
    def stats(self) -> dict[str, float]:
        """Counters of this rank's averager."""
        states = {"states given": self.donor.given}
        return {**self.steps.counts, **self.endpoint.counts, **self.directory.counts, **states}

    def shutdown(self, timeout: float | None = None) -> bool:
        """Cancel all steps, withdraw all declarations, stop the background. Not collective; may be repeated.

        Wait at most `timeout` seconds (default: `shutdown_timeout`) and return whether the background has stopped.
        """
        # Inside `hold`, since a background task may be in the middle of a step. The progress between the two lets the
        # cancelled steps notify their groups (ABSENT, LEAVE), so that no member waits for this rank until a time-out.
        if not self._closed:
            self._closed = True
            with self.engine.hold():
                self.steps.cancel_all()
            self.progress()
            with self.engine.hold():
                self.donor.retire()
        return self.engine.stop(self.settings.shutdown_timeout if timeout is None else timeout)

    def codecs(self, tensors: Sequence[torch.Tensor]) -> list[Codec]:
        """Return the codec of each tensor, according to `compression` and `tensor_infos`."""
        if self.settings.tensor_infos is not None:
            check_infos(self.settings.tensor_infos, tensors)
        return codecs_for(self.settings.compression, self.settings.tensor_infos or infos_by_place(tensors))

    # --------------------------------------------------------------------------------------------- the tensors
    def acquire_tensors(self) -> bool:
        """Lock the tensors and return True, or False if `get_tensors` or another thread holds them."""
        # Not blocking: a task that waited here would prevent a virtual rank's other tasks from releasing the lock.
        return self._tensors.acquire(blocking=False)

    def release_tensors(self) -> None:
        self._tensors.release()

    def get_current_state(self) -> State:
        """Return the state that newcomers download: (small metadata, tensors, their `CompressionInfo`s or None).

        Subclasses may override it; the third item is optional.
        """
        return {"group_key": self.bits}, self.vector.tensors, self.settings.tensor_infos

    # -------------------------------------------------------------------- called by the engine, the search, the steps
    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        for source, message in arrived:
            self._route(source, message, now_s)
        # After the messages: an answer that has just arrived must not count as missing.
        self.steps.tick(now_s, dead, self.directory.tick(now_s))
        if self.loading is not None and not self.loading.done():
            self.loading.tick(now_s, dead)
        self.donor.declare(now_s)
        # Only if a newcomer waits and the tensors are free: a snapshot in the middle of a step would mix two states.
        if self.donor.fetches and self.acquire_tensors():
            try:
                self.donor.answer(self.get_current_state)
            finally:
                self.release_tensors()

    def _route(self, source: int, message: Message, now_s: float) -> None:
        if message.kind is Kind.DECLARE:
            self.endpoint.send_all(self.shard.handle(source, message, now_s))
        elif message.kind is Kind.LISTED and not message.number:  # for the search, not for a download
            key, step = self.directory.handle(source, message), self.steps.current
            if step is not None and step.matchmaker is not None and key == step.matchmaker.key:
                step.matchmaker.listed(now_s)
        elif message.kind is Kind.FETCH:
            self.donor.fetches.append((source, message))
        elif message.kind in (Kind.STATE, Kind.LISTED):
            if self.loading is not None:
                self.loading.handle(source, message, now_s)
        else:
            self.steps.handle(source, message, now_s)

    def wake_s(self) -> float:
        times = [self.directory.wake_s(), self.donor.declare_s, self.steps.wake_s()]
        if self.loading is not None and not self.loading.done():
            times.append(self.loading.wake_s())
        return min(times)

    def formed(self, group: Group, led: bool) -> None:
        """Register a group with this rank in it; only its leader records the event "group"."""
        self.steps.note_group(group.number)
        index, size = group.ranks.index(self.rank), len(group.members)
        target = self.settings.target_group_size
        # From the group's number, so that all members scatter over the next round's keys without another message.
        self.bits = next_bits(self.bits, group.number, index=index, group_size=size, target=target)
        if led:
            world = self.comm.Get_group().members
            members = [world[rank] for rank in group.ranks]
            self.comm.record.event("group", key=group.key, members=members, size=size, round=self.round)

    def averaged(self, result: Averaged) -> None:
        self.donor.renew(self.comm.clock.now())
        if not result.complete:
            world = self.comm.Get_group().members
            missing = {str(world[rank]): share for rank, share in result.missing.items()}
            self.comm.record.event(
                "partial_average", round=self.round, received=result.received, missing=missing
            )

    def number(self) -> int:
        """Draw 62 random bits that identify a request, group or download: collisions are negligible."""
        return int(self.comm.rng("groups.number").integers(1, 2**62))


def _future(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
