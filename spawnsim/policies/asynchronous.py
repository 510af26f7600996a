"""`AsyncModelAveragePolicy`: average at intervals of the clock, not of iterations, while training goes on.

Warm-up averages gradients over the whole group, one collective before each of the optimizer's first steps; after it
all is messages, and no rank waits for another. This module knows models, and when averaging is wanted; which ranks
average with each other is decided by `averaging.gossip` and `averaging.tree`. Source: BAGUA's asynchronous model
average.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import median
from threading import Lock
from typing import Any

import numpy as np
import torch

from spawnsim.comm import MAX, Comm
from spawnsim.errors import ParameterError, UsageError, WorldError
from spawnsim.policies.averaging.gossip import Mode, Pace, PairwiseGossip, check_mode
from spawnsim.policies.averaging.tree import TreeAverage
from spawnsim.policies.averaging.vector import Vector
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.endpoint import Endpoint, ProgressEngine
from spawnsim.policies.exchange.group_mean import GroupMean
from spawnsim.policies.exchange.messages import Message
from spawnsim.policies.state.layout import ModelAndOptimizer, StateScope, Tensors, as_real, collect

POLL_S = 1e-3  # between two attempts while another task holds the weights
BACKGROUND_WAIT_S = 0.25  # the longest wait of the background task
REFUSED = ("unreadable", "damaged")  # counts of the endpoint
GAPS = 5
DEATH_CHECKS = 8  # looks for dead ranks in an interval


class WarmUp:
    """Counts the steps of warm-up, and averages gradients in a hook of the optimizer until they are over.

    A hook whose group has lost a rank takes itself away before it raises: the survivors' group attaches it anew, with
    the mean of their weights.
    """

    def __init__(self, steps: int, travels: StateScope) -> None:
        self.steps, self.left, self.travels = steps, steps, travels
        self._mean: GroupMean | None = None
        self._hook: Any = None

    @property
    def over(self) -> bool:
        """Whether all steps have been counted."""
        return self.left <= 0

    def regroup(self, comm: Comm) -> None:
        """Go on in a group, for as many steps as the one that has most left: a death finds the survivors at two steps.

        Collective, where there is a warm-up at all.
        """
        self.detach()
        if self.steps:
            # The largest count wins: a rank that left warm-up early would miss the collectives of the others.
            own, most = np.array([self.left]), np.zeros(1, np.int64)
            comm.Allreduce(own, most, MAX)
            self.left = int(most[0])

    def attach(self, comm: Comm, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let all ranks begin with the mean of their weights, and average gradients from the next step on."""
        if self._hook is None and not self.over:
            live = as_real(collect(model, None, self.travels))
            GroupMean(comm, live)(comm, live)
            self._hook = optimizer.register_step_pre_hook(lambda *_: self._average(comm, model))

    def _average(self, comm: Comm, model: torch.nn.Module) -> None:
        live: Tensors = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # Parameters without a gradient take part with zeros: collectives must match on all ranks, and a
                # branch may be unused on one alone.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                live[f"gradient/{name}"] = parameter.grad
        try:
            if self._mean is None:
                self._mean = GroupMean(comm, as_real(live))
            self._mean(comm, as_real(live))
        except WorldError:
            # The hook goes first: otherwise the optimizer's next step would call into a dead group again.
            self.detach()
            raise

    def count(self) -> None:
        self.left -= 1
        if self.over:
            self.detach()

    def detach(self) -> None:
        self._mean = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class ClockAveraging:
    """One rank's exchanges by the clock on one communicator: what its progress engine calls.

    `exchanges` is the state machine of the mode; the lock `weights` is held while `vector` is read or changed.
    """

    def __init__(
        self, comm: Comm, tag: int, exchanges: TreeAverage | PairwiseGossip, vector: Vector, weights: Lock
    ) -> None:
        self.comm, self.exchanges, self.vector = comm, exchanges, vector
        self.endpoint = Endpoint(comm, tag)
        self.endpoint.allocate = vector.allocate
        interval_s = exchanges.pace.interval_s
        self.engine = ProgressEngine(
            self.endpoint, self, lock=weights, poll_interval_s=POLL_S,
            background_wait_s=min(interval_s, BACKGROUND_WAIT_S), death_check_s=interval_s / DEATH_CHECKS,
        )  # fmt: skip
        self._refused = 0
        self._polled_s = comm.clock.now()
        # A rank answers only when it polls, between two training steps; so how long others must wait for it is measured
        # and told to them. The median of the last gaps: one long gap (an evaluation, a checkpoint) is not the rule.
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        self._gaps.append(now_s - self._polled_s)
        self._polled_s = now_s
        self.exchanges.note_step(median(self._gaps))
        # Deaths before messages: an answer that opens a round must not count on a rank that is known to be dead.
        for rank in sorted(dead):
            self.exchanges.lost(rank, now_s)
        for source, message in arrived:
            self.exchanges.handle(source, message, now_s, self.vector)
        self.exchanges.tick(now_s, self.vector)
        self.endpoint.send_queue(self.exchanges.out)
        # Compared with the last look: the endpoint's counts never fall, and each refusal is one event.
        refused = self._refused_count()
        if refused > self._refused:
            self.comm.record.event("refused_messages", tag=self.endpoint.tag, count=refused - self._refused)
            self._refused = refused

    def wake_s(self) -> float:
        return self.exchanges.wake_s()

    def _refused_count(self) -> int:
        return sum(self.endpoint.counts[name] for name in REFUSED)

    @property
    def averagings(self) -> int:
        """How often the weights were averaged on this communicator."""
        return self.exchanges.counts["exchanges"]

    @property
    def counts(self) -> Counter[str]:
        """What the exchanges met."""
        refused = {name: self.endpoint.counts[name] for name in REFUSED if self.endpoint.counts[name]}
        return self.exchanges.counts + Counter(refused)


