"""Figures: the arrays behind them are checked by number, the drawing by one smoke test per figure."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from support import synthetic

from spawnsim import plots
from spawnsim.cli import serve
from spawnsim.errors import ParameterError
from spawnsim.plots import (
    convergence,
    curves,
    diversity,
    gallery,
    genealogy,
    replacement,
    series,
    style,
    timeuse,
)
from spawnsim.plots.experiments import Groups, facts, grouped, setting
from spawnsim.record import Table
from spawnsim.run import Run


def table(**columns: list[float]) -> dict[str, np.ndarray]:
    """Return a table of float columns."""
    return {name: np.asarray(values, dtype=float) for name, values in columns.items()}


TWO_RANKS = table(rank=[0, 0, 1, 1], time_s=[1, 3, 2, 4], iteration=[0, 1, 0, 1], loss=[8, 4, 6, 2])


def events(*who: tuple[int, float, list[int]], **more: int) -> list[dict[str, object]]:
    """Return replacement events from (rank, time_s, donors)."""
    return [{"kind": "replacement", "rank": r, "time_s": t, "donors": d} | more for r, t, d in who]


# ------------------------------------------------------------------------------------------------- series


def test_a_rank_keeps_its_last_value_until_its_next_row():
    """Ranks with different clocks share one grid; before its first row a rank has no value."""
    grid = series.carried_forward(TWO_RANKS, "loss")
    assert grid.x.tolist() == [1, 2, 3, 4]
    np.testing.assert_equal(grid.values, [[8, 8, 4, 4], [np.nan, 6, 6, 2]])


def test_rows_without_the_value_are_left_out_and_rows_may_have_any_order():
    """A column that is recorded every other row (NaN between) gives a step curve, not gaps."""
    sparse = table(rank=[0, 0, 0], time_s=[1, 2, 3], accuracy=[0.5, np.nan, 0.7])
    assert series.carried_forward(sparse, "accuracy").values.tolist() == [[0.5, 0.7]]
    shuffled = {name: values[[3, 0, 2, 1]] for name, values in TWO_RANKS.items()}
    np.testing.assert_equal(
        series.carried_forward(shuffled, "loss"), series.carried_forward(TWO_RANKS, "loss")
    )


def test_quantiles_wait_for_half_of_the_ranks():
    """One early rank out of three is no median."""
    grid = series.Grid(np.arange(2.0), np.array([[1.0, 1], [np.nan, 2], [np.nan, 3]]))
    np.testing.assert_equal(series.quantiles(grid, [0.5]), [[np.nan, 2]])


def test_an_unknown_column_is_named_with_those_that_exist():
    """A wrong name is one clear error."""
    says = "'reward' was not recorded; this run has: iteration, loss, rank, time_s"
    with pytest.raises(ParameterError, match=says):
        series.carried_forward(TWO_RANKS, "reward")


def test_long_runs_are_resampled_to_few_points():
    """A thousand distinct times become 240 grid points that reach both ends."""
    times = np.arange(1000.0)
    grid = series.carried_forward({"rank": np.zeros(1000), "time_s": times, "loss": times}, "loss")
    assert (len(grid.x), grid.x[0], grid.x[-1], grid.values[0, -1]) == (240, 0, 999, 999)


def test_the_bootstrap_is_seeded_and_brackets_the_median():
    """The same seed gives the same interval; one sample gives no width."""
    samples = np.random.default_rng(1).normal(size=(9, 3))
    once, again = (series.bootstrap_medians(samples, seed=3) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert (once[1] <= once[0]).all()
    assert (once[0] <= once[2]).all()
    assert series.bootstrap_median([0.5]) == (0.5, 0.5, 0.5, "90 % interval")


def test_the_bootstrap_covers_the_true_median_about_as_often_as_it_says():
    """A 90 % interval over 15 normal seeds holds the true median in 80 to 99 % of 300 trials."""
    samples = np.random.default_rng(2).normal(size=(15, 300))
    _, low, high = series.bootstrap_medians(samples)
    assert 0.80 < np.mean((low <= 0) & (high >= 0)) < 0.99


def test_sums_and_last_values_are_per_rank():
    """Rows of several ranks are told apart; NaN counts as nothing."""
    mixed = table(rank=[0, 1, 0, 1], time_s=[1, 1, 2, 2], x=[1, 5, 2, np.nan])
    assert series.per_rank_sum(mixed, "x").tolist() == [3, 5]
    assert series.per_rank_last(mixed, "x").tolist() == [2, 5]


# ----------------------------------------------------------------------------------------------- experiments


def made(seed: int = 0, *, outcome: str = "finished", real: bool = False, **what: Any) -> Run:
    """Return a short run with these entries of run.json; `parameters` are added to the policy."""
    run = synthetic.run(ranks=12, iterations=int(what.pop("iterations", 20)), seed=seed, real=real)
    parameters = {"policy": "selective"} | what.pop("parameters", {})
    totals = {
        **run.totals,
        "ranks": what.get("ranks", 12),
        "digest": f"{seed}{sorted(what.items())}{parameters}",
    }
    return dataclasses.replace(
        run, what={**run.what, "parameters": parameters} | what, outcome=outcome, totals=totals
    )


def names(found: Groups) -> list[tuple[str, int]]:
    """Return what stands in the legend, and of how many runs each curve is made."""
    return [(group.label, len(group.runs)) for group in found]


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        ({"parameters": {"ratio": 0.05}}, {"parameters": {"ratio": 0.5}}, ["ratio 0.05", "ratio 0.5"]),
        ({"parameters": {"policy": None}}, {"parameters": {"policy": "average"}}, ["none", "average"]),
        ({"parameters": {"mine": False}}, {"parameters": {"mine": True}}, ["mine=False", "mine=True"]),
        ({"ranks": 12}, {"ranks": 1000}, ["12 ranks", "1,000 ranks"]),
        ({"platform": "/a/net.toml"}, {"platform": None}, ["net", "default platform"]),
        ({"stragglers": None}, {"stragglers": "pareto:2"}, ["no stragglers", "pareto:2"]),
        ({"faults": "crash:1@2s"}, {"faults": None}, ["faults crash:1@2s", "no faults"]),
        ({"compute": "5 ms"}, {"compute": 0.01}, ["compute 5 ms", "compute 0.01"]),
        ({"deadline_s": 30.0}, {"deadline_s": 3.0}, ["deadline 30", "deadline 3"]),
        ({"file": "a.py"}, {"file": "b.py"}, ["a", "b"]),
        ({"versions": {"torch": "2.1"}}, {"versions": {"torch": "2.2"}}, ["torch 2.1", "torch 2.2"]),
        ({"inputs": {"platform/x": "12ab9"}}, {"inputs": {"platform/x": "34cd9"}}, ["x 12ab", "x 34cd"]),
        ({"inputs": {"program/h.py": "12ab9"}}, {"inputs": {"program/h.py": "34cd9"}}, ["h.py 12ab", "h.py 34cd"]),
        ({"backend": "virtual"}, {"backend": "torch"}, ["selective", "selective (real torch)"]),
    ],
)  # fmt: skip
def test_runs_that_differ_in_anything_but_their_seed_are_other_experiments(
    one: dict[str, Any], other: dict[str, Any], shown: list[str]
):
    """Each has its curve, named by what differs; seeds of one experiment share a curve."""
    found = grouped([made(0, **one), made(1, **other), made(1, **one), made(2, **one)])
    assert names(found) == [(shown[0], 3), (shown[1], 1)]


def test_titles_and_captions_tell_what_differs_and_what_does_not():
    """Not "by ranks", which each figure of ranks is; what is nothing is left out, what differs is in the legend."""
    assert grouped([made(ranks=12), made(ranks=1000)]).by == " by number of ranks"
    assert grouped([made(ranks=12), made(ranks=12, stragglers="pareto:2")]).by == " by stragglers"

    common = {"alpha": 0.3, "hidden": [256, 64], "compression": None, "guard": True}
    found = grouped([made(parameters={"ratio": ratio, **common}) for ratio in (0.1, 0.5)])
    assert found.caption().splitlines() == [
        "digits.py · 12 virtual ranks · ethernet-10g · stragglers lognormal:0.3 · seed 0",
        "policy selective, alpha 0.3, hidden 256 64, guard=True",
    ]


def test_how_a_run_was_made_is_no_experiment_and_a_run_named_twice_counts_once():
    """Date, machine and notes tell no curves apart; copies give no width; another digest is a run of its own."""
    found = grouped([
        made(0, made={"date": "today", "threads": 2}, leaks=["time"], notes=["x"]), made(1, made={}, leaks=[], notes=[])
    ])  # fmt: skip
    assert names(found) == [("selective", 2)]

    run = made(1)
    other = dataclasses.replace(run, totals={**run.totals, "digest": "another"})
    assert names(grouped([run, run, other])) == [("selective", 2)]


def test_a_user_may_pool_and_name():
    """`by` alone tells groups apart, and the caption says what was pooled; labels are given once per group."""
    runs = [made(seed, parameters={"ratio": ratio, "every": 5}) for ratio in (0.1, 0.5) for seed in (0, 1)]
    pooled = grouped(runs, by=["every"])
    assert names(pooled) == [("every 5", 4)]
    assert "curves pool runs that differ in ratio" in pooled.caption()
    assert names(grouped(runs, by=["seed"])) == [("seed 0", 2), ("seed 1", 2)]
    assert names(grouped(runs, labels=["few", "many"])) == [("few", 2), ("many", 2)]
    with pytest.raises(ParameterError, match=r"3 labels for 2 curves: ratio 0\.1; ratio 0\.5"):
        grouped(runs, labels=["a", "b", "c"])
    with pytest.raises(ParameterError, match="labels a, a: give each curve a different label"):
        grouped(runs, labels=["a", "a"])
    with pytest.raises(
        ParameterError, match="--by rank: the runs do not differ in it; they differ in seed, ratio"
    ):
        grouped(runs, by=["rank"])


def test_groups_of_one_label_are_told_apart():
    """Long values that read alike are numbered."""
    long = "x" * 40
    found = grouped([made(parameters={"text": f"{long}{end}"}) for end in "ab"])
    assert [group.label[-6:] for group in found] == ["xxxxx…", "xx… (2)"[-6:]]
    assert len({group.label for group in found}) == 2


def test_the_same_names_of_parameters_and_circumstances_are_kept_apart():
    """A parameter of main called "ranks" does not hide the number of ranks."""
    found = facts(made(parameters={"ranks": 3}))
    assert (found["ranks"].shown, found["main's ranks"].shown) == ("12 ranks", "ranks 3")


def test_a_title_claims_no_more_than_the_column_does():
    """Each column named "accuracy" was the test accuracy, each "loss" that on own data."""
    for name in ("loss", "accuracy"):
        drawn = convergence.figure([made()], name)
        assert (drawn.get_suptitle(), drawn.axes[0].get_ylabel()) == (
            name.title(),
            f"{name}, median over ranks",
        )
    assert convergence.race({"a": [told([0.1, 0.9])]}, 0.8, "Who?").axes[0].get_ylabel() == "accuracy"


def test_three_ratios_of_one_seed_are_no_interval():
    """They were drawn as one line with a "90 % bootstrap interval over 3 seeds"."""
    drawn = convergence.figure([made(0, parameters={"ratio": ratio}) for ratio in (0.05, 0.1, 0.5)], "loss")
    assert drawn.get_suptitle() == "Loss by ratio"
    assert "band: 10–90 % of ranks" in drawn.get_supxlabel()
    assert "bootstrap" not in drawn.get_supxlabel()
    assert {text.get_text() for text in drawn.axes[1].texts} == {"ratio 0.05", "ratio 0.1", "ratio 0.5"}


@pytest.mark.parametrize("seeds", [1, 3, 5])
def test_a_curve_of_one_point_is_a_marker(seeds: int):
    """Panels were empty where each rank told a number once, but for a line at the edge, from rank to rank."""
    rows = table(
        rank=[0, 0, 1, 1], time_s=[1, 50, 2, 50.4], iteration=[0, 99, 0, 99], metric=[np.nan, 0.9, np.nan, 2]
    )
    runs = [Run({"seed": seed}, Table(rows), [], {"ranks": 2}) for seed in range(seeds)]
    drawn = convergence.figure(runs, "metric")
    for ax, at in zip(drawn.axes, (50.4, 99), strict=True):
        line = ax.lines[-1]
        assert (list(line.get_xdata()), list(line.get_ydata())) == ([at], [1.45])
        assert all(each.get_marker() not in ("", "None") for each in ax.lines)
        assert ax.get_xlim()[1] > at
    # The band reaches higher than the median.
    assert seeds > 1 or drawn.axes[0].get_ylim()[1] > 1.8


@pytest.mark.parametrize(
    ("seeds", "says"), [(4, "thin: each of 4 seeds"), (5, "90 % bootstrap interval over 5 seeds")]
)
def test_few_seeds_are_drawn_one_by_one(seeds: int, says: str):
    """Below five an interval would be a grander name for the least and the largest."""
    found = grouped([made(seed, iterations=20 + seed) for seed in range(seeds)])
    caption = convergence.figure(found, "loss").get_supxlabel()
    assert says in caption
    assert ("bootstrap" in caption) == (seeds >= 5)
    ax = Figure().subplots()
    drawn = convergence.curves_of(found, "loss", "iteration")
    convergence.draw_groups(found, drawn, "iteration", ax)
    (info,) = drawn.values()
    assert len(ax.collections) == (seeds >= 5)  # the band
    assert (info.x[-1], max(line.get_xdata()[-1] for line in ax.lines)) == (
        19,
        18 + seeds,
    )  # to each seed's end


def test_a_number_over_few_seeds_has_its_least_and_largest():
    """From five on it is the bootstrap's interval, and says so."""
    assert series.over_seeds([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, "least to largest")
    assert series.over_seeds([1.0, 2.0, 3.0, 4.0, 5.0]).kind == "90 % interval"


@pytest.mark.parametrize(
    ("outcome", "mark"),
    [("RankError: rank 3 raised ValueError: no", "failed"), ("interrupted", "interrupted")],
)
def test_a_run_that_did_not_finish_is_marked(outcome: str, mark: str):
    """In the legend, and with its error in the caption of each figure."""
    found = grouped([made(0), made(0, outcome=outcome, parameters={"policy": "average"})])
    assert names(found) == [("selective", 1), (f"average ({mark})", 1)]
    for _, drawn in plots.figures(found):
        if "replacement" not in drawn.get_suptitle() and "replaced" not in drawn.get_suptitle():
            assert f"not finished, shown as far as recorded: average: {outcome}" in " ".join(
                drawn.get_supxlabel().split("\n")
            )
    assert names(grouped([made(0), made(1, outcome=outcome)])) == [("selective (1 of 2 not finished)", 2)]


# -------------------------------------------------------------------------------------------- convergence


def test_the_curve_is_the_median_over_ranks():
    """Median and band of two ranks, against iterations."""
    found = curves.curve(TWO_RANKS, "loss", over="iteration", band=(0.0, 1.0))
    assert (found.x.tolist(), found.median.tolist()) == ([0, 1], [7, 3])
    assert (found.low.tolist(), found.high.tolist()) == ([6, 2], [8, 4])


def test_against_time_a_value_holds_until_the_next_one():
    """A slope to the next evaluation showed a target reached before `time_to` says so; against iterations it is one."""
    styles = {}
    for over in ("time_s", "iteration"):
        info = curves.curve(TWO_RANKS, "loss", over=over)
        ax = curves.draw(info)
        [corners] = [path.vertices for path in ax.collections[0].get_paths()]
        level = [(a[1] == b[1]) or (a[0] == b[0]) for a, b in pairwise(corners)]
        styles[over] = (ax.lines[-1].get_drawstyle(), all(level))
    assert styles == {"time_s": ("steps-post", True), "iteration": ("default", False)}


def test_all_lines_over_time_are_steps():
    """Those of single seeds, of the mean model, of spreads and of medians over seeds, too."""
    many = [made(seed) for seed in range(3)]
    left, right = convergence.figure(many, "loss").axes
    assert {line.get_drawstyle() for line in left.lines} == {"steps-post"}
    assert {line.get_drawstyle() for line in right.lines} == {"default"}
    for over, drawn in (("time_s", "steps-post"), ("iteration", "default")):
        lines = [line for ax in diversity.figure(many, "loss", over).axes for line in ax.lines]
        assert {line.get_drawstyle() for line in lines} == {drawn}
    assert diversity.draw(diversity.diversity(TWO_RANKS, "loss", over="time_s")).lines[0].get_drawstyle() == (
        "steps-post"
    )
    told = [{"kind": "consensus", "time_s": time_s, "at_s": time_s, "accuracy": 0.5} for time_s in (1, 2)]
    mean = curves.of_mean_model(dataclasses.replace(made(), events=told))
    assert curves.draw(mean).lines[-1].get_drawstyle() == "steps-post"


def last_rows(run: Run) -> Run:
    """Return a run with the last row of each rank alone."""
    iteration = run.table["iteration"]
    return dataclasses.replace(run, table=run.table.where(iteration == iteration.max()))


def test_the_caption_names_what_is_drawn():
    """A curve of one point is a marker, which the caption called a line; of real ranks alone there is no line."""
    other = {"parameters": {"policy": "average"}}
    for runs, says in (
        ([made()], "line: median over ranks; band: 10–90 % of ranks"),
        ([last_rows(made())], "marker: median over ranks; band: 10–90 % of ranks"),
        ([last_rows(made()), made(**other)], "line or marker: median over ranks; band: 10–90 % of ranks"),
        ([last_rows(made(seed)) for seed in range(3)], "small: each of 3 seeds; large: their median"),
        ([last_rows(made(seed)) for seed in range(5)], "marker and band: median and its 90 % bootstrap"),
        ([made(real=True)], "markers: real ranks, median, seconds since each rank's first row"),
    ):
        assert convergence.figure(runs, "loss").get_supxlabel().split("\n")[-1].startswith(says)


def test_the_caption_says_that_some_runs_have_no_stragglers():
    """It named those of the others, as if all runs had them."""
    assert "stragglers none / slow:0.05,10" in setting(
        [made(stragglers=None), made(stragglers="slow:0.05,10")]
    )
    assert "no faults / faults crash:3@1s" in setting([made(faults="crash:3@1s"), made()])
    assert "none" not in setting([made(stragglers="slow:0.05,10")])


def test_labels_of_many_curves_do_not_cover_each_other():
    """Of twelve curves with long names those in two and three lines overlapped."""
    runs = [
        made(parameters={"policy": policy, "replacement_ratio": ratio}, stragglers=slow)
        for policy in ("none", "average", "selective")
        for ratio in (0.1, 0.3)
        for slow in ("lognormal:0.3", "slow:0.2,10")
    ]
    for drawn in (convergence.figure(runs, "loss"), diversity.figure(runs, "loss")):
        FigureCanvasAgg(drawn).draw()
        boxes = [text.get_window_extent() for text in drawn.axes[-1].texts]
        assert len(boxes) == 12
        assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at])


