"""`AsyncModelAveragePolicy`: average at intervals of the clock, not of iterations, during training.

Warm-up averages gradients over the whole group, with one collective before each of the optimizer's first steps. After
warm-up all communication is messages, and no rank waits for another. This module handles models and decides when to
average; `averaging.gossip` and `averaging.tree` decide which ranks average with each other. Source: BAGUA's
asynchronous model average.
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
REFUSED = ("unreadable", "damaged")  # endpoint counts of dropped messages
GAPS = 5
DEATH_CHECKS = 8  # checks for dead ranks per interval


class WarmUp:
    """Counts the warm-up steps; until the last one, a hook of the optimizer averages gradients.

    If the group has lost a rank, the hook detaches itself before it raises. On the survivors' group it is attached
    again, starting from the mean of their weights.
    """

    def __init__(self, steps: int, travels: StateScope) -> None:
        self.steps, self.left, self.travels = steps, steps, travels
        self._mean: GroupMean | None = None
        self._hook: Any = None

    @property
    def over(self) -> bool:
        """Whether all warm-up steps have been counted."""
        return self.left <= 0

    def regroup(self, comm: Comm) -> None:
        """Continue in a new group with the largest remaining count: a death may find survivors at two steps.

        Collective if the policy has a warm-up.
        """
        self.detach()
        if self.steps:
            # The largest count wins: a rank that left warm-up early would miss the other ranks' collectives.
            own, most = np.array([self.left]), np.zeros(1, np.int64)
            comm.Allreduce(own, most, MAX)
            self.left = int(most[0])

    def attach(self, comm: Comm, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set all ranks to the mean of their weights, and average gradients from the next step on."""
        if self._hook is None and not self.over:
            live = as_real(collect(model, None, self.travels))
            GroupMean(comm, live)(comm, live)
            self._hook = optimizer.register_step_pre_hook(lambda *_: self._average(comm, model))

    def _average(self, comm: Comm, model: torch.nn.Module) -> None:
        live: Tensors = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                # Parameters without a gradient contribute zeros: collectives must match on all ranks, and a branch of
                # the model may be unused on only one rank.
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                live[f"gradient/{name}"] = parameter.grad
        try:
            if self._mean is None:
                self._mean = GroupMean(comm, as_real(live))
            self._mean(comm, as_real(live))
        except WorldError:
            # Detach first: otherwise the optimizer's next step would call into a dead group again.
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
    """One rank's exchanges by the clock on one communicator: the owner of its progress engine.

    `exchanges` is the mode's state machine. The lock `weights` is held while `vector` is read or changed.
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
        # A rank answers only when it polls, between two training steps. So this rank measures the gap between its
        # polls, and peers learn how long they must wait for it. The median of the last gaps ignores one long gap (an
        # evaluation, a checkpoint).
        self._gaps: deque[float] = deque(maxlen=GAPS)

    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        self._gaps.append(now_s - self._polled_s)
        self._polled_s = now_s
        self.exchanges.note_step(median(self._gaps))
        # Deaths before messages: an answer that opens a round must not rely on a rank that is known to be dead.
        for rank in sorted(dead):
            self.exchanges.lost(rank, now_s)
        for source, message in arrived:
            self.exchanges.handle(source, message, now_s, self.vector)
        self.exchanges.tick(now_s, self.vector)
        self.endpoint.send_queue(self.exchanges.out)
        # Compared with the previous poll: the endpoint's counts never decrease, and each refusal is recorded once.
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
        """Counters of the exchanges, including dropped messages."""
        refused = {name: self.endpoint.counts[name] for name in REFUSED if self.endpoint.counts[name]}
        return self.exchanges.counts + Counter(refused)


class AsyncModelAveragePolicy(SpawnPolicy):
    """Asynchronous model averaging: every `sync_interval_ms` of the clock, whatever the iteration.

    Weights are sent unchanged and training continues. The reply is applied as a difference, x ← x + gain·(theirs −
    sent), so that training steps taken meanwhile are preserved. Parameters and buffers may have any dtype.

    Args:
        peer_selection_mode: "all": the mean of all ranks that average. "ring": one third of the way towards each
            neighbour. "shift_one": pairs from the lower and the upper half, shifted by one each time. "random": random
            pairs.
        sync_interval_ms: milliseconds between averagings.
        share: the step towards the mean, above 0 to 1 (a population that stays diverse: 0.01, PAPA).
        warmup_steps: steps with gradients averaged over the whole group. Call `attach` before training to include the
            first step; otherwise the first call averages the weights, which is equivalent for SGD and momentum.
        background: make progress in parallel with the training loop, which must hold `weights()` while it changes the
            model.
        patience_s: seconds after which a silent peer is no longer waited for, and after which `abort` stops
            negotiating. Increase it if a training step takes more than a fraction of it: a rank answers only between
            its steps.
        tag: tag of the policy's messages; two policies on one communicator need two tags.

    When ranks die, the survivors continue to average at the same pace: immediately if the backend reports deaths
    (virtual ranks, ULFM), otherwise after `patience_s`. After `comm.recover()`, call the policy with the new
    communicator as `group`; background progress continues there. A damaged message is dropped, counted ("unreadable" in
    `stats`) and recorded as an event ("refused_messages").

    Any rank may call `abort()` and `resume()` at any time and any number of times, also during warm-up: the last call
    counts. After `abort()` this rank's weights are neither used nor changed. `abort()` returns when no round depends on
    this rank, so no other rank waits for it. A call with the model in evaluation mode does not count as a training
    step.
    """

    acts_in_every_call = True
    paper = "arXiv 2107.01499"
    promises = ("progress",)
    states = ("average", "refused_messages")

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
        self._averagings = 0  # on earlier communicators
        self._counted = 0  # averagings up to the latest call
        self._wanted = True
        self._background = background
        self._began_s = math.inf  # when averaging by the clock began
        self._averaging: ClockAveraging | None = None
        self._model: torch.nn.Module | None = None
        self._weights = Lock()
        self._before: Counter[str] = Counter()  # counters of exchanges on earlier communicators

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
        """Count a training step; send, receive and apply due exchanges. Waits only in warm-up, for the group."""
        averaging = self._averaging_on(comm, model)
        if model.training and not self._warm_up.over:
            began_s = comm.clock.now()
            self._warm_up.attach(comm, model, optimizer)  # unless already attached: averages the first step
            self._warm_up.count()
            wait_s = comm.clock.now() - began_s
            info.update(averaged_this_iteration=True, donors=comm.Get_size() - 1, wait_s=wait_s)
        if self._warm_up.over and not self._started:
            self._start(averaging)
        sent = averaging.endpoint.counts["bytes_sent"]
        averaging.engine.progress()
        info["averaged_this_iteration"] |= self.num_averagings > self._counted  # here, or in the background since
        self._counted = self.num_averagings
        info["bytes"] += averaging.endpoint.counts["bytes_sent"] - sent
        return model, optimizer

    def _averaging_on(self, comm: Comm, model: torch.nn.Module) -> ClockAveraging:
        """Return the `ClockAveraging` for this model and communicator; both may have changed since the last call."""
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
        """Begin to average over a communicator: the first one, or the survivors'."""
        if self._averaging is not None:
            self._end(self._averaging)
        self._warm_up.regroup(comm)  # also on a rank that joins: the whole group calls it
        ranks = (comm.Get_rank(), comm.Get_size())
        # A copy: the pace learns step times, which do not carry over to the ranks of the next communicator.
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
            model: starts from the mean of all ranks' weights.
            optimizer: the model's optimizer; each of its steps averages gradients first.
            group: as in the policy's call.
        """
        comm = self._bound(group)
        self._averaging_on(comm, model)
        self._warm_up.attach(comm, model, optimizer)

    def _start(self, averaging: ClockAveraging) -> None:
        """Begin to average by the clock, if wanted."""
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
            model: unused; part of BAGUA's signature.

        Returns:
            Whether the exchanges under way ended within `patience_s`; otherwise they are dropped.
        """
        was, self._wanted = self._wanted, False
        if self._averaging is None or not (was and self._started):
            return True
        return self._leave(self._averaging)

    def _leave(self, averaging: ClockAveraging, *, for_good: bool = False) -> bool:
        """Wait until no rank depends on this one, and hand over the state that other ranks rely on."""
        exchanges, comm, engine = averaging.exchanges, averaging.comm, averaging.engine
        try:
            exchanges.set_active(False, comm.clock.now(), for_good=for_good)
            # `drive`, not `sleep`: leaving completes when the other ranks' messages are handled.
            settled = engine.drive(lambda: exchanges.settled, exchanges.pace.patience_s)
            if not settled:
                exchanges.forget()
            if self._draining:
                # All ranks leave together and keep answering until each has its replies. A rank whose peer had left
                # early would wait for all of its patience, and all other ranks for it.
                everyone = comm.Ibarrier()
                engine.drive(everyone.Test, exchanges.pace.patience_s, polling=True)
                everyone.Wait()
            else:  # the other ranks may be leaving too: then there is nothing to hand over
                engine.drive(lambda: not exchanges.relied_on, min(2 * self.pace.interval_s, self.pace.patience_s))
            exchanges.leave()
            engine.progress()
        except WorldError:  # the communicator has ended, and its exchanges with it
            exchanges.forget()
            return False
        return settled

    def resume(self, model: torch.nn.Module | None = None) -> None:
        """Average on this rank (again); during warm-up, from the end of warm-up on.

        Args:
            model: unused; part of BAGUA's signature.
        """
        was, self._wanted = self._wanted, True
        if self._averaging is not None and self._started and not was:
            self._averaging.exchanges.set_active(True, self._averaging.comm.clock.now())
            with suppress(WorldError):  # the communicator has ended: the next call of the policy says so
                self._averaging.engine.progress()

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Hold the weights: inside the block, background averaging neither reads nor changes them.

        Returns:
            A context manager.

        Raises:
            UsageError: inside another `weights()`, where this can be detected.
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
        """Stop averaging and hand over the state that other ranks rely on. Not collective; may be called twice."""
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
        """Complete the exchanges under way; averaging continues with the next call. See `SpawnPolicy.drain`."""
        wanted, averaging = self._wanted, self._averaging
        super().drain()
        self._wanted = wanted  # `shutdown` has cleared it, because it ends averaging for good
        if averaging is not None:
            averaging.comm.Barrier()  # all have left, and send no more
            averaging.endpoint.empty(averaging.exchanges.pace.patience_s)

    def _warn_if_too_slow(self, comm: Comm) -> None:
        lasted_s = comm.clock.now() - self._began_s
        # A single rank never averages, so its interval is not at fault.
        if self.num_averagings == 0 and self.pace.interval_s > lasted_s > 0 and comm.Get_size() > 1:
            longer = f"sync_interval_ms={1000 * self.pace.interval_s:g} exceeds"
            self.warn(comm, f"{longer} the {1000 * lasted_s:.3g} ms of training: never averaged")

    @property
    def num_averagings(self) -> int:
        """How often this rank's weights were averaged by the clock."""
        return self._averagings + (self._averaging.averagings if self._averaging is not None else 0)

    @property
    def stats(self) -> dict[str, float]:
        """Number of averagings, and the counters of the exchanges."""
        return {"num_averagings": self.num_averagings, **self._met}

    @property
    def _met(self) -> Counter[str]:
        return self._before + (self._averaging.counts if self._averaging is not None else Counter())

    def state_dict(self) -> dict[str, Any]:
        # The counters, whether averaging is wanted, and the remaining warm-up steps.
        own = {"num_averagings": self.num_averagings, "wanted": self._wanted, "warm_up_left": self._warm_up.left}
        return {**super().state_dict(), **own, "met": dict(self._met)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._averagings = self._counted = int(state["num_averagings"])
        self._wanted, self._before = bool(state["wanted"]), Counter(state.get("met", {}))
        self._warm_up.left = int(state.get("warm_up_left", self._warm_up.left))
