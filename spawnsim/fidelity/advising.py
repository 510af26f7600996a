"""Which policy, and how often, on a cluster: a sweep of cadences in timing alone, ranked with intervals.

`goodput.py` simulates one choice in one run. This module compares choices: over seeds and two network models; under
lower bandwidth, heavier stragglers or more failures; and by the steps that a small live training needs under each
(`converge`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.fidelity.goodput import (
    LIVE_RANKS,
    STEADY,
    WAITING,
    WORSE,
    Case,
    Choice,
    Sample,
    judged,
    other_costs,
    policy_of,
    takes_s,
    timed,
)
from spawnsim.models.network import Hockney, Switch
from spawnsim.run import run
from spawnsim.units import counted, text_table

ALIKE = 0.01  # goodputs with a smaller relative difference count as equal, whatever their intervals
LATE = 1.5  # exchanges that are rarer than requested by more than this factor are reported
MODELS = ("as given", "other costs")
LONG_S = 60.0  # the caller is warned if all runs together take longer
MOST_S = 86_400.0  # limit in seconds of one core for all runs: a longer request is a typing error


@dataclass(frozen=True)
class Row:
    """The results of a choice over seeds and network models.

    Attributes:
        choice: the choice.
        goodput: the median goodput of the runs.
        low: the least goodput of a run.
        high: the largest goodput of a run.
        utilisation: the median share of time spent computing, without failures.
        exchange_s: the median time of a round beyond its steps, per rank, in seconds.
        nbytes: bytes that a rank sends per step.
        every: the median of the actual steps between a rank's exchanges: more than requested if an exchange takes
            longer than a round and the policy continues without it.
        alike: places in the list (from 1) of the choices that are indistinguishable from this one.
        worse: goodput under each worse setting, by name.
        worse_every: `every` under each worse setting.
    """

    choice: Choice
    goodput: float
    low: float
    high: float
    utilisation: float
    exchange_s: float
    nbytes: float
    every: float
    alike: tuple[int, ...] = ()
    worse: dict[str, float] = field(default_factory=dict)
    worse_every: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Advice:
    """Choices by decreasing goodput.

    Attributes:
        rows: the choices.
        break_even: the least cadence at which utilisation meets the target, for each policy whose ranks wait (and for
            every policy that is simulated over columns); None: no cadence does.
        target: the target utilisation.
        models: names of the network models.
        seeds: number of seeds per network model.
    """

    rows: tuple[Row, ...]
    break_even: dict[str, int | None]
    target: float
    models: tuple[str, ...]
    seeds: int

    def ranking(self, setting: str = "") -> list[int]:
        """Return indices of `rows` by decreasing goodput under a worse setting; "": under the given setting."""
        value = [row.worse[setting] if setting else row.goodput for row in self.rows]
        return sorted(range(len(value)), key=lambda place: (-value[place], place))

    def careful(self) -> list[int]:
        """Return indices of the choices that meet the target: for each policy, the choice that exchanges most often."""
        # The cost of rarer exchanges in convergence is unknown, so prefer the most frequent ones that meet the
        # target.
        found: dict[str, int] = {}
        meeting = [place for place, row in enumerate(self.rows) if row.utilisation >= self.target]
        for place in sorted(meeting, key=lambda place: (-self.rows[place].every, -place)):
            found[self.rows[place].choice.policy] = place
        return sorted(found.values())

    def changes(self, setting: str) -> list[tuple[Choice, Choice]]:
        """Return pairs that change places under a worse setting, beyond their intervals: now better, better before."""
        found = []
        for place, row in enumerate(self.rows):
            for other in self.rows[place + 1 :]:
                ahead = other.worse[setting] > row.worse[setting] * (1 + ALIKE)
                if ahead and row.low > other.high:
                    found.append((other.choice, row.choice))
        return found


def advise(
    case: Case,
    choices: Sequence[Choice],
    *,
    seeds: Sequence[int] = (0, 1, 2),
    target: float = 0.9,
    noted: Callable[[Sequence[Choice]], Iterable[Choice]] = iter,
    say: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Simulate each choice over seeds and two network models, and rank them.

    Args:
        case: the job and its cluster.
        choices: the choices to compare.
        seeds: seeds of the runs; if no run draws random numbers, only the first is used.
        target: the utilisation that a break-even cadence must reach, between 0 and 1.
        noted: iterates over the choices, and may report progress.
        say: receives a line of text, before anything runs, if the runs will take minutes.

    Returns:
        The ranking.

    Raises:
        ParameterError: no choices, a target that is not between 0 and 1, more ranks than a policy's simulation can
            take, or runs that would take more than a day; nothing ran.
    """
    if not choices or not 0 < target < 1:
        raise ParameterError(
            f"{len(choices)} choices, target {target}: give a choice, and a share between 0 and 1"
        )
    networks = {MODELS[0]: case.platform.network}
    other = other_costs(case.platform.network)
    if other is not None:
        networks[MODELS[1]] = other
    if not case.stragglers and all(choice.policy in STEADY for choice in choices):
        seeds = seeds[:1]  # no run draws random numbers
    cases = [replace(case, platform=replace(case.platform, network=network)) for network in networks.values()]
    settings = {name: make(case) for name, make in WORSE.items()}
    takes = {choice: takes_s(case, choice) for choice in choices}
    runs = len(cases) * len(seeds) + len(settings)
    require_short(takes, runs, case.ranks)
    if runs * sum(takes.values()) > LONG_S:
        say(_duration_note(takes, runs))
    rows = [_judged(cases, choice, seeds, settings) for choice in noted(choices)]
    policies = dict.fromkeys(each.policy for each in choices)
    rows.sort(key=lambda row: (-row.goodput, row.choice.every, row.choice.policy))
    rows = [replace(row, alike=_alike(rows, place)) for place, row in enumerate(rows)]
    waiting = [name for name in policies if name in WAITING or case.ranks > LIVE_RANKS]
    even = {name: _break_even(case, rows, name, target) for name in waiting}
    return Advice(tuple(rows), even, target, tuple(networks), len(seeds))