def test_a_run_that_has_diverged_at_once_leaves_the_others_their_curves():
    """Of a column that was asked for it is an error; of nothing but such runs there is no curve."""
    lost = made(parameters={"lr": 10.0})
    nothing = np.full(len(lost.table["rank"]), np.nan)
    lost = dataclasses.replace(lost, table=Table({**lost.table, "accuracy": nothing}))
    stems = {stem for stem, _ in gallery.figures([made(), lost])}
    assert {"convergence-accuracy", "diversity-accuracy"} <= stems
    with pytest.raises(ParameterError, match="'accuracy' holds no numbers"):
        list(gallery.figures([made(), lost], ["accuracy"]))
    assert "convergence-accuracy" not in {stem for stem, _ in gallery.figures([lost])}


def test_seeds_are_compared_where_all_of_them_have_values():
    """The median over seeds is that of the common stretch; each seed's own curve is kept to its end."""
    lines = [
        curves.Curve(np.array(x), *[np.array(y)] * 3) for x, y in (([0.0, 2], [1.0, 3]), ([1.0, 3], [5.0, 7]))
    ]
    both = curves.over_seeds(lines)
    assert (both.x.tolist(), both.median.tolist(), both.runs) == ([1, 2], [3, 4], 2)
    assert [each.x[-1] for each in both.seeds] == [2, 3]


