"""The goodput of a policy on a cluster: a few rounds in timing alone, and the cost of failures in closed form.

Averaging runs over columns. The other policies run as ordinary ranks with models on torch's meta device: the policies
themselves, which wait, skip and send as they do with data. The initial broadcast of one rank's model, in policies
that have one, does not count.
Goodput is the remaining share of perfect training, in which all ranks compute at the nominal step without a break:

    goodput = sum over ranks of steps · step_s / sum of their seconds / (1 + lost / mtbf)

`lost` are the rank-seconds that the death of one rank costs: half the time between two exchanges of its work, the
restart, and the detection. During detection all other ranks stand still if the policy synchronises them, or if the
dead rank is the server. A failure of the whole job costs as much work, and the detection and the restart of all
ranks. This is a closed form, to first order in 1/mtbf, since a simulated minute has no failures.

A policy that lets ranks continue while models travel skips an exchange if the last one is not complete. Such a policy
must not win by doing nothing, so each run also reports how often ranks did exchange.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from spawnsim import columnar
from spawnsim.errors import ParameterError
from spawnsim.models.compute import (
    Bimodal,
    Exponential,
    Gamma,
    Lognormal,
    Markov,
    Pareto,
    Slow,
    SlowRank,
    Speed,
    Straggler,
)
from spawnsim.models.network import Changing, Hockney, HomeLinks, Link, LogGP, Network, Piecewise, Tcp
from spawnsim.models.platform import Platform
from spawnsim.run.virtual import run

POLICIES = ("average", "streaming", "gossip", "server", "selective", "groups", "clock", "pairs", "windows")
# All ranks meet, or wait for a rank that waits for a dead rank: a death holds up all of them.
IN_STEP = ("average", "streaming", "gossip")
STEADY = (*IN_STEP, "server")  # no random numbers
JOINING = ("streaming", "gossip", "server")  # ranks synchronise their models in their first call
REPLACING = ("selective", "windows")  # only the worst ranks exchange
REPLACED = 0.2
# Streaming: fragments take turns, and each is applied so many steps after it was sent, or at the next turn.
FRAGMENTS, OVERLAP = 4, 5
# The other policies let ranks continue while models travel.
WAITING = ("average", "streaming", "gossip", "server", "groups", "windows")
LIVE_RANKS = 128  # beyond, ordinary virtual ranks take minutes for each choice
MOST_NBYTES = 10**18  # upper limit of a model
MOST_STEPS = 1000  # upper limit of a run that is extended for exchanges that take many steps
# Measured core seconds of a simulation, correct to a factor of three.
RANK_STEP_S, RANK_ROUND_S = 2e-5, 5e-3  # per step and per exchange of a rank
COLUMN_STEP_S, COLUMN_DRAWN_S, COLUMN_ROUND_S = 3e-9, 1e-7, 2e-6  # the same over columns; for a step's draw
PART_S, PART_NBYTES = 4e-4, 2**19  # for a part that a group sends
SERVED_S = 5e-3  # per virtual second in which ranks poll for their server's answer


@dataclass(frozen=True)
class Failures:
    """How often ranks and jobs fail, and the cost of a failure; all in seconds, inf: never.

    Attributes:
        mtbf_s: mean time between failures of one rank.
        job_mtbf_s: mean time between failures of the whole job, whatever its size (software, storage).
        detection_s: time until the other ranks continue without the dead rank.
        restart_s: time until the rank, or the job, is back.
    """

    mtbf_s: float = math.inf
    job_mtbf_s: float = math.inf
    detection_s: float = 30.0
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.job_mtbf_s > 0 and self.detection_s >= 0 and self.restart_s >= 0):
            raise ParameterError(f"{self}: give times above 0 between failures, and costs of at least 0 s")

    def share(self, round_s: float, *, held: float) -> float:
        """Return the share of goodput that remains after failures.

        Args:
            round_s: seconds from one exchange to the next.
            held: ranks that stand still during detection, including the dead one; the average over all ranks that may
                die.

        Returns:
            A share from 0 to 1.
        """
        lost_s = round_s / 2 + self.restart_s + self.detection_s * held
        whole_s = round_s / 2 + self.restart_s + self.detection_s
        return 1.0 / (1.0 + lost_s / self.mtbf_s + whole_s / self.job_mtbf_s)


@dataclass(frozen=True)
class Case:
    """A job on a cluster.

    Attributes:
        platform: the cluster.
        ranks: number of ranks of the job.
        model_nbytes: bytes of one model.
        step_s: seconds of a compute step.
        stragglers: the stragglers that stretch steps.
        failures: how often ranks and jobs fail, and the cost.
        rounds: number of simulated rounds for each choice.
    """

    platform: Platform
    ranks: int
    model_nbytes: int
    step_s: float
    stragglers: tuple[Straggler, ...] = ()
    failures: Failures = field(default_factory=Failures)
    rounds: int = 4

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.model_nbytes < 4 or not 0 < self.step_s < math.inf or self.rounds < 2:
            raise ParameterError(
                f"{self.ranks} ranks, {self.model_nbytes} bytes, steps of {self.step_s} s, {self.rounds} rounds: "
                "give at least 2 ranks, 4 bytes, a duration above 0 and 2 rounds"
            )
        if self.model_nbytes > MOST_NBYTES:
            raise ParameterError(f"a model of {self.model_nbytes:.3g} bytes: give at most {MOST_NBYTES:.0g}")
        self.platform.check(self.ranks)


@dataclass(frozen=True)
class Choice:
    """A policy, its cadence, and the compression ratio of the models it sends."""

    policy: str
    every: int
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES or self.every < 1 or not self.ratio >= 1:
            raise ParameterError(
                f"{self}: policies are {', '.join(POLICIES)}; exchange every 1 or more steps, compressed by 1 or more"
            )

    def __str__(self) -> str:
        return f"{self.policy}, every {self.every}" + f", {self.ratio:g} x smaller" * (self.ratio != 1)


class Timed(NamedTuple):
    """A run: computing seconds and total seconds of each rank; bytes of all ranks; steps; steps between exchanges."""

    computed_s: np.ndarray[Any, np.dtype[np.float64]]
    ends_s: np.ndarray[Any, np.dtype[np.float64]]
    nbytes: float
    steps: int
    every: float


@dataclass(frozen=True)
class Sample:
    """The results of one run.

    Attributes:
        goodput: the share of perfect training, from 0 to 1.
        utilisation: the share of time spent computing, without failures.
        exchange_s: seconds of a round beyond its steps, the mean of the ranks.
        nbytes: bytes that a rank sends per step.
        every: actual steps from one exchange of a rank to its next.
    """

    goodput: float
    utilisation: float
    exchange_s: float
    nbytes: float
    every: float


# ------------------------------------------------------------------------------------------------------- simulation
def simulate(case: Case, choice: Choice, seed: int) -> Sample:
    """Run a choice for the case's rounds, and return its goodput and related figures.

    Raises:
        ParameterError: more ranks than the policy's simulation can take.
    """
    return judged(case, choice, timed(case, choice, seed))


def timed(case: Case, choice: Choice, seed: int) -> Timed:
    """Run a choice; the case's failures have no effect. Arguments and errors are as in `simulate`."""
    return (_over_columns if _by_columns(case, choice) else _on_ranks)(case, choice, seed)