def _duration_note(takes: Mapping[Choice, float], runs: int) -> str:
    """Return a line with the time of all runs, and with the policies that take most of it."""
    whole_s, shares = runs * sum(takes.values()), dict[str, float]()
    for choice, each_s in takes.items():
        shares[choice.policy] = shares.get(choice.policy, 0.0) + runs * each_s / whole_s
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    most = ", ".join(f"{name} {share:.0%}" for name, share in ranked if share > 0.1)
    return f"about {whole_s / 60:.0f} min of a core: {most}; --seeds 1, or fewer of --every or --policy, take less"


def require_short(takes: Mapping[Choice, float], runs: int, ranks: int) -> None:
    """Raise `ParameterError` if `runs` runs of each choice take over a day; `takes`: seconds of one core per run."""
    whole_s = runs * sum(takes.values())
    if whole_s > MOST_S:
        longest = max(takes, key=lambda choice: takes[choice])
        raise ParameterError(
            f"{longest}: its runs of {ranks:,} ranks ({runs:,}) would take about "
            f"{runs * takes[longest] / 3600:,.3g} h of a core, and all choices together {whole_s / 3600:,.3g} "
            f"h; advice allows {MOST_S / 3600:g} h at most: ask for fewer steps (every x rounds), seeds or "
            "ranks, or a smaller model, or leave this policy out"
        )


def _judged(cases: Sequence[Case], choice: Choice, seeds: Sequence[int], settings: Mapping[str, Case]) -> Row:
    """Return a choice's row: medians over all seeds and networks; a setting scales them by its effect on the first."""
    case = cases[0]
    runs = [(each, timed(each, choice, seed)) for each in cases for seed in seeds]
    row = _row(choice, [judged(each, choice, seen) for each, seen in runs])
    first = judged(case, choice, runs[0][1])
    for name, setting in settings.items():
        same = replace(setting, failures=case.failures) == case  # failures do not affect a run
        seen = runs[0][1] if same else timed(setting, choice, seeds[0])
        found = judged(setting, choice, seen)
        # The effect is relative to the run with the same seed and network; the median is over all runs.
        row.worse[name] = row.goodput * found.goodput / first.goodput
        row.worse_every[name] = row.every * found.every / first.every
    return row


