"""Closed forms of whole runs, and the table of all quantities that have one: each is held by a test that it names."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim import columnar
from spawnsim.models.compute import Exponential
from spawnsim.models.network import Hockney, Switch
from spawnsim.models.platform import Platform
from spawnsim.policies import AverageAllPolicy

TESTS = Path(__file__).parents[1]
FAST = Platform("fast", Switch(Hockney(1e-9, 1e12)))

HELD = {
    "a message: α + nβ; LogGP's L + 2o + (n - 1)G": ("models/network/test_network.py", "test_loggp"),
    "a rendezvous: its envelope, then 2α + nβ from when both are there": (
        "virtual/engine/test_matching.py", "test_a_receive_is_cancelled_before_its_message_has_come"
    ),
    "each algorithm of a collective": ("models/collectives/test_collectives_timing.py", "test_textbook_form"),
    "collectives under LogGP": ("models/collectives/test_collectives_timing.py", "test_loggp_forms"),
    "many to one, in turn or fairly": ("models/network/test_contention.py", "test_an_incast"),
    "shares of links: max-min fairness": ("models/network/test_network.py", "test_fair_share_is_fair"),
    "a node's ranks on one NIC": (
        "models/network/test_contention.py", "test_the_messages_of_a_round_share_the_card_of_their_node"
    ),
    "one-sided accesses": ("virtual/engine/test_nic.py", "test_gets_queue_at_the_targets_up_link"),
    "ranks that share cores": ("virtual/engine/test_cores.py", "test_unequal_blocks_by_hand"),
    "TCP's slow start": ("models/network/test_changing.py", "test_slow_start"),
    "rounds of a slow start": ("models/network/test_changing.py", "test_rounds_of_a_slow_start"),
    "a cold all-reduce": ("models/network/test_changing.py", "test_a_cold_all_reduce_and_a_warm_one"),
    "TCP's goodput: line, window, loss": (
        "models/network/test_changing.py", "test_goodput_is_the_least_of_line_window_and_loss"
    ),
    "background traffic": (
        "models/network/test_changing.py", "test_traffic_takes_on_average_what_its_closed_form_says"
    ),
    "links that change": ("models/network/test_changing.py", "test_work_is_the_integral_of_what_is_left"),
    "the slowest of N steps": (
        "models/compute/test_compute.py", "test_expected_slowest_rank_matches_the_formula_within_one_percent"
    ),
    "a synchronous run with stragglers": ("virtual/test_closed_forms.py", "test_a_run_in_step_takes_its_slowest_rank"),
    "what a checkpoint takes": ("checkpoints/test_resume.py", "test_a_checkpoint_costs_what_the_platform_says"),
    "goodput with checkpoints and failures": ("virtual/test_closed_forms.py", "test_checkpoints_pay_as_daly_says"),
    "failures: Poisson; spares: a queue": (
        "models/faults/test_failures.py", "test_failures_are_poisson_and_wait_for_spares"
    ),
    "goodput of an average under failures": ("fidelity/test_advise.py", "test_failures_agree_with_ranks_that_die"),
    "goodput of an average every H steps": ("fidelity/test_advise.py", "test_averaging_follows_its_closed_form"),
    "goodput of fragments that are used later": ("fidelity/test_advise.py", "test_fragments_follow_their_closed_form"),
    "goodput of averages with a neighbour": ("fidelity/test_advise.py", "test_neighbours_follow_their_closed_form"),
    "goodput of a server whose card is full, or not": (
        "fidelity/test_advise.py", "test_a_server_follows_its_closed_form"
    ),
}  # fmt: skip


@pytest.mark.parametrize("quantity", HELD)
def test_the_table_names_tests(quantity: str) -> None:
    """Each test of the table is there."""
    file, name = HELD[quantity]
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_run_in_step_takes_its_slowest_rank() -> None:
    """Exponential steps: H_N means a step, averaged each step. Each k steps less: the sums' means and deviations."""
    ranks, iterations, step_s = 200, 600, 0.1
    harmonic = sum(1.0 / place for place in range(1, ranks + 1))
    ends = {}
    for every in (1, 30):
        left: list[float] = []
        columnar.run(
            AverageAllPolicy(every),
            ranks=ranks,
            iterations=iterations,
            model_nbytes=4,
            platform=FAST,
            stragglers=(Exponential(1.0),),
            compute=step_s,
            sample=0,
            on_round=lambda reported, left=left: left.append(float(reported.left_s.max())),  # type: ignore[misc]
        )
        # From one average to the next, whatever comes before the first.
        ends[every] = (left[-1] - left[0]) / (len(left) - 1) / every / step_s
    # A maximum of exponentials deviates by π/√6.
    assert ends[1] == pytest.approx(harmonic, abs=4 * math.pi / math.sqrt(6 * iterations))
    # Sums of 30: the largest of 200 gamma deviates, by their distribution on a grid.
    grid = np.arange(0.0, 90.0, 0.01)
    density = grid**29 * np.exp(-grid)
    below = np.cumsum(density) / density.sum()
    assert ends[30] == pytest.approx(float(np.sum(1.0 - below**ranks)) * 0.01 / 30, rel=0.03)
    assert ends[30] < ends[1] / 2


WORK_S, COST_S, REPAIR_S = 1.0, 0.25, 3.0


def _job(comm: Any, every: int, iterations: int) -> None:
    """Compute in step, and save each so many iterations."""
    saved = comm.restore()
    for iteration in range(0 if saved is None else saved.iteration, iterations):
        with comm.compute(WORK_S):
            pass
        comm.Barrier()
        if (iteration + 1) % every == 0:
            comm.checkpoint(iteration=iteration + 1, extra=np.zeros(1))
        comm.record(iteration=iteration)


def test_checkpoints_pay_as_daly_says(tmp_path: Path) -> None:
    """(M + R)(exp((τ + δ)/M) - 1)/τ for each second of work; Young's interval is the best of three.

    Daly's form (2006, eq. 13) but for failures amid a repair, which this job has none of: M exp(R/M) is M + R then.
    """
    text = '[network]\ntopology = "switch"\n[network.link]\nlatency = "1 ns"\nbandwidth = "10 GB/s"\n'
    (tmp_path / "p.toml").write_text(text + f'[storage]\nlatency = "{COST_S} s"\nbandwidth = "1000 GB/s"\n')
    iterations, mtbf_s = 1500, 60.0
    assert math.sqrt(2 * COST_S * mtbf_s) == pytest.approx(5.5, abs=0.1)  # Young's interval
    took = {}
    for every in (1, 5, 40):
        run = spawnsim.run(
            _job, ranks=2, platform=str(tmp_path / "p.toml"), parameters={"every": every, "iterations": iterations},
            faults=f"requeue:*@0s+9000s,{2 * mtbf_s}s,1s,2,{REPAIR_S}s", seed=5,
        )  # fmt: skip
        took[every] = run.totals["virtual_seconds"] / iterations
        expected = (mtbf_s + REPAIR_S) * math.expm1((every + COST_S) / mtbf_s) / every
        assert took[every] == pytest.approx(expected, rel=0.1), every
    assert took[5] < min(took[1], took[40])