def test_real_seconds_count_from_each_ranks_first_row():
    """Loading libraries is no training: a real rank's clock is set to zero at its first row, a virtual one's is not."""
    real, virtual = (synthetic.run("none", ranks=3, iterations=4, real=real) for real in (True, False))
    shifted = curves.since_start(real)
    assert shifted["time_s"][[0, 4, 8]].tolist() == [0, 0, 0]
    np.testing.assert_allclose(np.diff(shifted["time_s"][:4]), np.diff(real.table["time_s"][:4]))
    assert curves.since_start(virtual) is virtual.table


def test_replacements_and_events_of_real_ranks_count_from_the_first_row():
    """Figures of them began where the processes did: seconds without a mark. Their order is that of the clock."""
    rows = table(rank=[0, 0, 1, 1, 2], time_s=[5, 9, 6, 9.5, 5.5])
    told = events((1, 7.0, [0]), (0, 6.5, [2]), (2, 4.5, [0]))
    told.append({"kind": "consensus", "rank": 0, "time_s": 9.0, "at_s": 8.0, "accuracy": 0.5})
    real, virtual = (
        Run({"backend": backend}, Table(rows), told, {"ranks": 3}) for backend in ("torch", "virtual")
    )
    of_real, of_virtual = map(replacement.replacements_of, (real, virtual))
    assert (of_real.time_s.tolist(), of_real.end_s) == ([0, 1.5, 2], 4)
    assert (of_virtual.time_s.tolist(), of_virtual.end_s) == ([4.5, 6.5, 7], 9)
    assert genealogy.of_run(real).time_s.tolist() == [0, 0, 1.5, 2]
    assert [curves.of_mean_model(run).x.tolist() for run in (real, virtual)] == [[3], [8]]
    for drawn in (
        replacement.raster_figure,
        replacement.lineage_figure,
        lambda run: genealogy.figure({"": run}),
    ):
        captions = [drawn(run).get_supxlabel().replace("\n", " ") for run in (real, virtual)]
        assert ["seconds since the first row" in each for each in captions] == [True, False]


