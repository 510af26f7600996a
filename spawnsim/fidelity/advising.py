"""Which policy, and how often, on a cluster: cadences swept in timing alone, ranked with their intervals.

Each choice runs for a few rounds on virtual ranks without data: averaging over columns, the others as ordinary ranks
with models on torch's meta device. Goodput is the share of perfect training that is left, all ranks computing at the
nominal step without a break:

    goodput = mean over ranks of (steps · step_s / seconds) / (1 + lost / mtbf)

`lost` are the rank-seconds that the death of one rank costs: half a round of its own work, the restart, and the
detection, in which all others stand still where the policy meets in step. A failure of the whole job costs half a
round, the detection and the restart of all. This is a closed form, to first order in 1/mtbf, since a simulated minute
has no failures. What a cadence does to convergence is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, cast

import numpy as np

from spawnsim import columnar
from spawnsim.errors import ParameterError
from spawnsim.run.virtual import run
from spawnsim.units import text_table
from spawnsim.virtual.compute import (
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
from spawnsim.virtual.network import Changing, Hockney, HomeLinks, Link, LogGP, Network, Piecewise, Tcp
from spawnsim.virtual.platform import Platform

POLICIES = ("average", "selective", "groups")
IN_STEP = ("average",)  # all ranks meet: a death holds all of them up
LIVE_RANKS = 128  # beyond, ordinary virtual ranks take minutes for each choice
ALIKE = 0.01  # goodputs that differ by less are not told apart, whatever their intervals
MODELS = ("as given", "other costs")


@dataclass(frozen=True)
class Failures:
    """How often ranks and jobs fail, and what a failure costs; seconds, inf: never.

    Attributes:
        mtbf_s: mean time between failures of one rank.
        job_mtbf_s: of the job as a whole, whatever its size (software, storage).
        detection_s: until the others go on without the rank.
        restart_s: until the rank, or the job, is back.
    """

    mtbf_s: float = math.inf
    job_mtbf_s: float = math.inf
    detection_s: float = 30.0
    restart_s: float = 300.0

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.job_mtbf_s > 0 and self.detection_s >= 0 and self.restart_s >= 0):
            raise ParameterError(f"{self}: give times above 0 between failures, and costs of at least 0 s")

    def share(self, ranks: int, round_s: float, *, in_step: bool) -> float:
        """Return the share of goodput that failures leave.

        Args:
            ranks: of the job.
            round_s: seconds from one exchange to the next.
            in_step: whether all ranks wait while a death is noticed.

        Returns:
            From 0 to 1.
        """
        lost_s = round_s / 2 + self.restart_s + self.detection_s * (ranks if in_step else 1)
        whole_s = round_s / 2 + self.restart_s + self.detection_s
        return 1.0 / (1.0 + lost_s / self.mtbf_s + whole_s / self.job_mtbf_s)


@dataclass(frozen=True)
class Case:
    """What is asked about: a job on a cluster.

    Attributes:
        platform: the cluster.
        ranks: of the job.
        model_nbytes: bytes of one model.
        step_s: seconds of a compute step.
        stragglers: what stretches steps.
        failures: what is lost by failures.
        rounds: simulated, of each choice.
    """

    platform: Platform
    ranks: int
    model_nbytes: int
    step_s: float
    stragglers: tuple[Straggler, ...] = ()
    failures: Failures = field(default_factory=Failures)
    rounds: int = 6

    def __post_init__(self) -> None:
        if self.ranks < 2 or self.model_nbytes < 4 or not 0 < self.step_s < math.inf or self.rounds < 2:
            raise ParameterError(
                f"{self.ranks} ranks, {self.model_nbytes} bytes, steps of {self.step_s} s, {self.rounds} rounds: "
                "give at least 2 ranks, 4 bytes, a duration above 0 and 2 rounds"
            )
        self.platform.check(self.ranks)


@dataclass(frozen=True)
class Choice:
    """A policy, its cadence, and how many times shorter compression makes what travels."""

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


@dataclass(frozen=True)
class Sample:
    """One run: goodput and utilisation (0 to 1), seconds a round beyond its steps, bytes a step of one rank."""

    goodput: float
    utilisation: float
    exchange_s: float
    nbytes: float


@dataclass(frozen=True)
class Row:
    """A choice, judged over seeds and network models.

    Attributes:
        choice: what is judged.
        goodput: the median.
        low: the least goodput of a run.
        high: the largest.
        utilisation: the median share of time spent computing, failures aside.
        exchange_s: the median of what a round takes beyond its steps, per rank.
        nbytes: sent by a rank for each step.
        alike: ranks in the list (from 1) of those that cannot be told from this one.
        worse: goodput under each setting that is twice as bad, by name.
    """

    choice: Choice
    goodput: float
    low: float
    high: float
    utilisation: float
    exchange_s: float
    nbytes: float
    alike: tuple[int, ...] = ()
    worse: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """Choices by falling goodput; for each policy the cadence from which on utilisation meets the target."""

    rows: tuple[Row, ...]
    break_even: dict[str, int | None]
    target: float
    models: tuple[str, ...]
    seeds: int

    def ranking(self, setting: str = "") -> list[int]:
        """Return places in `rows` by falling goodput under a setting that is worse; as given if "" ."""
        value = [row.worse[setting] if setting else row.goodput for row in self.rows]
        return sorted(range(len(value)), key=lambda place: (-value[place], place))

    def changes(self, setting: str) -> list[tuple[Choice, Choice]]:
        """Return pairs that change places under a setting by more than can be told apart: now better, before better."""
        found = []
        for place, row in enumerate(self.rows):
            for other in self.rows[place + 1 :]:
                ahead = other.worse[setting] > row.worse[setting] * (1 + ALIKE)
                if ahead and row.low > other.high:
                    found.append((other.choice, row.choice))
        return found


def advise(
    case: Case, choices: Sequence[Choice], *, seeds: Sequence[int] = (0, 1, 2), target: float = 0.9
) -> Advice:
    """Simulate each choice over seeds and two network models, and rank them.

    Args:
        case: the job and its cluster.
        choices: what to compare.
        seeds: of the runs; without stragglers one is enough, and one is run.
        target: utilisation that a break-even cadence must reach, between 0 and 1.

    Returns:
        The ranking.

    Raises:
        ParameterError: no choices, a target that is no share, or more ranks than a policy's simulation can take.
    """
    if not choices or not 0 < target < 1:
        raise ParameterError(
            f"{len(choices)} choices, target {target}: give a choice, and a share between 0 and 1"
        )
    networks = {MODELS[0]: case.platform.network}
    other = other_costs(case.platform.network)
    if other is not None:
        networks[MODELS[1]] = other
    if not case.stragglers and all(choice.policy == "average" for choice in choices):
        seeds = seeds[:1]  # nothing is drawn
    cases = [replace(case, platform=replace(case.platform, network=network)) for network in networks.values()]
    settings = {name: make(case) for name, make in WORSE.items()}
    rows = []
    for choice in choices:
        samples = [simulate(each, choice, seed) for each in cases for seed in seeds]
        row = _row(choice, samples)
        for name, setting in settings.items():
            # Against the run of the same seed and network: the median is of all of them.
            less = (
                1.0 if setting == case else simulate(setting, choice, seeds[0]).goodput / samples[0].goodput
            )
            row.worse[name] = row.goodput * less
        rows.append(row)
    rows.sort(key=lambda row: (-row.goodput, row.choice.every, row.choice.policy))
    rows = [replace(row, alike=_alike(rows, place)) for place, row in enumerate(rows)]
    even = {
        name: _break_even(case, rows, name, target) for name in dict.fromkeys(each.policy for each in choices)
    }
    return Advice(tuple(rows), even, target, tuple(networks), len(seeds))


def _row(choice: Choice, samples: Sequence[Sample]) -> Row:
    goodputs = [sample.goodput for sample in samples]
    middle = {
        name: median(getattr(each, name) for each in samples)
        for name in ("utilisation", "exchange_s", "nbytes")
    }
    return Row(choice, median(goodputs), min(goodputs), max(goodputs), **middle)


def _alike(rows: Sequence[Row], place: int) -> tuple[int, ...]:
    own = rows[place]
    return tuple(
        number
        for number, row in enumerate(rows, start=1)
        if number != place + 1
        and ((row.low <= own.high and own.low <= row.high) or abs(row.goodput / own.goodput - 1) < ALIKE)
    )


def _break_even(case: Case, rows: Sequence[Row], policy: str, target: float) -> int | None:
    """Return the least cadence of the target, uncompressed; what a round waits is linear between simulated cadences."""
    own = sorted(
        (r.choice.every, r.utilisation) for r in rows if r.choice.policy == policy and r.choice.ratio == 1
    )
    if not own:
        return None
    every = np.array([each for each, _ in own], dtype=np.float64)
    # What is not computing in a round, in steps: utilisation = H / (H + waits).
    waits = every * (1.0 / np.array([used for _, used in own]) - 1.0)
    # Beyond the simulated cadences: an exchange takes the same time, but the slowest rank's delay grows with the round.
    slope = 0.0
    if case.stragglers:
        slope = max((waits[-1] - waits[-2]) / (every[-1] - every[-2]), 0.0) if len(own) > 1 else math.inf

    def reaches(cadence: int) -> bool:
        wait = float(np.interp(cadence, every, waits))
        wait += slope * (cadence - every[-1]) if cadence > every[-1] else 0.0
        return cadence >= target * (cadence + wait)

    if reaches(1):
        return 1
    low, high = 1, 1
    while not reaches(high):
        low, high = high, 2 * high
        if high > 1_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


# ------------------------------------------------------------------------------------------------------- simulation
def simulate(case: Case, choice: Choice, seed: int) -> Sample:
    """Run a choice for the case's rounds, and say what was left of the time.

    Args:
        case: the job and its cluster.
        choice: the policy and its cadence.
        seed: of the run.

    Returns:
        What was measured, with the cost of failures added.
    """
    by_columns = choice.policy == "average" or (choice.policy == "selective" and case.ranks > LIVE_RANKS)
    if not by_columns and case.ranks > LIVE_RANKS:
        raise ParameterError(
            f"policy {choice.policy!r} is simulated on at most {LIVE_RANKS} ranks: ask for fewer, or for average and "
            "selective, which have a form over columns"
        )
    computed_s, ends_s, nbytes = (_over_columns if by_columns else _on_ranks)(case, choice, seed)
    steps = case.rounds * choice.every
    speed = float(np.mean(steps * case.step_s / ends_s))
    wait_s = float(np.mean(ends_s - computed_s)) / case.rounds
    left = case.failures.share(
        case.ranks, float(ends_s.mean()) / case.rounds, in_step=choice.policy in IN_STEP
    )
    return Sample(speed * left, float(computed_s.sum() / ends_s.sum()), wait_s, nbytes / (case.ranks * steps))


def policy_of(choice: Choice, case: Case) -> Any:
    """Return a choice's policy."""
    from spawnsim import policies
    from spawnsim.policies.rules.cadence import When

    every = choice.every
    # A round ends with its last step, and a run with its last round.
    cadence = When(lambda iteration: (iteration + 1) % every == 0)
    if choice.policy == "average":
        return policies.AverageAllPolicy(every, cadence=cadence)
    if choice.policy == "selective":
        return policies.AsyncSelectiveAveragingPolicy(
            None, every, cadence=cadence, replacement_ratio=0.2, cooldown=0
        )
    return policies.DecentralizedAveragingPolicy(every, cadence=cadence, target_group_size=min(4, case.ranks))