def judged(case: Case, choice: Choice, seen: Timed) -> Sample:
    """Return the results of a run, including the cost of the case's failures."""
    speed = len(seen.ends_s) * seen.steps * case.step_s / float(seen.ends_s.sum())
    wait_s = float(np.mean(seen.ends_s - seen.computed_s)) * choice.every / seen.steps
    between_s = float(seen.ends_s.mean()) / seen.steps * seen.every
    left = case.failures.share(between_s, held=_held(choice, case.ranks))
    used = float(seen.computed_s.sum() / seen.ends_s.sum())
    return Sample(speed * left, used, wait_s, seen.nbytes / (case.ranks * seen.steps), seen.every)


def _held(choice: Choice, ranks: int) -> float:
    if choice.policy in IN_STEP:
        return ranks
    # One death in `ranks` is the server's, and all ranks wait for the server.
    return 2 - 1 / ranks if choice.policy == "server" else 1


def policy_of(choice: Choice, case: Case, *, first: int = 1, blocks: int = FRAGMENTS) -> Any:
    """Return a choice's policy.

    Args:
        choice: the policy and its cadence.
        case: the job.
        first: iteration number of the first step; a round ends with its last step, and a run with its last round.
        blocks: number of blocks of the model: the upper limit of fragments.
    """
    from spawnsim import policies
    from spawnsim.policies.rules.cadence import When

    every = choice.every
    cadence = When(lambda iteration: (iteration + 1 - first) % every == 0)
    if choice.policy == "average":
        return policies.AverageAllPolicy(every, cadence=cadence)
    if choice.policy == "streaming":
        count = fragments(every, blocks)
        overlap = min(every // count, OVERLAP, every - 1)
        return policies.StreamingDiLoCoPolicy(every, fragments=count, overlap=overlap, compression=None)
    if choice.policy == "gossip":
        return policies.GossipPolicy(every, graph=policies.graphs.one_peer_exponential, cadence=cadence)
    if choice.policy == "server":
        rule = policies.ServerRule(size=case.ranks, delayed=True)
        return policies.AsyncServerPolicy(policies.ServerOptions(rule), steps=every, patience_s=1e6)
    if choice.policy in REPLACING:
        how: dict[str, Any] = {"cadence": cadence, "replacement_ratio": REPLACED, "cooldown": 0}
        if choice.policy == "selective":
            return policies.AsyncSelectiveAveragingPolicy(None, every, **how)
        return policies.OneSidedSelectiveAveragingPolicy(
            None, None, every, replacement_mode="worst_ratio", **how
        )
    if choice.policy == "groups":
        return policies.DecentralizedAveragingPolicy(
            every, cadence=cadence, target_group_size=min(4, case.ranks)
        )
    # By the clock, in periods of `every` nominal steps. No rank dies here: a slow rank is waited for.
    peers = "all" if choice.policy == "clock" else "random"
    return policies.AsyncModelAveragePolicy(peers, 1e3 * every * case.step_s, background=True, patience_s=1e6)


def fragments(every: int, blocks: int) -> int:
    """Return the number of fragments, with equal turns, into which streaming cuts a model of `blocks` blocks."""
    return next(count for count in range(min(FRAGMENTS, blocks), 0, -1) if every % count == 0)


def takes_s(case: Case, choice: Choice) -> float:
    """Return the approximate core seconds of `timed`, correct to a factor of three."""
    rounds, nbytes = case.rounds, _travelling(case, choice)
    if _by_columns(case, choice):
        step_s = COLUMN_STEP_S + COLUMN_DRAWN_S * len(case.stragglers)
        return rounds * (case.ranks * COLUMN_ROUND_S + choice.every * (COLUMN_ROUND_S + case.ranks * step_s))
    lead = math.ceil(math.log2(case.ranks)) * (choice.policy in JOINING)
    steps, each_s = _steps(case, choice) + lead * choice.every, RANK_ROUND_S
    if choice.policy == "groups":
        each_s += 2 * nbytes / PART_NBYTES * PART_S
    if choice.policy == "server":  # all models pass one card
        each_s += case.platform.network.cost(0, case.ranks - 1, nbytes).flight_s * SERVED_S
    return case.ranks * (steps * RANK_STEP_S + (rounds + lead) * each_s)


def _by_columns(case: Case, choice: Choice) -> bool:
    if choice.policy == "average" or (choice.policy == "selective" and case.ranks > LIVE_RANKS):
        return True
    if case.ranks > LIVE_RANKS:
        raise ParameterError(
            f"policy {choice.policy!r} is simulated on at most {LIVE_RANKS} ranks: ask for fewer, or for average and "
            "selective, which have a form over columns"
        )
    return False


def _travelling(case: Case, choice: Choice) -> int:
    return max(round(case.model_nbytes / choice.ratio / 4) * 4, 4)


def _over_columns(case: Case, choice: Choice, seed: int) -> Timed:
    computed_s, left_s = np.zeros(case.ranks), np.zeros(case.ranks)
    steps = case.rounds * choice.every

    def note(done: columnar.Round) -> None:
        computed_s[done.members] += done.entered_s - left_s[done.members]
        left_s[done.members] = done.left_s

    found = columnar.run(
        policy_of(choice, case, first=0),
        ranks=case.ranks,
        iterations=steps,
        model_nbytes=_travelling(case, choice),
        platform=case.platform,
        stragglers=case.stragglers,
        compute=case.step_s,
        seed=seed,
        sample=0,
        on_round=note,
    )
    return Timed(computed_s, left_s, float(found.totals["bytes"]), steps, float(choice.every))


def _on_ranks(case: Case, choice: Choice, seed: int) -> Timed:
    from spawnsim.policies.rules.selection import worst_count
    from spawnsim.workloads.mlp import without_data

    steps, numbers = _steps(case, choice), _travelling(case, choice) // 4
    count = fragments(choice.every, numbers) if choice.policy == "streaming" else 1
    # Rounds before the timed ones: until a slow rank's delay has reached all neighbours, streaming has used up its
    # allowed delay, and workers reach their server one by one, not all at once.
    joins = choice.policy in JOINING
    lead = choice.every * math.ceil(math.log2(case.ranks)) * joins

    def main(comm: Any, last: int) -> None:
        model, optimizer = without_data(numbers, blocks=count)
        policy, began_s, computed_s, exchanges = policy_of(choice, case, blocks=count), 0.0, 0.0, 0
        if joins:
            policy(0, model, optimizer, group=comm)
        for step in range(1, last + 1):
            with comm.compute() as block:
                metric = float(comm.rng("metric").normal())
            computed_s += block.seconds
            model, optimizer, info = policy(step, model, optimizer, local_metric=metric, group=comm)
            exchanges += info["is_replaced"] or info["averaged_this_iteration"]
            if step == lead:
                began_s, computed_s, exchanges = comm.clock.now(), 0.0, 0
        comm.record(computed_s=computed_s, seconds=comm.clock.now() - began_s, exchanges=exchanges)
        # Only the server policy shuts down: a shutdown waits for models in flight, for which training would not have
        # waited.
        if choice.policy == "server":
            policy.shutdown()

    def ran(last: int) -> Any:
        return run(
            main,
            ranks=case.ranks,
            platform=case.platform,
            stragglers=case.stragglers,
            compute=case.step_s,
            seed=seed,
            deadline_s=math.inf,
            parameters={"last": last},
        )

    found = ran(lead + steps)
    nbytes = float(found.totals["bytes"])
    if joins:  # the initial synchronisation is not training
        nbytes = (nbytes - float(ran(0).totals["bytes"])) * steps / (lead + steps)
    share = worst_count(case.ranks, REPLACED) / case.ranks if choice.policy in REPLACING else float(count)
    # Plus one, for an exchange that the end of the run may have cut off: if a rank never exchanged, its exchanges
    # are at least as far apart as the run is long.
    exchanges = float(np.mean(found.table["exchanges"])) / share + 1.0
    every = max(steps / exchanges, float(choice.every))
    return Timed(found.table["computed_s"], found.table["seconds"], nbytes, steps, every)


def _steps(case: Case, choice: Choice) -> int:
    """Return the steps of a run: the case's rounds, or more if an exchange takes longer than a round."""
    asked = case.rounds * choice.every
    if choice.policy in WAITING:
        return asked
    cost = case.platform.network.cost(0, case.ranks - 1, _travelling(case, choice))
    # A mean goes up and down a tree; models of several ranks pass one NIC one after the other.
    exchange_s = 2 * math.log2(case.ranks) * (cost.flight_s + cost.receive_s)
    return max(asked, min(math.ceil(case.rounds * exchange_s / case.step_s), MOST_STEPS))


# ----------------------------------------------------------------------------------------------- other circumstances
def other_costs(network: Network) -> Network | None:
    """Return the network with the other cost model for the same wires, or None if it has no links of either model.

    Hockney's latency becomes LogGP's L + 2o, in three equal parts, and g equals one part. LogGP's L + 2o becomes
    Hockney's latency; Hockney's messages occupy no processor.
    """
    found = _with_links(network, _other_model)
    return None if found == network else found


def _other_model(link: Link) -> Link:
    if isinstance(link, Hockney):
        third_s = link.latency_s / 3
        return LogGP(L=third_s, o=third_s, g=third_s, G=1.0 / link.bandwidth_Bps)
    return Hockney(link.L + 2 * link.o, 1.0 / link.G) if isinstance(link, LogGP) else link


def _half_speed(link: Link) -> Link:
    return link.farther(0.0, 0.5)


def _with_links(value: Any, change: Callable[[Link], Link]) -> Any:
    """Return a network, or a part of one, with `change` applied to each plain link."""
    if isinstance(value, (Hockney, LogGP, Tcp, Changing)):
        return change(cast("Link", value))
    if isinstance(value, Piecewise):
        return Piecewise(tuple((at, _with_links(step, change)) for at, step in value.steps))
    if isinstance(value, tuple):
        return tuple(_with_links(each, change) for each in value)
    names = getattr(value, "__dataclass_fields__", {}) if isinstance(value, Network) else {}
    old = {name: getattr(value, name) for name, each in names.items() if each.init}
    new = {name: _with_links(each, change) for name, each in old.items()}
    changed: Any = {name: each for name, each in new.items() if each != old[name]}
    return replace(value, **changed) if changed else value


def _slower_links(case: Case) -> Case:
    network: Any = case.platform.network
    if isinstance(network, HomeLinks):
        up, down = (tuple(rate / 2 for rate in rates) for rates in (network.up_Bps, network.down_Bps))
        slower: Any = replace(network, up_Bps=up, down_Bps=down)
    else:
        slower = _with_links(network, _half_speed)
    return replace(case, platform=replace(case.platform, network=slower))


def _worse_straggler(straggler: Straggler) -> Straggler:
    """Return the straggler with twice the spread, or with twice the time beyond the nominal step."""
    if isinstance(straggler, (Lognormal, Speed)):
        return replace(straggler, sigma=2 * straggler.sigma)
    if isinstance(straggler, Gamma):
        return Gamma(2 * straggler.variation)
    if isinstance(straggler, Exponential):
        return Exponential(min(2 * straggler.share, 1.0))
    if isinstance(straggler, Pareto):
        return Pareto(1 + (straggler.tail - 1) / 2)
    if isinstance(straggler, (Bimodal, Slow, SlowRank, Markov)):
        return replace(straggler, slowdown=1 + 2 * (straggler.slowdown - 1))
    return straggler


def _more_failures(case: Case) -> Case:
    old = case.failures
    return replace(case, failures=replace(old, mtbf_s=old.mtbf_s / 2, job_mtbf_s=old.job_mtbf_s / 2))


WORSE: dict[str, Callable[[Case], Case]] = {
    "half the bandwidth": _slower_links,
    "twice the stragglers": lambda case: replace(
        case, stragglers=tuple(map(_worse_straggler, case.stragglers))
    ),
    "twice the failures": _more_failures,
}