# -------------------------------------------------------------------------------------------- replacement


def test_replacements_count_donors_and_replaced():
    """Each donor of an event is a pair; counts are per rank."""
    info = replacement.replacements(events((1, 2.0, [0, 3]), (2, 1.0, [0])), ranks=4)
    assert replacement.per_rank(info).tolist() == [0, 1, 1, 0]
    assert replacement.donations(info).tolist() == [2, 0, 0, 1]
    assert info.time_s.tolist() == [1, 2]


def test_never_replaced_falls_at_each_first_replacement_only():
    """A second replacement of one rank changes nothing; the curve goes on to the end of the run."""
    info = replacement.replacements(events((1, 1.0, []), (1, 2.0, []), (0, 3.0, [])), ranks=2, end_s=5.0)
    time_s, share = replacement.never_replaced(info)
    assert list(zip(time_s, share, strict=True)) == [(0, 1), (1, 0.5), (3, 0), (5, 0)]


def test_chance_is_binomial_when_all_rounds_are_equal():
    """Two rounds of one rank in four: replaced 0, 1, 2 times with 9/16, 6/16, 1/16."""
    info = replacement.replacements(events((1, 1.0, [])) + events((2, 2.0, [])), ranks=4)
    chance = replacement.by_chance(info)
    np.testing.assert_allclose(chance.counts[:3], [9 / 16, 6 / 16, 1 / 16])
    np.testing.assert_allclose(chance.never, [3 / 4, 9 / 16])


