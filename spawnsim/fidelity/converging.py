"""The convergence side of advice: how many steps a small live training needs under each choice, until all are as good.

Handwritten digits on at most eight live virtual ranks, whose shards differ in their mixtures of classes (Dirichlet,
0.3), trained under the choice's own policy and cadence. It shows the direction in which a cadence moves convergence;
a large model's own curve it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from spawnsim.errors import ParameterError
from spawnsim.fidelity.advising import Advice, require_short
from spawnsim.fidelity.goodput import Case, Choice, policy_of
from spawnsim.models.network import Hockney, Switch
from spawnsim.run import run

RANKS = 8
STEP_S = 4e-4  # of a core, that a step of one rank takes
SKEW = 0.3
LOOKS = 25  # how often accuracy is looked at, in a run


class Need(NamedTuple):
    """Steps until the accuracy that all choices reach, over seeds: the median, the least, the most."""

    steps: float
    least: float
    most: float


def converge(case: Case, advice: Advice, *, steps: int, seeds: Sequence[int]) -> dict[Choice, Need]:
    """Train under each choice, and say how many steps it needs until the accuracy that the worst one reaches.

    Args:
        case: the job; its ranks, eight at most, train.
        advice: the choices to compare. Compression is not applied; who exchanged more rarely than asked for does so
            here.
        steps: of each training, at least 25.
        seeds: of the trainings, shards included.

    Returns:
        For each choice what it needs.

    Raises:
        ParameterError: too few steps, or so many that they take hours, or a choice whose cadence is longer than the
            training.
    """
    choices = [row.choice for row in advice.rows]
    longest = max(choice.every for choice in choices)
    if steps < max(LOOKS, longest):
        raise ParameterError(
            f"--train {steps}: give at least {LOOKS} steps, and as many as the rarest exchange, {longest}"
        )
    ranks = min(case.ranks, RANKS)
    require_short(dict.fromkeys(choices, ranks * steps * STEP_S), len(seeds), ranks)
    known: dict[tuple[Choice, int], list[float]] = {}
    plain = {row.choice: Choice(row.choice.policy, min(round(row.every), steps)) for row in advice.rows}
    for choice in dict.fromkeys(plain.values()):
        for seed in seeds:
            known[choice, seed] = _accuracies(case, choice, steps, seed)
    looks = _looks(steps)
    needs = {}
    for choice in choices:
        found = []
        for seed in seeds:
            # Accuracies of one seed are compared with each other: shards and batches are the same there.
            target = min(max(known[other, seed]) for other in plain.values())
            found.append(
                next(
                    at for at, value in zip(looks, known[plain[choice], seed], strict=True) if value >= target
                )
            )
        needs[choice] = Need(float(median(found)), float(min(found)), float(max(found)))
    return needs


def _looks(steps: int) -> list[int]:
    return sorted({round(steps * (place + 1) / LOOKS) for place in range(LOOKS)})


def _accuracies(case: Case, choice: Choice, steps: int, seed: int) -> list[float]:
    """Return the mean held-out accuracy of all ranks at each look."""
    from spawnsim.policies.rules.merging import blocks
    from spawnsim.workloads import Digits

    looks = set(_looks(steps))
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
            if step in looks:
                comm.record(step=step, accuracy=digits.accuracy(model))
        policy.shutdown()

    # A network of no weight: steps are counted, not seconds.
    network = Switch(Hockney(1e-6, 1e12))
    table = run(main, ranks=min(case.ranks, RANKS), platform=network, seed=seed).table
    return [float(np.mean(table["accuracy"][table["step"] == at])) for at in sorted(looks)]


def by_time(
    advice: Advice, needs: dict[Choice, Need], step_s: float
) -> list[tuple[Choice, float, float, float]]:
    """Return choices by rising time until the common accuracy: (choice, seconds, least, most).

    Steps needed, of a compute step each, over goodput; least and most from the ends of both intervals.
    """
    found = []
    for row in advice.rows:
        need = needs[row.choice]
        times = (
            step_s * need.steps / row.goodput,
            step_s * need.least / row.high,
            step_s * need.most / row.low,
        )
        found.append((row.choice, *times))
    return sorted(found, key=lambda each: each[1])
