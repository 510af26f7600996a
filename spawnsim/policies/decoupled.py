"""`DecoupledDiLoCoPolicy`: learners that never wait, and one rank that merges their differences, fragment by fragment.

Source: Decoupled DiLoCo 2026 (arXiv 2604.21428). No collective call follows the first meeting: learners may be slow,
stop or die, and the remaining ones continue. The lowest rank present merges, in parallel with its own training; if it
dies, the next one merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, WorldError
from spawnsim.policies.base import Info
from spawnsim.policies.exchange.endpoint import Endpoint, ProgressEngine
from spawnsim.policies.exchange.messages import Kind, Message
from spawnsim.policies.options import OuterOptions
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.state.arithmetic import META, as_memory, as_tensor, new_memory, phantom_memory
from spawnsim.policies.state.layout import assign
from spawnsim.policies.state.outer import FlatFloats, Fragment, OuterSGD, radial_directional_mean

POLL_S = 1e-3  # between two attempts while another task of the rank merges
CHECK_S = 0.25  # longest time between two checks for deaths and for the stop flag
ANSWER_S = 5.0  # longest wait of a checkpoint for answers to the pushes of all ranks: they may be lost
STEPS = 9  # number of latest steps from which a rank takes its step time
# A leaving rank notifies this many of the lowest ranks: the next merging rank is among them, and notifies all others.
# If each leaving rank notified all, 1,000 ranks that end together would send a million messages. The number exceeds the
# ranks of a node, which may die as one.
HEIRS = 32


@dataclass(slots=True)
class Round:
    """The pushes for a fragment since its last merge: weight and difference, by learner."""

    first_s: float = math.inf
    closes_s: float = math.inf
    pushes: dict[int, tuple[float, FlatFloats]] = field(default_factory=dict)


class Syncer:
    """Merges the learners' differences into global weights; independent of the communicator.

    A round of a fragment closes when `quorum` learners have pushed and a grace window has passed, or when all have
    pushed.

    If fewer ranks than the quorum remain, it waits for all of them. `window_s` maps the seconds that the quorum took to
    the length of the grace window. Differences of tensors whose names are `plain` take the plain mean.
    """

    def __init__(
        self,
        fragments: list[Fragment],
        rule: OuterSGD,
        *,
        quorum: int,
        window_s: Callable[[float], float],
        plain: Callable[[str], bool],
    ) -> None:
        self.fragments, self.rule, self.quorum = fragments, rule, quorum
        self.window_s, self.plain = window_s, plain
        self.rounds = [Round() for _ in fragments]

    def push(self, place: int, learner: int, weight: float, delta: FlatFloats, now_s: float) -> None:
        """Store a learner's difference; a second one before the fragment is merged replaces the first."""
        self.rounds[place].pushes[learner] = weight, delta
        self.rounds[place].first_s = min(self.rounds[place].first_s, now_s)

    def merged(self, now_s: float, present: set[int]) -> list[tuple[int, list[int]]]:
        """Merge the fragments that are due; return them, with the learners that contributed to each."""
        found = []
        for place, round_ in enumerate(self.rounds):
            if not round_.pushes or len(round_.pushes) < min(self.quorum, len(present)):
                continue
            if round_.closes_s == math.inf:
                round_.closes_s = now_s + max(self.window_s(now_s - round_.first_s), 0.0)
            if now_s >= round_.closes_s or present <= set(round_.pushes):
                found.append((place, sorted(round_.pushes)))
                self._merge(self.fragments[place], [round_.pushes[rank] for rank in sorted(round_.pushes)])
                self.rounds[place] = Round()
        return found

    def _merge(self, fragment: Fragment, pushes: list[tuple[float, FlatFloats]]) -> None:
        delta = radial_directional_mean(
            [each for _, each in pushes], [weight for weight, _ in pushes], self.plain
        )
        self.rule.step(fragment.weights.rows, fragment.momentum.rows, delta.rows)

    def wake_s(self) -> float:
        return min(round_.closes_s for round_ in self.rounds)