def test_events_of_one_round_count_as_one_round():
    """Half of the ranks replaced at once leaves half of them, not (3/4)^2."""
    info = replacement.replacements(events((1, 1.0, []), (2, 1.5, []), round=5), ranks=4)
    assert replacement.by_chance(info).never.tolist() == [0.5]


@given(st.integers(1, 1200), st.integers(0, 50))
def test_the_matrix_loses_no_pair(ranks: int, bins: int):
    """Whatever the number of ranks and cells, every pair falls into a cell, and all cells are of one whole width."""
    rng = np.random.default_rng(ranks)
    who = [(int(rng.integers(ranks)), 1.0, [int(d) for d in rng.integers(ranks, size=3)]) for _ in range(20)]
    counts, edges = replacement.matrix(replacement.replacements(events(*who), ranks), bins)
    assert counts.sum() == 60
    assert set(np.diff(edges)) == {edges[1]}


@pytest.mark.parametrize("ranks", [4, 11, 16])
def test_numbers_are_written_for_single_pairs(ranks: int):
    """Up to 16 ranks a cell is one donor and one replaced rank, and its number stands in it."""
    ax = replacement.draw_matrix(replacement.replacements(events((ranks - 1, 1.0, [1, 2])), ranks))
    assert {text.get_text() for text in ax.texts} == {"1"}  # nothing where two ranks never met
    assert {text.get_position() for text in ax.texts if text.get_text() == "1"} == {
        (ranks - 1, 1),
        (ranks - 1, 2),
    }
    assert ax.get_xlim() == ax.get_ylim() == (-0.5, ranks - 0.5)


def test_donors_are_ranks_whatever_a_program_records():
    """A program's own event may be of kind "replacement" and name its donors in words; rounds may be lists."""
    odd = [{"kind": "replacement", "rank": 1, "time_s": 1.0, "donors": donors, "round": [1], "iteration": 2**70}
           for donors in ("all", None, 3, [0, "x", True, 2**31 - 1, -1, 2])]  # fmt: skip
    info = replacement.replacements(odd, ranks=3)
    assert (info.donor.tolist(), info.receiver.tolist(), info.round.tolist()) == ([0, 2], [1, 1], [0] * 4)
    one = [{"kind": "replacement", "rank": 1, "time_s": 1.0, "donor": donor} for donor in (2, 3, "x")]
    assert replacement.replacements(one, ranks=3).donor.tolist() == [2]


def test_a_column_of_texts_has_no_curve(tmp_path: Path):
    """It is left out of what is drawn by itself, and refused where it is asked for; names of files are safe."""
    run = made(parameters={"policy": "average"})
    columns = dict(run.table) | {"accuracy": np.full(run.table.rows, "good")}
    run = dataclasses.replace(run, table=Table(columns))
    assert "convergence-accuracy" not in dict(plots.figures([run]))
    with pytest.raises(ParameterError, match="'accuracy' holds texts"):
        convergence.figure([run], "accuracy")
    odd = dataclasses.replace(run, table=Table({"../up": run.table["loss"], **run.table.where([0, 1])} | {
        "../up": run.table["loss"][:2]}))  # fmt: skip
    assert {path.parent for path in plots.save_all([odd], tmp_path, ["../up"], ["png"])} == {tmp_path}


def test_a_raster_ends_with_half_of_the_ranks_and_may_be_empty():
    """One straggler that goes on alone leaves no empty axis; a run without events has empty arrays, full shares."""
    rows = table(rank=[0, 1, 2], time_s=[2, 2.5, 40])
    run = Run({"backend": "virtual"}, Table(rows), events((1, 1.0, [0])), {"ranks": 3})
    assert replacement.replacements_of(run).end_s == 2.5
    info = replacement.replacements([], ranks=3, end_s=1.0)
    assert replacement.never_replaced(info)[1].tolist() == [1, 1]
    assert replacement.top_share(replacement.donations(info)) == 0


# --------------------------------------------------------------------------------- diversity and time use


def test_diversity_of_real_ranks_is_drawn_as_its_caption_says():
    """Markers, where virtual ranks of the same colour have lines; neither seconds nor a median over ranks."""
    drawn = diversity.figure([made(), made(real=True)], "loss")
    for ax in drawn.axes[:3]:
        assert [(line.get_linestyle() == "None", line.get_marker() == "") for line in ax.lines] == [
            (False, True), (True, False),
        ]  # fmt: skip
    told = " ".join(text.get_text() for text in drawn.findobj(Text))
    assert "markers: real ranks" in told
    assert "first row" not in told


def test_diversity_is_the_spread_over_ranks():
    """Losses 8 and 6: standard deviation 1, coefficient of variation 1/7, range 2."""
    found = diversity.diversity(TWO_RANKS, "loss")
    assert (found.std[0], found.range[0]) == (1, 2)
    assert found.cv[0] == pytest.approx(100 / 7)


def test_time_that_is_not_computing_is_exchange():
    """The two parts add up to the rank's own clock."""
    used = timeuse.time_use(TWO_RANKS | table(compute_s=[1, 1, 2, 1]))
    assert used is not None
    assert (used.compute_s.tolist(), used.exchange_s.tolist()) == ([2, 3], [1, 1])
    assert timeuse.time_use(TWO_RANKS) is None


