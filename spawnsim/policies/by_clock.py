"""`AsyncModelAveragePolicy`: average by the clock, not by the iteration, while training goes on.

Warm-up is one collective a step; after it all is messages (`groups.swaps`, `groups.tide`), and nobody waits for
anybody. This room knows models, the communicator's clock, and when averaging is wanted; who averages with whom is its
machines' business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, Protocol

import torch

from spawnsim.comm import Comm, Task, as_comm
from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.groups.parts import Vector
from spawnsim.policies.groups.peers import Mode, check_mode
from spawnsim.policies.groups.post import Post
from spawnsim.policies.groups.swaps import Pace, Swaps
from spawnsim.policies.groups.tide import Tide
from spawnsim.policies.groups.warmup import WarmUp
from spawnsim.policies.groups.words import Word
from spawnsim.policies.policy import Result, SpawnPolicy, blank_info
from spawnsim.policies.state import Travels, collect

POLL_S = 1e-3  # between two looks at weights that another holds


class Exchanges(Protocol):
    """What `Swaps` and `Tide` have in common."""

    out: Any
    counts: Any
    rounds: int

    @property
    def settled(self) -> bool:
        """Whether nothing is under way that counts on this rank."""

    def set_active(self, active: bool, now_s: float) -> None:
        """Take part from now on, or not."""

    def handle(self, source: int, word: Word, now_s: float, vector: Vector) -> bool:
        """Take a word; return whether the weights have changed."""

    def tick(self, now_s: float, vector: Vector) -> Any:
        """Do what is due."""

    def lost(self, rank: int) -> None:
        """Note that a rank is dead."""

    def forget(self) -> None:
        """Give up what is under way."""

    def leave(self) -> None:
        """Hand over what others rely on."""

    def wake_s(self) -> float:
        """Return when `tick` is next needed."""


class AsyncModelAveragePolicy(SpawnPolicy):
    """Asynchronous model averaging: every `sync_interval_ms` of the clock, whatever the iteration.

    Weights are sent as they are, training goes on, and what comes back is applied as a difference, so that the steps
    taken meanwhile survive (x ← x + gain·(theirs − sent)). Parameters and buffers of any dtype.

    Args:
        peer_selection_mode: "all": the mean of all ranks that average. "ring": one third of the way towards each
            neighbour. "shift_one": pairs of the lower and the upper half, shifted by one each time. "random": pairs
            at random.
        sync_interval_ms: milliseconds between averagings.
        warmup_steps: steps with gradients averaged over the whole group (call `attach` before training so that the
            first step's are as well; else the first call averages the weights: the same for SGD and momentum).
        background: make progress beside the training loop, which then holds `weights()` while it changes the model.
        patience_s: seconds after which a silent peer is not waited for, and `abort` gives up negotiating.
        tag: of the policy's messages; two policies at once need two.

    `abort()` and `resume()` may be called by any rank at any time, warm-up included, any number of times: the last
    call counts. After `abort()` the weights of this rank are neither used nor changed; it returns when no round counts
    on this rank, so no other waits for it. Calls with the model in evaluation mode count as no training step.
    """

    # fmt: off
    def __init__(
        self, peer_selection_mode: str = "all", sync_interval_ms: float = 500, warmup_steps: int = 0, *,
        background: bool = False, patience_s: float = 5.0, travels: Travels | None = None, tag: int = 7201,
        timing: dict[str, list[float]] | None = None,
    ) -> None:
        # fmt: on
        super().__init__()
        self.mode: Mode = check_mode(peer_selection_mode)
        for name, value in (("sync_interval_ms", sync_interval_ms), ("patience_s", patience_s)):
            if not (value > 0 and math.isfinite(value)):
                raise ParameterError(f"{name}={value!r}: give a finite number above 0")
        if int(warmup_steps) != warmup_steps or warmup_steps < 0:
            raise ParameterError(f"warmup_steps={warmup_steps!r}: give a whole number of at least 0")
        self.travels = travels if travels is not None else Travels()
        if self.travels.optimizer_state != "keep":
            raise ParameterError("optimizer_state: averaging by the clock keeps each rank's own; give 'keep'")
        self.warmup_steps, self.tag = int(warmup_steps), tag
        self._warm_up, self._started = WarmUp(self.warmup_steps, self.travels), False
        self.pace = Pace(sync_interval_ms / 1000, patience_s)
        self.timing = timing if timing is not None else {}
        self.num_averagings = 0
        self._wanted = True
        self._background = background
        self._group: object = None
        self._comm: Comm | None = None
        self._post: Post | None = None
        self._exchanges: Exchanges | None = None
        self._vector: Vector | None = None
        self._model: torch.nn.Module | None = None
        self._weights, self._stopping = Lock(), False
        self._task: Task | None = None
        self._idle = blank_info("none", 1)

    # ---------------------------------------------------------------------------------------------------- calls
    def __call__(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer,
        local_metric: float | None = None, group: Any = None,
    ) -> Result:  # fmt: skip
        """Count a training step; send, take and apply what is due. Waits only in warm-up, for the group."""
        info = self._idle.copy()
        if local_metric is not None:
            info["local_metric"] = float(local_metric)
        comm = self._comm if self._comm is not None and group is self._group else self._join(group, model)
        if model is not self._model:
            self._bind(model)
        if model.training and not self._warm_up.over:
            began_s = comm.clock.now()
            self._warm_up.attach(comm, model, optimizer)  # if that was not done before: averages the first step
            self._warm_up.count()
            wait_s = comm.clock.now() - began_s
            info.update(averaged_this_iteration=True, donors=comm.Get_size() - 1, wait_s=wait_s)
        if self._warm_up.over and not self._started:
            self._start(comm)
        before, sent = self.num_averagings, self._sent()
        self._progress()
        info["averaged_this_iteration"] |= self.num_averagings > before
        info["bytes"] += self._sent() - sent
        return model, optimizer, info

    def _join(self, group: Any, model: torch.nn.Module) -> Comm:
        comm = self._comm = as_comm(group)
        self._group, self._post = group, Post(comm, self.tag)
        ranks = (comm.Get_rank(), comm.Get_size())
        self._exchanges = (
            Tide(ranks, self.pace) if self.mode == "all" else Swaps(self.mode, ranks, self.pace, comm.rng("peers"))
        )
        self._bind(model)
        if self._background:
            self._stopping, self._task = False, comm.background(self._go_on)
        return comm

    def _bind(self, model: torch.nn.Module) -> None:
        self._model = model
        self._vector = Vector(list(collect(model, None, self.travels).values()))

    def _sent(self) -> int:
        return self._post.counts["bytes_sent"] if self._post is not None else 0

    def attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, group: Any) -> None:
        """Average gradients from the first step on, until warm-up is over. Before training; collective."""
        comm = self._comm if self._comm is not None and group is self._group else self._join(group, model)
        self._warm_up.attach(comm, model, optimizer)

    def _start(self, comm: Comm) -> None:
        """Begin to average by the clock, if that is wanted."""
        self._started = True
        if self._wanted and self._exchanges is not None:
            self._exchanges.set_active(True, comm.clock.now())

    # ------------------------------------------------------------------------------------------- abort, resume
    @property
    def status(self) -> str:
        """"averaging", "warming up", or "stopped" (by `abort`)."""
        if not self._wanted:
            return "stopped"
        return "averaging" if self._started else "warming up"

    def abort(self) -> bool:
        """Stop averaging on this rank; return whether what was under way ended in time (else it is given up)."""
        was, self._wanted = self._wanted, False
        comm, exchanges = self._comm, self._exchanges
        if comm is None or exchanges is None or not (was and self._started):
            return True
        exchanges.set_active(False, comm.clock.now())
        end_s = comm.clock.now() + self.pace.patience_s
        while True:
            self._progress()
            if exchanges.settled:
                return True
            left_s = end_s - comm.clock.now()
            if left_s <= 0:
                exchanges.forget()
                return False
            self._wait(min(left_s, 0.05 if self._task is not None else left_s))

    def resume(self) -> None:
        """Average on this rank (again); in warm-up, from its end on."""
        was, self._wanted = self._wanted, True
        if self._comm is not None and self._exchanges is not None and self._started and not was:
            self._exchanges.set_active(True, self._comm.clock.now())
            self._progress()

    # ------------------------------------------------------------------------------------------------ progress
    @contextmanager
    def weights(self) -> Iterator[None]:
        """Hold the weights: inside the block, averaging in the background neither reads nor changes them."""
        while not self._weights.acquire(blocking=False):
            if self._comm is None:
                raise UsageError("weights() inside weights(): the weights are held already")
            self._comm.clock.sleep(POLL_S)
        try:
            yield
        finally:
            self._weights.release()

    def _progress(self) -> bool:
        """Handle all that has arrived and is due; false if the weights are held."""
        post, exchanges, vector = self._post, self._exchanges, self._vector
        if post is None or exchanges is None or vector is None or not self._weights.acquire(blocking=False):
            return False
        try:
            failed = len(post.failed)
            arrived = post.poll()
            now_s = post.comm.clock.now()
            for rank in sorted(post.failed) if len(post.failed) > failed else ():
                exchanges.lost(rank)
            before = exchanges.counts["exchanges"]
            for source, word in arrived:
                exchanges.handle(source, word, now_s, vector)
            exchanges.tick(now_s, vector)
            self.num_averagings += exchanges.counts["exchanges"] - before
            while exchanges.out:
                post.send(*exchanges.out.popleft())
        finally:
            self._weights.release()
        return True

    def _wait(self, seconds: float) -> None:
        if self._post is not None and self._task is None:
            due_s = self._exchanges.wake_s() - self._post.comm.clock.now() if self._exchanges is not None else seconds
            self._post.wait(min(max(due_s, 1e-4), seconds))
        elif self._comm is not None:
            self._comm.clock.sleep(min(seconds, POLL_S))

    def _go_on(self) -> None:
        post, exchanges = self._post, self._exchanges
        assert post is not None
        assert exchanges is not None
        while not self._stopping:
            if self._progress():
                due_s = exchanges.wake_s() - post.comm.clock.now()
                post.wait(min(max(due_s, POLL_S), self.pace.interval_s, 0.25))
            else:
                post.comm.clock.sleep(POLL_S)

    def shutdown(self) -> None:
        """Stop averaging and hand over what others rely on. Not collective; may be called twice."""
        if self._comm is None or self._exchanges is None or self._post is None:
            return
        self.abort()
        self._exchanges.leave()
        self._progress()
        self._stopping = True
        if self._task is not None:
            self._task.join(self.pace.patience_s)
        self._warm_up.detach()
        self._comm = self._exchanges = None

    @property
    def stats(self) -> dict[str, float]:
        """Averagings, and what the exchanges met."""
        stats: dict[str, float] = {"num_averagings": self.num_averagings}
        if self._exchanges is not None:
            stats |= self._exchanges.counts
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and whether averaging is wanted."""
        return {**super().state_dict(), "num_averagings": self.num_averagings, "wanted": self._wanted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a checkpoint; call it before the first call of the policy."""
        super().load_state_dict(state)
        self.num_averagings, self._wanted = int(state["num_averagings"]), bool(state["wanted"])