def _travelling(case: Case, choice: Choice) -> int:
    return max(round(case.model_nbytes / choice.ratio / 4) * 4, 4)


def _over_columns(case: Case, choice: Choice, seed: int) -> tuple[Any, Any, float]:
    """Return seconds computed by each rank, seconds until it ended, and the bytes of all."""
    computed_s, left_s = np.zeros(case.ranks), np.zeros(case.ranks)

    def note(told: columnar.Round) -> None:
        computed_s[told.members] += told.entered_s - left_s[told.members]
        left_s[told.members] = told.left_s

    found = columnar.run(
        policy_of(choice, case),
        ranks=case.ranks,
        iterations=case.rounds * choice.every,
        model_nbytes=_travelling(case, choice),
        platform=case.platform,
        stragglers=case.stragglers,
        compute=case.step_s,
        seed=seed,
        sample=0,
        on_round=note,
    )
    return computed_s, left_s, float(found.totals["bytes"])


def _on_ranks(case: Case, choice: Choice, seed: int) -> tuple[Any, Any, float]:
    from spawnsim.workloads.mlp import without_data

    steps, numbers = case.rounds * choice.every, _travelling(case, choice) // 4

    def main(comm: Any) -> None:
        model, optimizer = without_data(numbers)
        policy, computed_s = policy_of(choice, case), 0.0
        for step in range(steps):
            with comm.compute() as block:
                metric = float(comm.rng("metric").normal())
            computed_s += block.seconds
            model, optimizer, _ = policy(step, model, optimizer, local_metric=metric, group=comm)
        comm.record(computed_s=computed_s, end_s=comm.clock.now())
        policy.shutdown()

    found = run(
        main,
        ranks=case.ranks,
        platform=case.platform,
        stragglers=case.stragglers,
        compute=case.step_s,
        seed=seed,
        deadline_s=math.inf,
    )
    return found.table["computed_s"], found.table["end_s"], float(found.totals["bytes"])