@pytest.mark.parametrize("virtual", [True, False])
def test_two_real_backends_are_told_apart(virtual):
    """By marker, colour and label; the first one's markers lie over the line of virtual ranks, in its colour."""
    rows = [(0, 0.0, 0, 0.1), (0, 1.0, 1, 0.5), (0, 2.0, 2, 0.9)]
    columns = dict(
        zip(("rank", "time_s", "iteration", "loss"), map(np.array, zip(*rows, strict=True)), strict=True)
    )
    backends = [*(["virtual"] if virtual else []), "mpi", "torch"]
    runs = [
        Run({"backend": each, "parameters": {"policy": "mine"}}, Table(columns), [], {"ranks": 1})
        for each in backends
    ]
    looks = curves.looks_of(grouped(runs))
    mpi, torch = looks["mine (real MPI)"], looks["mine (real torch)"]
    assert mpi.marker != torch.marker
    assert mpi.colour != torch.colour
    assert not virtual or looks["mine"] == mpi
    texts = {each.get_text() for ax in convergence.figure(runs, "loss").axes for each in ax.texts}
    assert {"mine (real torch)", "mine" if virtual else "mine (real MPI)"} <= texts


def test_the_legend_of_real_ranks_shows_their_markers():
    """It showed a circle, whatever their markers were."""
    policies = ("average", "selective")
    runs = [made(real=real, parameters={"policy": each}) for each in policies for real in (False, True)]
    for chosen, count in ((runs[2:], 1), (runs, 2)):
        legend = convergence.figure(chosen, "loss").axes[0].get_legend()
        assert [each.get_text() for each in legend.get_texts()] == ["virtual ranks", "real ranks"]
        shown = {line.get_marker() for line in legend.findobj(Line2D)} - {"None"}
        found = grouped(chosen)
        looks = curves.looks_of(found)
        assert len(shown) == count and shown == {looks[each.label].marker for each in found if each.real}


def test_what_is_below_zero_for_some_ranks_has_a_linear_axis():
    """On a logarithmic one the band of a walk that begins at 0 was cut off; a loss of 0 is where such an axis ends."""
    for least, scale in ((-0.5, "linear"), (0.0, "log"), (0.01, "log")):
        walk = table(
            rank=[0, 0, 1, 1, 2, 2], time_s=[1, 2] * 3, iteration=[0, 1] * 3,
            loss=[least, 5, 0.1, 5, 0.2, 5],
        )  # fmt: skip
        drawn = convergence.figure([Run({"backend": "virtual"}, Table(walk), [], {"ranks": 3})], "loss")
        assert {ax.get_yscale() for ax in drawn.axes} == {scale}


def test_time_use_of_real_ranks_begins_with_training():
    """Loading libraries was shown as waiting and exchanging; virtual ranks count from 0."""
    rows = TWO_RANKS | table(time_s=[8, 10, 9, 11], compute_s=[1, 1, 0.5, 1])
    runs = [Run({"backend": backend}, Table(rows), [], {"ranks": 2}) for backend in ("mpi", "virtual")]
    of_real, of_virtual = (timeuse.of_run(run) for run in runs)
    assert of_real is not None and of_virtual is not None
    assert (of_real.compute_s.tolist(), of_real.exchange_s.tolist()) == ([2, 1.5], [1, 1])
    assert of_virtual.exchange_s.tolist() == [8, 9.5]
    drawn = timeuse.figure(runs)
    assert drawn is not None
    assert drawn.axes[0].get_ylabel() == "training time per rank (s)"
    assert "real ranks: since the computation of each rank's first row" in drawn.get_supxlabel()


def test_no_panel_of_time_use_is_cropped():
    """Panels share one height, which the last one used to set for all."""
    slow, quick = (
        synthetic.run("average", ranks=9, iterations=40),
        synthetic.run("none", ranks=9, iterations=10),
    )
    drawn = timeuse.figure([slow, quick])
    assert drawn is not None
    used = timeuse.time_use(slow.table)
    assert used is not None
    assert drawn.axes[0].get_ylim()[1] > (used.compute_s + used.exchange_s).max()


def test_the_legend_of_time_use_covers_no_title():
    """One run makes the narrowest figure; a class's long name takes two lines there, and is broken between words."""
    ran = made(parameters={"policy": "AsyncSelectiveAveragingPolicy"})
    drawn = timeuse.figure([ran])
    assert drawn is not None
    FigureCanvasAgg(drawn).draw()
    heading = drawn.axes[0]._left_title  # `ax.title` is the centred one, which is empty
    assert heading.get_text() == "AsyncSelective\nAveragingPolicy"
    legend = drawn.legends[0].get_window_extent()
    assert not any(legend.overlaps(each.get_window_extent()) for each in (drawn._suptitle, heading))


def test_runs_that_differ_in_much_leave_room_for_what_is_drawn():
    """A name of twenty parameters took the place of the axes; both ends of it are kept."""
    many = [{f"parameter_{number}": number + which for number in range(20)} for which in (0, 1)]
    drawn = timeuse.figure([made(parameters=each) for each in many])
    assert drawn is not None
    FigureCanvasAgg(drawn).draw()
    assert drawn.axes[0].get_position().height > 0.3
    lines = drawn.axes[0].get_title(loc="left").split("\n")
    assert (lines[0], lines[-2], lines[-1]) == ("parameter_0 0,", "…", "parameter_19 19")


@pytest.mark.parametrize("of", [replacement.raster_figure, replacement.lineage_figure])
def test_a_long_title_takes_two_lines(of: Any):
    """A run whose name tells four parameters went beyond the edge."""
    drawn = of(made(), name="selective, faults crash:3@0.3s, replacement_ratio 0.2, judge accuracy")
    FigureCanvasAgg(drawn).draw()
    assert drawn._suptitle.get_window_extent().x1 < drawn.bbox.x1
    assert drawn._suptitle.get_text().count("\n") == 1


def test_time_use_of_many_runs_is_a_page():
    """Rows of four panels; beyond eight runs one of each curve."""
    drawn = timeuse.figure([made(seed, parameters={"every": every}) for every in range(5) for seed in (0, 1)])
    assert drawn is not None
    assert [ax.get_title(loc="left") for ax in drawn.axes if ax.get_visible()] == [
        f"every {every}" for every in range(5)
    ]
    assert drawn.get_figwidth() < 20
    assert "first run of each curve" in drawn.get_supxlabel()