class AsyncModelAveragePolicy(SpawnPolicy):
    """Asynchronous model averaging: every `sync_interval_ms` of the clock, whatever the iteration.

    Weights are sent as they are, training goes on, and what comes back is applied as a difference, so that the steps
    taken meanwhile survive (x ← x + gain·(theirs − sent)). Parameters and buffers of any dtype.

    Args:
        peer_selection_mode: "all": the mean of all ranks that average. "ring": one third of the way towards each
            neighbour. "shift_one": pairs of the lower and the upper half, shifted by one each time. "random": pairs
            at random.
        sync_interval_ms: milliseconds between averagings.
        share: how far to go towards the mean, above 0 to 1 (a population that stays diverse: 0.01, PAPA).
        warmup_steps: steps with gradients averaged over the whole group (call `attach` before training so that the
            first step's are as well; else the first call averages the weights: the same for SGD and momentum).
        background: make progress beside the training loop, which then holds `weights()` while it changes the model.
        patience_s: seconds after which a silent peer is not waited for, and `abort` gives up negotiating; more where
            training steps take more than a fraction of that, for a rank answers only between its steps.
        tag: of the policy's messages; two policies at once need two.

    Averaging goes on among those that are left when ranks die, at the same pace: at once where deaths are told (virtual
    ranks, ULFM), else when `patience_s` has passed. After `comm.recover()` call the policy with the new communicator as
    `group`; what made progress in the background goes on there. A damaged message is dropped, counted ("unreadable" in
    `stats`) and recorded as an event ("refused_messages").

    `abort()` and `resume()` may be called by any rank at any time, warm-up included, any number of times: the last
    call counts. After `abort()` the weights of this rank are neither used nor changed; it returns when no round counts
    on this rank, so no other waits for it. Calls with the model in evaluation mode count as no training step.
    """

    acts_in_every_call = True
    paper = "arXiv 2107.01499"
    promises = ("progress",)

    # fmt: off
    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: float = 500, warmup_steps: int = 0, *,
        background: bool = False, patience_s: float = 5.0, travels: StateScope | None = None, tag: int = 7201,
        share: float = 1.0, timing: dict[str, list[float]] | None = None,
    ) -> None:
        # fmt: on
        super().__init__(timing=timing)
        self.mode: Mode = check_mode(peer_selection_mode)
        for name, value in (("sync_interval_ms", sync_interval_ms), ("patience_s", patience_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ParameterError(f"{name}={value!r}: give a finite number above 0")
        if not 0 < share <= 1:
            raise ParameterError(f"share={share!r}: give a number above 0, at most 1")
        if int(warmup_steps) != warmup_steps or warmup_steps < 0:
            raise ParameterError(f"warmup_steps={warmup_steps!r}: give a whole number of at least 0")
        self.travels = travels if travels is not None else StateScope()
        if self.travels.optimizer_state != "keep":
            raise ParameterError("optimizer_state: averaging by the clock keeps each rank's own; give 'keep'")
        self.warmup_steps, self.tag, self.share = int(warmup_steps), tag, float(share)
        self._warm_up, self._started = WarmUp(self.warmup_steps, self.travels), False
        self.pace = Pace(sync_interval_ms / 1000, patience_s)
        self._averagings = 0  # on communicators of before
        self._told = 0  # averagings until the latest call
        self._wanted = True
        self._background = background
        self._began_s = math.inf  # when averaging by the clock began
        self._averaging: ClockAveraging | None = None
        self._model: torch.nn.Module | None = None
        self._weights = Lock()
        self._before: Counter[str] = Counter()  # what the exchanges met on communicators of before

    # ---------------------------------------------------------------------------------------------------- calls
    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        """Count a training step; send, take and apply what is due. Waits only in warm-up, for the group."""
        averaging = self._averaging_on(comm, model)
        if model.training and not self._warm_up.over:
            began_s = comm.clock.now()
            self._warm_up.attach(comm, model, optimizer)  # if that was not done before: averages the first step
            self._warm_up.count()
            wait_s = comm.clock.now() - began_s
            info.update(averaged_this_iteration=True, donors=comm.Get_size() - 1, wait_s=wait_s)
        if self._warm_up.over and not self._started:
            self._start(averaging)
        sent = averaging.endpoint.counts["bytes_sent"]
        averaging.engine.progress()
        info["averaged_this_iteration"] |= self.num_averagings > self._told  # here, or in the background since
        self._told = self.num_averagings
        info["bytes"] += averaging.endpoint.counts["bytes_sent"] - sent
        return model, optimizer

    def _averaging_on(self, comm: Comm, model: torch.nn.Module) -> ClockAveraging:
        """Return what averages this model over this communicator; both may have changed since the last call."""
        averaging = self._averaging
        if averaging is None or averaging.comm is not comm:
            averaging = self._join(comm, model)
        elif model is not self._model:
            averaging.vector = self._vector_of(model)
        self._model = model
        return averaging

    def _vector_of(self, model: torch.nn.Module) -> Vector:
        return Vector(list(collect(model, None, self.travels).values()))

    def _join(self, comm: Comm, model: torch.nn.Module) -> ClockAveraging:
        """Begin to average over a communicator: the first one, or that of the survivors."""
        if self._averaging is not None:
            self._end(self._averaging)
        self._warm_up.regroup(comm)  # also on a rank that joins: all of the group do
        ranks = (comm.Get_rank(), comm.Get_size())
        # A copy: the pace learns step times, and those of one communicator's ranks say nothing of the next one's.
        pace = replace(self.pace)
        exchanges = (
            TreeAverage(ranks, pace, share=self.share)
            if self.mode == "all"
            else PairwiseGossip(self.mode, ranks, pace, comm.rng("peers"), share=self.share)
        )
        averaging = ClockAveraging(comm, self.tag, exchanges, self._vector_of(model), self._weights)
        self._averaging, self._started = averaging, False
        if self._background:
            averaging.engine.run_in_background()
        return averaging

    def _end(self, averaging: ClockAveraging) -> None:
        averaging.engine.stop()
        self._averagings += averaging.averagings
        self._before += averaging.counts

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
        """Average gradients from the first step on, until warm-up is over. Before training; collective.

        Args:
            model: begins with the mean of all ranks' weights.
            optimizer: of the model; its steps average gradients first.
            group: as in the policy's call.
        """
        comm = self._bound(group)
        self._averaging_on(comm, model)
        self._warm_up.attach(comm, model, optimizer)

    def _start(self, averaging: ClockAveraging) -> None:
        """Begin to average by the clock, if that is wanted."""
        self._started = True
        # Not if `abort` was called during warm-up: the last call counts.
        if self._wanted:
            self._began_s = averaging.comm.clock.now()
            averaging.exchanges.set_active(True, self._began_s)

    # ------------------------------------------------------------------------------------------- abort, resume
    @property
    def status(self) -> str:
        """"averaging", "warming up", or "stopped" (by `abort`)."""
        if not self._wanted:
            return "stopped"
        return "averaging" if self._started else "warming up"

    def abort(self, model: torch.nn.Module | None = None) -> bool:
        """Stop averaging on this rank.

        Args:
            model: unused: BAGUA's signature.

        Returns:
            Whether what was under way ended within `patience_s`; else it is given up.
        """
        was, self._wanted = self._wanted, False
        if self._averaging is None or not (was and self._started):
            return True
        return self._leave(self._averaging)

    def _leave(self, averaging: ClockAveraging, *, for_good: bool = False) -> bool:
        """Wait until nothing counts on this rank any more, and hand over what others rely on."""
        exchanges, comm, engine = averaging.exchanges, averaging.comm, averaging.engine
        try:
            exchanges.set_active(False, comm.clock.now(), for_good=for_good)
            # Driven, not slept: others' messages are what settles the leaving.
            settled = engine.drive(lambda: exchanges.settled, exchanges.pace.patience_s)
            if not settled:
                exchanges.forget()
            if self._draining:
                # All leave together, and answer until all have what they wait for: who found another gone would wait
                # for all of its patience, and all others for it.
                everyone = comm.Ibarrier()
                engine.drive(everyone.Test, exchanges.pace.patience_s, polling=True)
                everyone.Wait()
            else:  # others may be about to leave as well: then there is nothing to hand over
                engine.drive(lambda: not exchanges.relied_on, min(2 * self.pace.interval_s, self.pace.patience_s))
            exchanges.leave()
            engine.progress()
        except WorldError:  # the communicator has ended, and with it all that was under way
            exchanges.forget()
            return False
        return settled

    def resume(self, model: torch.nn.Module | None = None) -> None:
        """Average on this rank (again); in warm-up, from its end on.

        Args:
            model: unused: BAGUA's signature.
        """
        was, self._wanted = self._wanted, True
        if self._averaging is not None and self._started and not was:
            self._averaging.exchanges.set_active(True, self._averaging.comm.clock.now())
            with suppress(WorldError):  # the communicator has ended: the next call of the policy says so
                self._averaging.engine.progress()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Hold the weights: inside the block, averaging in the background neither reads nor changes them.

        Returns:
            A context manager.

        Raises:
            UsageError: inside another `weights()`, as far as that can be noticed.
        """
        if self._averaging is not None:
            with self._averaging.engine.hold():
                yield
        elif self._weights.acquire(blocking=False):
            try:
                yield
            finally:
                self._weights.release()
        else:
            raise UsageError("weights() inside weights(): the weights are held already")

    def shutdown(self) -> None:
        """Stop averaging and hand over what others rely on. Not collective; may be called twice."""
        super().shutdown()
        averaging, self._wanted = self._averaging, False
        if averaging is None:
            return
        if self._started:
            self._warn_if_too_slow(averaging.comm)
            self._leave(averaging, for_good=True)
        averaging.engine.stop(self.pace.patience_s)
        self._end(averaging)
        self._warm_up.detach()
        self._averaging = None

    def drain(self) -> None:
        """End the exchanges that are under way; averaging goes on with the next call. See `SpawnPolicy.drain`."""
        wanted, averaging = self._wanted, self._averaging
        super().drain()
        self._wanted = wanted  # else as after `shutdown`, which ends averaging for good
        if averaging is not None:
            averaging.comm.Barrier()  # all have left, and send no more
            averaging.endpoint.empty(averaging.exchanges.pace.patience_s)

    def _warn_if_too_slow(self, comm: Comm) -> None:
        lasted_s = comm.clock.now() - self._began_s
        # One rank alone never averages, so that this is no fault of the interval.
        if self.num_averagings == 0 and self.pace.interval_s > lasted_s > 0 and comm.Get_size() > 1:
            longer = f"sync_interval_ms={1000 * self.pace.interval_s:g} exceeds"
            self.warn(comm, f"{longer} the {1000 * lasted_s:.3g} ms of training: never averaged")

    @property
    def num_averagings(self) -> int:
        """How often this rank's weights were averaged by the clock."""
        return self._averagings + (self._averaging.averagings if self._averaging is not None else 0)

    @property
    def stats(self) -> dict[str, float]:
        """Averagings, and what the exchanges met."""
        return {"num_averagings": self.num_averagings, **self._met}

    @property
    def _met(self) -> Counter[str]:
        return self._before + (self._averaging.counts if self._averaging is not None else Counter())

    def state_dict(self) -> dict[str, Any]:
        # The counters, whether averaging is wanted, and the steps of warm-up that are left.
        own = {"num_averagings": self.num_averagings, "wanted": self._wanted, "warm_up_left": self._warm_up.left}
        return {**super().state_dict(), **own, "met": dict(self._met)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._averagings = self._told = int(state["num_averagings"])
        self._wanted, self._before = bool(state["wanted"]), Counter(state.get("met", {}))
        self._warm_up.left = int(state.get("warm_up_left", self._warm_up.left))