def _row(choice: Choice, samples: Sequence[Sample]) -> Row:
    goodputs = [sample.goodput for sample in samples]
    middle = {
        name: median(getattr(each, name) for each in samples)
        for name in ("utilisation", "exchange_s", "nbytes", "every")
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
    """Return the least cadence that meets the target, without compression; waits are interpolated between cadences."""
    own = sorted(
        (r.choice.every, r.utilisation) for r in rows if r.choice.policy == policy and r.choice.ratio == 1
    )
    if not own:
        return None
    every = np.array([each for each, _ in own], dtype=np.float64)
    # Time of a round without computing, in steps: utilisation = H / (H + waits).
    waits = every * (1.0 / np.array([used for _, used in own]) - 1.0)
    # Beyond the simulated cadences, an exchange takes the same time, but the slowest rank's delay grows with the
    # round.
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


@dataclass(frozen=True)
class Budget:
    """A budget: `amount` of node-hours, or of money at a `price` per node-hour.

    Attributes:
        amount: node-hours or money, above 0.
        ranks_per_node: ranks of a node; a partly used node is paid in full.
        price: price of a node-hour; None: the amount is in node-hours.
    """

    amount: float
    ranks_per_node: int
    price: float | None = None

    def __post_init__(self) -> None:
        price = 1.0 if self.price is None else self.price
        if not (0 < self.amount < math.inf and 0 < price < math.inf and self.ranks_per_node >= 1):
            raise ParameterError(f"{self}: give an amount, a price and ranks of a node above 0")

    def hours(self, ranks: int) -> float:
        """Return the hours for which the budget pays this number of ranks."""
        nodes = -(-ranks // self.ranks_per_node)
        return self.amount / (self.price or 1.0) / nodes

    def steps(self, case: Case, goodput: float) -> float:
        """Return the number of useful steps within the budget: hours over the step time, times goodput."""
        return 3600.0 * self.hours(case.ranks) / case.step_s * goodput


# -------------------------------------------------------------------------------------------------------------- words
def report(advice: Advice) -> str:
    """Return the ranking as lines of text."""
    known = ("policy", "goodput", "interval", "in effect", "computing", "a round waits", "sent a step")
    head = ("", *known, *WORSE)
    lines = [
        (
            f"{place}",
            str(row.choice),
            f"{row.goodput:.1%}",
            f"{row.low:.1%} to {row.high:.1%}",
            f"every {row.every:.0f}",
            f"{row.utilisation:.1%}",
            f"{row.exchange_s:.3g} s",
            _size(row.nbytes),
            *(_worse(row, name) for name in WORSE),
        )
        for place, row in enumerate(advice.rows, start=1)
    ]
    return "\n".join([text_table(head, lines, left=2), *_sentences(advice)])


def _size(nbytes: float) -> str:
    """Return a number of bytes in MB with three digits, without an exponent."""
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 999.5e6 else f"{nbytes / 1e6:.3g} MB"


def _worse(row: Row, setting: str) -> str:
    often = row.worse_every.get(setting, row.every)
    return f"{row.worse[setting]:.1%}" + f", every {often:.0f}" * (often > LATE * row.every)


def _sentences(advice: Advice) -> Iterator[str]:
    seeds, models = counted(advice.seeds, "seed"), counted(len(advice.models), "network model")
    yield f"intervals: least to largest of {seeds} × {models}"
    for group in _groups(advice.rows):
        yield f"indistinguishable: {', '.join(map(str, group))}"
    for policy in sorted({row.choice.policy for row in advice.rows}):
        yield f"{policy}: {_often(advice, policy)}"
    careful = [_in_effect(advice.rows[place]) for place in advice.careful()]
    if careful:
        yield f"most frequent exchanges that leave {advice.target:.0%} for computing: {'; '.join(careful)}"
    for name in WORSE:
        for now, before in advice.changes(name)[:3]:
            yield f"{name}: {now} overtakes {before}"
    yield "timing alone: how a cadence changes convergence is not in these figures (--train trains a small model)"


def _in_effect(row: Row) -> str:
    late = row.every > LATE * row.choice.every
    return str(row.choice) + f" (in effect every {row.every:.0f})" * late


def _often(advice: Advice, policy: str) -> str:
    """Return a sentence: how often a policy may exchange, and how often it does."""
    if policy in advice.break_even:
        even = advice.break_even[policy]
        if even is None:
            return f"computes {advice.target:.0%} of the time at no cadence: ranks wait for the slow ones"
        return f"computes {advice.target:.0%} of the time every {even} steps or less often"
    rows = [row for row in advice.rows if row.choice.policy == policy]
    late = [row for row in rows if row.every > LATE * row.choice.every]
    if not late:
        return "ranks do not wait for models, and exchange as often as asked"
    most = min(row.every for row in rows)
    return f"ranks do not wait for models; requests to exchange more often than every {most:.0f} steps are left out"


def _groups(rows: Sequence[Row]) -> Iterable[tuple[int, ...]]:
    """Return the longest runs of places in which all rows are alike; groups inside another group are left out."""
    last = 0
    for place, row in enumerate(rows, start=1):
        end = place
        while end < len(rows) and all(end + 1 in rows[at - 1].alike for at in range(place, end + 1)):
            end += 1
        if row.alike and end > max(place, last):
            last = end
            yield tuple(range(place, end + 1))


# -------------------------------------------------------------------------------------------------------- convergence
# The number of steps that a small live training needs under each choice, until all reach the same accuracy:
# handwritten digits on at most eight live virtual ranks, whose shards differ in their mixtures of classes
# (Dirichlet, 0.3). It shows the direction in which a cadence changes convergence; it does not replace a large
# model's own curve.
RANKS = 8
STEP_S = 4e-4  # seconds of one core for a step of one rank
SKEW = 0.3
MEASUREMENTS = 25  # accuracy measurements in a run


class Need(NamedTuple):
    """Steps until the accuracy that all choices reach: the median, the least and the most over seeds."""

    steps: float
    least: float
    most: float


def converge(case: Case, advice: Advice, *, steps: int, seeds: Sequence[int]) -> dict[Choice, Need]:
    """Train under each choice, and return the steps that each needs to reach the accuracy that all choices reach.

    Args:
        case: the job; at most eight of its ranks train.
        advice: the choices to compare. Compression is not applied; a choice whose actual exchanges are rarer than
            requested exchanges that rarely here.
        steps: number of steps of each training, at least 25.
        seeds: seeds of the trainings, including their shards.

    Returns:
        The steps that each choice needs.

    Raises:
        ParameterError: too few steps, or so many that they take more than a day, or a choice whose cadence is longer
            than the training.
    """
    choices = [row.choice for row in advice.rows]
    longest = max(choice.every for choice in choices)
    if steps < max(MEASUREMENTS, longest):
        raise ParameterError(
            f"--train {steps}: give at least {MEASUREMENTS} steps, and as many as the rarest exchange, {longest}"
        )
    ranks = min(case.ranks, RANKS)
    require_short(dict.fromkeys(choices, ranks * steps * STEP_S), len(seeds), ranks)
    known: dict[tuple[Choice, int], list[float]] = {}
    plain = {row.choice: Choice(row.choice.policy, min(round(row.every), steps)) for row in advice.rows}
    for choice in dict.fromkeys(plain.values()):
        for seed in seeds:
            known[choice, seed] = _accuracies(case, choice, steps, seed)
    measured_at = _measured_at(steps)
    needs = {}
    for choice in choices:
        found = []
        for seed in seeds:
            # Accuracies are compared within one seed, where shards and batches are the same.
            target = min(max(known[other, seed]) for other in plain.values())
            reached = zip(measured_at, known[plain[choice], seed], strict=True)
            found.append(next(at for at, value in reached if value >= target))
        needs[choice] = Need(float(median(found)), float(min(found)), float(max(found)))
    return needs


def _measured_at(steps: int) -> list[int]:
    return sorted({round(steps * (place + 1) / MEASUREMENTS) for place in range(MEASUREMENTS)})


def _accuracies(case: Case, choice: Choice, steps: int, seed: int) -> list[float]:
    """Return the mean held-out accuracy of all ranks at each measurement."""
    from spawnsim.policies.rules.merging import blocks
    from spawnsim.workloads import Digits

    measured_at = set(_measured_at(steps))
    case = replace(case, step_s=1.0)

    def main(comm: Any) -> None:
        digits = Digits(comm.rng, comm.Get_rank(), comm.Get_size(), alpha=SKEW)
        model, optimizer = digits.build()
        count = len(blocks([name for name, _ in model.named_parameters()]))
        policy = policy_of(choice, case, blocks=count)
        for step in range(1, steps + 1):
            with comm.compute(case.step_s):
                loss = digits.step(model, optimizer)
            model, optimizer, _ = policy(step, model, optimizer, local_metric=loss, group=comm)
            if step in measured_at:
                comm.record(step=step, accuracy=digits.accuracy(model))
        policy.shutdown()

    # A network without cost: steps count, not seconds.
    network = Switch(Hockney(1e-6, 1e12))
    table = run(main, ranks=min(case.ranks, RANKS), platform=network, seed=seed).table
    return [float(np.mean(table["accuracy"][table["step"] == at])) for at in sorted(measured_at)]


def by_time(
    advice: Advice, needs: dict[Choice, Need], step_s: float
) -> list[tuple[Choice, float, float, float]]:
    """Return choices by increasing time to the common accuracy: (choice, seconds, least, most).

    The time is the steps needed, times the step time, over goodput; least and most combine the ends of both
    intervals.
    """
    found = []
    for row in advice.rows:
        need = needs[row.choice]
        seconds, least = step_s * need.steps / row.goodput, step_s * need.least / row.high
        found.append((row.choice, seconds, least, step_s * need.most / row.low))
    return sorted(found, key=lambda each: each[1])