def test_imbalance_is_the_excess_of_the_slowest():
    """Iteration 0 takes 1 and 3 s, iteration 1 takes 2 and 2 s: 4 s useful, 1 s lost."""
    found = timeuse.imbalance(TWO_RANKS | table(compute_s=[1, 2, 3, 2]))
    assert found == timeuse.Imbalance(useful_s=4.0, waiting_s=1.0)


# -------------------------------------------------------------------------------------------------- style


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_labels_keep_their_order_and_their_distance(heights: list[float]):
    """Neighbouring labels end at least a gap apart, in the order of their lines."""
    placed = style.spread(heights, 0.1)
    ordered = [placed[index] for index in sorted(range(len(heights)), key=heights.__getitem__)]
    assert all(high - low > 0.0999 for low, high in pairwise(ordered))


def test_no_two_curves_look_alike():
    """Up to six differ in colour and in dashes; then colours come again with others; beyond all pairs is refused."""
    five = style.looks(["a", "selective", "b", "none", "average"]).values()
    assert len({look.colour for look in five}) == len({str(look.dashes) for look in five}) == 5
    chosen = style.looks(["none", "average", *map(str, range(30))])
    assert chosen["average"] == style.looks(["average"])["average"]
    assert len({(look.colour, str(look.dashes)) for look in chosen.values()}) == 32
    first = list(chosen.values())[:7]
    assert len({look.colour for look in first}) == 7
    with pytest.raises(ParameterError, match="99 curves in one figure"):
        style.looks(map(str, range(99)))


@given(st.lists(st.floats(-1, 2), min_size=1, max_size=12))
def test_labels_stay_beside_their_axes(heights: list[float]):
    """Many lines that end together are named from top to bottom of the panel, and not above it."""
    gap = 1 / len(heights)
    placed = sorted(style.within(style.spread(heights, gap), gap))
    assert placed[0] >= -1e-9
    assert placed[-1] <= 1 + 1e-9
    assert all(high - low > 0.999 * gap for low, high in pairwise(placed))


def test_captions_say_who_ran_where():
    """Ranks, platform, stragglers and seeds are in the caption."""
    runs = [synthetic.run(ranks=4, seed=seed) for seed in (1, 2)] + [
        synthetic.run(ranks=4, real=True, seed=1)
    ]
    expected = (
        "4 virtual ranks · 4 real MPI ranks · ethernet-10g · stragglers lognormal:0.3 · 2 seeds (1 … 2)"
    )
    assert setting(runs) == expected
    assert [group.label for group in grouped(runs)] == ["selective", "selective (real MPI)"]


# ------------------------------------------------------------------------------------------------ drawing


@pytest.fixture(scope="module")
def runs() -> list[plots.Recorded]:
    """Three policies on 40 ranks, and one real run."""
    few = {"ranks": 40, "iterations": 30}
    return [synthetic.run(policy, **few) for policy in synthetic.REACHED] + [
        synthetic.run("average", real=True, **few)
    ]