# ----------------------------------------------------------------------------------------------- other circumstances
def other_costs(network: Network) -> Network | None:
    """Return the network with the other cost model of the same wire, or None if it has no links of either model.

    Hockney's latency becomes LogGP's L + 2o, in equal parts, and g is one of them; LogGP's L + 2o becomes Hockney's
    latency, whose messages cost no processor.
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
    """Return a network, or a part of one, with each plain link changed."""
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
    """Return the straggler with twice the spread, or twice the time beyond the nominal step."""
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
    "stragglers x 2": lambda case: replace(case, stragglers=tuple(map(_worse_straggler, case.stragglers))),
    "failures x 2": _more_failures,
}


@dataclass(frozen=True)
class Budget:
    """What may be spent: `amount` of node-hours, or of money at a `price` per node-hour.

    Attributes:
        amount: above 0.
        ranks_per_node: a node that is begun is paid.
        price: of a node-hour; None: the amount is node-hours.
    """

    amount: float
    ranks_per_node: int
    price: float | None = None

    def __post_init__(self) -> None:
        price = 1.0 if self.price is None else self.price
        if not (0 < self.amount < math.inf and 0 < price < math.inf and self.ranks_per_node >= 1):
            raise ParameterError(f"{self}: give an amount, a price and ranks of a node above 0")

    def hours(self, ranks: int) -> float:
        """Return how long so many ranks may run."""
        nodes = -(-ranks // self.ranks_per_node)
        return self.amount / (self.price or 1.0) / nodes

    def steps(self, case: Case, goodput: float) -> float:
        """Return how many steps it pays: hours over what a step takes, as far as they are not lost."""
        return 3600.0 * self.hours(case.ranks) / case.step_s * goodput


# -------------------------------------------------------------------------------------------------------------- words
def report(advice: Advice) -> str:
    """Return the ranking as lines of text.

    Args:
        advice: what `advise` found.

    Returns:
        A table, and a sentence for each thing to know.
    """
    head = ("", "policy", "goodput", "interval", "computing", "a round waits", "sent a step", *WORSE)
    lines = [
        (
            f"{place}",
            str(row.choice),
            f"{row.goodput:.1%}",
            f"{row.low:.1%} to {row.high:.1%}",
            f"{row.utilisation:.1%}",
            f"{row.exchange_s:.3g} s",
            f"{row.nbytes / 1e6:.3g} MB",
            *(f"{row.worse[name]:.1%}" for name in WORSE),
        )
        for place, row in enumerate(advice.rows, start=1)
    ]
    return "\n".join([text_table(head, lines, left=2), *_sentences(advice)])


def _sentences(advice: Advice) -> Iterator[str]:
    yield f"intervals: least to largest of {advice.seeds} seeds x {len(advice.models)} network models"
    for group in _groups(advice.rows):
        yield f"cannot be told apart: {', '.join(map(str, group))}"
    for policy, even in advice.break_even.items():
        what = f"every {even} steps or less often" if even else "at no cadence: ranks wait for the slow ones"
        yield f"{policy}: computes {advice.target:.0%} of the time {what}"
    for name in WORSE:
        for now, before in advice.changes(name)[:3]:
            yield f"{name}: {now} overtakes {before}"
    yield "timing alone: how a cadence changes convergence is not in these figures"


def _groups(rows: Sequence[Row]) -> Iterable[tuple[int, ...]]:
    """Return places of rows that are all alike, from each place on, without groups that lie in another."""
    last = 0
    for place, row in enumerate(rows, start=1):
        end = place
        while end < len(rows) and all(end + 1 in rows[at - 1].alike for at in range(place, end + 1)):
            end += 1
        if row.alike and end > max(place, last):
            last = end
            yield tuple(range(place, end + 1))