class DecoupledDiLoCoPolicy(GlobalWeightsPolicy):
    """Decoupled DiLoCo: fragments are pushed in turn, merged by quorum and grace, and overwritten on their return.

    Each `average_every`/`fragments` iterations a rank pushes the next fragment's Θ − θ, with weight tokens²/steps, to
    the lowest rank, and continues training. The lowest rank merges a fragment when `quorum` ranks have pushed it and a
    grace window of grace·(overlap·step − seconds that the quorum took) has passed: lengths by the radial mean,
    directions by the directional mean. Each contributing rank receives the new Θ, and overwrites its fragment in its
    next call. No rank waits. Dead ranks are removed if the backend reports deaths (virtual ranks, ULFM). When ranks
    join, all ranks call `recover()`.

    Args:
        average_every: H, iterations in which each fragment has one turn; a multiple of `fragments`.
        quorum: K, number of ranks that must have pushed a fragment before it is merged.
        grace: γ, at least 0: the share of the remaining time that the window takes.
        overlap: τ, iterations within which a merge should complete.
        tokens: tokens per step on this rank.
        plain: maps a tensor's name to whether its differences take the plain mean; by default true for embeddings.
        tag: tag of the messages; two policies on one communicator need two tags.
        how: `timing` and `options.OuterOptions`; P is `fragments`. The authors publish no outer learning rate or
            momentum: the defaults are DiLoCo's.
    """

    paper = "arXiv 2604.21428"
    states = ("average", "healed", "merge")
    newcomers_only = True
    usual = OuterOptions(fragments=24, fragmenter="greedy")
    refused = ("compression", "feedback", "cadence")

    def __init__(
        self,
        average_every: int = 24,
        *,
        quorum: int = 1,
        grace: float = 1.0,
        overlap: int = 2,
        tokens: float = 1.0,
        plain: Callable[[str], bool] = lambda name: "embed" in name,
        tag: int = 7411,
        **how: Any,
    ) -> None:
        if not (quorum >= 1 and grace >= 0 and overlap >= 0 and tokens > 0):
            raise ParameterError(
                f"quorum={quorum!r}, grace={grace!r}, overlap={overlap!r}, tokens={tokens!r}: "
                "give quorum >= 1, grace >= 0, overlap >= 0, tokens > 0"
            )
        super().__init__(average_every, **how)
        self.quorum, self.grace, self.overlap, self.tokens = int(quorum), grace, overlap, float(tokens)
        self.plain, self.tag = plain, tag
        self._learner: Learner | None = None
        # The fragments that this rank has merged, if it was the merging rank, on earlier communicators.
        self.merged: list[Fragment] = []
        self.pushed: dict[int, int] = {}  # by fragment, the iteration of its latest push
        self.steps_s: list[float] = []  # durations of the latest steps
        self.arrived: dict[int, int] = {}  # fragments to copy into the model → number of learners

    def _join(self, comm: Comm, model: torch.nn.Module) -> bool:
        self._leave()
        fresh = super()._join(comm, model)
        self._learner = Learner(self, comm, self.outer.fragments)
        return fresh

    def wanted(self, iteration: int) -> bool:
        return True  # messages are answered in every call

    def turn(
        self, iteration: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, info: Info
    ) -> int:
        learner, group = self._learner, self.outer
        assert learner is not None
        before = learner.nbytes
        learner.step()
        self._take_over(learner)
        healed = 0
        if self.arrived or self.due(iteration):
            live = group.live(model)
            for place, donors in sorted(self.arrived.items()):
                assign(live, group.fragments[place].weights.tensors())
                self.stepped(iteration - 1, info, 0)  # a push may be due in this very call
                info.update(donors=donors, staleness=iteration - self.pushed.get(place, 0))
            self.arrived = {}
            if self.due(iteration):
                place = self.place_at(iteration)
                healed = group.fragments[place].read_difference(live)
                learner.push(place, iteration, self.tokens)
        info["bytes"] = learner.nbytes - before
        return healed

    def _take_over(self, learner: Learner) -> None:
        for place, (body, donors) in learner.take().items():
            self.outer.fragments[place].weights.memory.copy_(as_tensor(body))
            self.arrived[place] = donors

    def due(self, iteration: int) -> bool:
        """Return whether a push is due: no rank waits for it, so a push may be repeated after a recovery."""
        return self.cadence.due(iteration)

    def _leave(self) -> None:
        if self._learner is not None:
            # At a checkpoint no rank leaves. A rank notified of a leave would exclude the sender afterwards.
            self.merged = self._learner.leave(notify=not self._draining)
            self._learner = None

    def state_dict(self) -> dict[str, Any]:
        merged = [fragment.state() for fragment in self.merged]
        known = {"pushed": sorted(self.pushed.items()), "arrived": sorted(self.arrived.items())}
        return {**super().state_dict(), **known, "merged": merged, "steps_s": [*self.steps_s]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.merged = [Fragment.from_state(each) for each in state["merged"]]
        self.pushed = {int(place): int(iteration) for place, iteration in state.get("pushed", ())}
        self.arrived = {int(place): int(donors) for place, donors in state.get("arrived", ())}
        self.steps_s = [float(each) for each in state.get("steps_s", ())]

    def drain(self) -> None:
        """Wait for the answers to all ranks' pushes, and leave; see `SpawnPolicy.drain`."""
        learner = self._learner
        if learner is not None:
            with suppress(WorldError):  # a rank has died: the checkpoint's own calls raise
                learner.comm.Barrier()  # all have pushed
                learner.settle(ANSWER_S)
                self._take_over(learner)
                learner.comm.Barrier()  # the merging rank serves in the background until all have their answers
        super().drain()

    def shutdown(self) -> None:
        """Notify other ranks that this rank pushes and merges no more. Does not wait for them; may be called twice."""
        super().shutdown()
        self._leave()


class Learner:
    """One rank's part in a group: its pushes and their answers; also the syncer, on the lowest rank present."""

    def __init__(self, policy: DecoupledDiLoCoPolicy, comm: Comm, fragments: list[Fragment]) -> None:
        self._policy, self._fragments, self.comm = policy, fragments, comm
        self.rank, self.present = comm.Get_rank(), set(range(comm.Get_size()))
        self.endpoint = Endpoint(comm, policy.tag)
        far = fragments[0].weights.device == META
        self.endpoint.allocate = phantom_memory if far else new_memory
        self.engine = ProgressEngine(
            self.endpoint, self, poll_interval_s=POLL_S, background_wait_s=CHECK_S, death_check_s=CHECK_S
        )
        self._unanswered: set[int] = set()  # fragments
        self.inbox: dict[int, tuple[Any, int]] = {}  # by fragment: new weights, number of merged learners
        self._stepped_s = math.nan  # end of the latest step
        self._left: set[int] = set()  # ranks that announced their leave
        self._syncer: Syncer | None = None
        self._elect()

    @property
    def nbytes(self) -> int:
        """Bytes sent and received so far."""
        return self.endpoint.counts["bytes_sent"] + self.endpoint.counts["bytes_received"]

    def _elect(self) -> None:
        """Merge from now on if this is the lowest rank, starting from its copy of the global weights."""
        if self._syncer is None and self.rank == min(self.present):
            policy = self._policy
            own = policy.merged or [fragment.copy() for fragment in self._fragments]
            self._syncer = Syncer(
                own, policy.rule, quorum=policy.quorum, window_s=self._window_s, plain=policy.plain
            )
            self.engine.run_in_background()
            if self._left:  # not all ranks know
                handover = Message(Kind.HANDOVER, 0, meta=sorted(self._left))
                self.endpoint.send_all((rank, handover) for rank in self._others())

    def _others(self) -> list[int]:
        return sorted(self.present - {self.rank})

    def _without(self, left: set[int]) -> None:
        self._left |= left - {self.rank}
        self.present -= self._left

    def _window_s(self, quorum_s: float) -> float:
        steps_s = self._policy.steps_s
        return self._policy.grace * (self._policy.overlap * (median(steps_s) if steps_s else 0.0) - quorum_s)

    def step(self) -> None:
        """Record a training step, and handle arrived messages."""
        now_s, before_s = self.comm.clock.now(), self._stepped_s
        if not math.isnan(before_s):
            self._policy.steps_s = [*self._policy.steps_s[1 - STEPS :], now_s - before_s]
        self._stepped_s = now_s
        self.engine.progress()

    def take(self) -> dict[int, tuple[Any, int]]:
        with self.engine.hold():
            taken, self.inbox = self.inbox, {}
        self._unanswered -= set(taken)
        return taken

    def settle(self, timeout_s: float) -> None:
        """Wait until this rank's pushes are answered, for at most `timeout_s`."""
        self.engine.drive(lambda: self._unanswered <= self.inbox.keys(), timeout_s)

    def push(self, place: int, iteration: int, tokens: float) -> None:
        """Send a fragment's difference to the merging rank, unless its previous answer may still be under way."""
        if place in self._unanswered:  # skip once: the answer may be lost with the merging rank
            self._unanswered.discard(place)
            return
        self._unanswered.add(place)
        steps = max(iteration - self._policy.pushed.get(place, 0), 1)
        self._policy.pushed[place] = iteration
        delta = self._fragments[place].delta.memory
        body = as_memory(delta.clone()) if delta.device != META else phantom_memory(delta.numel())
        weight = (tokens * steps) ** 2 / steps
        message = Message(Kind.PART, 0, iteration, part=place, value=weight, body=body)
        with self.engine.hold():
            self.endpoint.send(min(self.present), message)
        self.engine.progress()

    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        self.present -= dead
        for source, message in arrived:
            if message.kind is Kind.LEAVE:
                self._without({source})
            elif message.kind is Kind.HANDOVER:
                self._without(set(message.meta))
            elif message.kind is Kind.DOWN and not message.damaged:
                self.inbox[message.part] = message.body, int(message.value)
            elif message.kind is Kind.PART and not message.damaged and self._syncer is not None:
                delta = self._syncer.fragments[message.part].weights.over(as_tensor(message.body))
                self._syncer.push(message.part, source, message.value, delta, now_s)
        self._elect()
        if self._syncer is not None:
            for place, learners in self._syncer.merged(now_s, self.present):
                self._answer(place, learners)

    def _answer(self, place: int, learners: list[int]) -> None:
        assert self._syncer is not None
        memory = self._syncer.fragments[place].weights.memory
        for rank in learners:
            body = as_memory(memory.clone()) if memory.device != META else phantom_memory(memory.numel())
            self.endpoint.send(rank, Message(Kind.DOWN, 0, part=place, value=len(learners), body=body))
        world = self.comm.Get_group().members
        self.comm.record.event("merge", fragment=place, learners=[world[rank] for rank in learners])

    def wake_s(self) -> float:
        return math.inf if self._syncer is None else self._syncer.wake_s()

    def leave(self, *, notify: bool) -> list[Fragment]:
        """Stop, and notify the possible successors if `notify`; return the fragments that this rank has merged."""
        heirs = self._others()[:HEIRS] if notify else []
        # Revoked: the communicator has ended, and all survivors know.
        with suppress(WorldError), self.engine.hold():
            self.endpoint.send_all((rank, Message(Kind.LEAVE, 0)) for rank in heirs)
        self.engine.stop(1.0)
        return [] if self._syncer is None else self._syncer.fragments