def test_all_figures_are_made_and_saved_alike(runs: list[plots.Recorded], tmp_path: Path):
    """One smoke test for the whole gallery: every figure has a title, a caption and units; two times, equal bytes."""
    before = dict(mpl.rcParams)
    made = dict(plots.figures(runs))
    assert set(made) == {
        "convergence-accuracy", "convergence-loss", "diversity-accuracy", "time-use",
        "replacement-raster-selective", "replacement-lineage-selective", "genealogy-selective",
    }  # fmt: skip
    for figure in made.values():
        assert figure.get_suptitle()
        assert "40 virtual" in figure.get_supxlabel()
    first = plots.save(made["convergence-loss"], tmp_path / "a" / "figure", ("png", "pdf", "svg"))
    second = plots.save(convergence.figure(runs, "loss"), tmp_path / "b" / "figure", ("png", "pdf", "svg"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert dict(mpl.rcParams) == before


def test_of_many_runs_the_first_of_each_curve_has_figures_of_its_own():
    """A report of a sweep of 5 x 2 runs had 30 figures of who was replaced."""
    many = [made(seed, parameters={"every": every}) for every in range(5) for seed in (0, 1)]
    assert {name for name, _ in plots.grouped(many[:8]).alone(lambda run: True, 8)} == {
        f"every {every}, seed {seed}" for every in range(4) for seed in (0, 1)
    }
    found = plots.grouped(many).alone(lambda run: run is not many[0], 8)
    assert found == [(f"every {every}", many[max(1, 2 * every)]) for every in range(5)]
    assert sum(stem.startswith("replacement-raster") for stem, _ in plots.figures(many)) == 5


def test_every_axis_has_a_label(runs: list[plots.Recorded]):
    """No panel without words on its axes, shared ones aside."""
    for stem, figure in plots.figures(runs):
        bare = [ax for ax in figure.axes if not ax.get_xlabel() and ax.xaxis.get_tick_params()["labelbottom"]]
        assert not bare, stem


def told(accuracies: list[float], policy: str = "selective", seed: int = 7) -> Run:
    """Return a run of 20 ranks whose mean model has these accuracies, 50 ms apart."""
    run = synthetic.run(policy, ranks=20, iterations=30, seed=seed)
    means = [
        {"kind": "consensus", "time_s": 9.0, "rank": 0, "at_s": 0.05 * tick, "accuracy": each}
        for tick, each in enumerate(accuracies)
    ]
    return dataclasses.replace(run, events=[*run.events, *means])


def test_the_mean_model_has_a_curve_and_a_time_at_which_it_reaches_a_target():
    """The first time counts, also where it falls back; a target that is never reached is infinitely far."""
    info = curves.of_mean_model(told([0.1, 0.7, 0.85, 0.7, 0.9]))
    assert info.x.tolist() == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    assert [curves.first_at(info, target) for target in (0.1, 0.8, 0.95)] == [0, 0.1, np.inf]
    with pytest.raises(
        ParameterError, match=r'no event "consensus" was recorded: see spawnsim.policies.Consensus'
    ):
        curves.of_mean_model(synthetic.run(ranks=3))


def test_a_race_has_a_row_for_each_setting_and_names_each_policy_once_in_it():
    """Three seeds each are drawn, and the caption says so, with the target; policies look alike in all rows."""
    runs = [told([0.1, 0.5, 0.9], policy, seed) for policy in ("none", "average") for seed in (1, 2, 3)]
    figure = convergence.race({"Data differ": runs, "Rates differ": runs[:3]}, 0.8, "Who is first?")
    assert [len(ax.texts) for ax in figure.axes] == [0, 2, 0, 1]
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[1] == "Data differ:\nthe mean of all ranks' models" and titles[2].startswith(
        "Rates differ:"
    )
    caption = figure._supxlabel.get_text().replace("\n", " ")
    assert caption.startswith("2 policies on ") and "seeds (1 … 3). Thin: each of 3 seeds; " in caption
    assert caption.endswith("dotted: accuracy 0.8.")
    assert figure.axes[1].lines[0].get_color() == figure.axes[3].lines[0].get_color()


def test_draw_takes_given_axes_or_makes_its_own(runs: list[plots.Recorded]):
    """`draw(info)` returns new axes, `draw(info, ax)` the given ones."""
    ax = Figure().subplots()
    info = replacement.replacements_of(runs[2])
    assert replacement.draw_raster(info, ax) is ax
    for draw in (
        replacement.draw_raster,
        replacement.draw_matrix,
        replacement.draw_counts,
        replacement.draw_never,
    ):
        assert draw(info).figure is not ax.figure


def test_the_command_writes_figures_of_run_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`spawnsim plot RUN --out DIR` prints one path per file."""
    synthetic.run(ranks=6, iterations=20).save(tmp_path / "run")
    assert (
        serve("plot", [str(tmp_path / "run"), "--out", str(tmp_path), "--format", "png", "--y", "loss"]) == 0
    )
    assert all(Path(line).stat().st_size > 10_000 for line in capsys.readouterr().out.splitlines())


def test_the_command_says_when_there_is_nothing_to_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A run without rows made no figure, no word and status 0; beside others it is named and left out."""
    run = made(parameters={"policy": "average"})
    dataclasses.replace(run, table=run.table.where([])).save(tmp_path / "empty")
    made().save(tmp_path / "full")
    empty, full, out = (str(tmp_path / name) for name in ("empty", "full", "out"))
    assert serve("plot", [empty, "--out", out]) == 2
    assert "average: no row was recorded" in capsys.readouterr().err
    assert serve("plot", [empty, full, "--out", out, "--format", "png", "--y", "loss"]) == 0
    told = capsys.readouterr()
    assert "convergence-loss.png" in told.out
    assert "average: no row was recorded" in told.err


def test_figures_need_no_pyplot():
    """Importing and drawing leaves pyplot alone: no window, no global figure list."""
    draw = "p.replacement.draw_raster(p.replacement.replacements([], 2, 1.0))"
    code = f"import sys, spawnsim.plots as p; {draw}; print('matplotlib.pyplot' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_is_written_keeps_clear_of_edges_and_of_other_panels():
    """A label was taller than its panel, a name at the edge, the last tick of a panel at the first of the next."""
    raster = replacement.raster_figure(made())
    lines = convergence.figure([made()], "loss")
    used = timeuse.figure([made(), made(seed=1)])
    assert used is not None
    for drawn in (raster, lines, used):
        FigureCanvasAgg(drawn).draw()
    above = raster.axes[0]
    assert "replacements in each " in above.get_title(loc="left") and not above.get_ylabel()
    assert lines.bbox.x1 - lines.axes[1].texts[0].get_window_extent().x1 > 0.09 * lines.dpi
    left, right = used.axes[:2]
    last, first = left.get_xticklabels()[-1], right.get_xticklabels()[0]
    assert first.get_window_extent().x0 - last.get_window_extent().x1 > 0.15 * used.dpi


def test_bins_of_ranks_divide_them_where_they_can():
    """1,000 ranks in at most 50 bins are 20 wide; 64 in at most 10 are 8 wide; a prime takes what it needs."""
    edges = [replacement.rank_edges(*args) for args in ((1000, 50), (64, 10), (97, 10), (3, 50))]
    assert [(each[1], each[-1]) for each in edges] == [(20, 1000), (8, 64), (10, 100), (1, 3)]


def test_a_single_replacement_is_one_and_no_rate_and_ranks_are_whole():
    """100 per second were drawn for one in a bin of 10 ms, ticks at half ranks, and equal counts as one block."""
    info = replacement.replacements([*events(*((rank, 1.3, [3]) for rank in range(3)))], 4, end_s=1.32)
    one = replacement.replacements([*events((1, 1.3, [3]))], 4, end_s=1.32)
    drawn = Figure()
    rate, raster, margin = drawn.subplots(3, 1)
    replacement._draw_rate(one, rate, "k")
    replacement.draw_raster(info, raster)
    replacement._draw_margin(info, margin, "k")
    FigureCanvasAgg(drawn).draw()
    assert rate.get_title(loc="left") + rate.get_title() == "replacements in each 110 ms"
    (stairs,) = rate.patches
    assert stairs.get_data().values.max() == 1
    assert all(tick == int(tick) for tick in raster.get_yticks())
    bars = sorted((bar.get_y(), bar.get_y() + bar.get_height()) for bar in margin.patches)
    assert [(low + high) / 2 for low, high in bars] == pytest.approx([0, 1, 2, 3])
    assert all(high < low for (_, high), (low, _) in pairwise(bars))


@pytest.mark.parametrize(("count", "bars"), [(6, 0), (7, 7)])
def test_of_many_curves_each_has_a_bar_in_place_of_its_band(count: int, bars: int):
    """Without either, no reader could tell a difference from noise."""
    drawn = convergence.figure([made(parameters={"every": every}) for every in range(count)], "loss")
    assert len(drawn.axes[0].containers) == bars
    assert f"{'bars' if bars else 'band'}: 10–90 % of ranks" in drawn.get_supxlabel()
