"""Measures of runs, and the arrays behind figures of sweeps, by number; drawings are tried in tests/study."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from spawnsim.errors import ParameterError
from spawnsim.plots import fidelity, panels, style, sweeps
from spawnsim.plots.measures import Measure
from spawnsim.plots.panels import Asked
from spawnsim.plots.series import Interval, bootstrap_median
from spawnsim.record import Table
from spawnsim.run import Run

# Three ranks; the second falls back before the third comes.
RUN = Run(
    {"backend": "virtual", "file": "x.py"},
    Table(
        {
            "rank": np.array([0, 0, 1, 1, 1, 2, 2], np.int32),
            "time_s": np.array([1.0, 4.0, 2.0, 3.0, 5.0, 2.5, 6.0]),
            "iteration": np.array([0, 1, 0, 1, 2, 0, 1]),
            "accuracy": np.array([0.9, 0.9, 0.9, 0.1, 0.2, np.nan, 0.8]),
            "loss": np.array([3.0, 1.0, 3.0, 2.0, 1.0, 5.0, 4.0]),
        }
    ),
    [
        {"kind": "consensus", "time_s": 9.0, "rank": 0, "at_s": 2.0, "accuracy": 0.7},
        {"kind": "consensus", "time_s": 9.0, "rank": 0, "at_s": 1.0, "accuracy": 0.5},
    ],
    {"bytes": 640, "virtual_seconds": 6.0, "messages": None},
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("accuracy", 0.8),
        ("final:accuracy", 0.8),
        ("final:loss", 1.0),
        ("highest:loss", 3.0),
        ("lowest:loss", 1.0),
        ("time_to:accuracy>0.5", 2.0),  # two of three, before one falls back
        ("time_to:accuracy>=0.85", 2.0),
        ("time_to:accuracy > 0.95", math.inf),
        ("time_to:loss<1.5", 5.0),
        ("iterations_to:loss<=2.5", 1.0),
        ("bytes", 640.0),
        ("messages", math.nan),
        ("final:consensus.accuracy", 0.7),
        ("highest:consensus.accuracy", 0.7),
        ("time_to:consensus.accuracy>0.6", 2.0),
        ("time_to:consensus.accuracy>1", math.inf),
    ],
)
def test_one_number_of_a_run(text: str, value: float):
    """Times are those of rows, not of points of a curve; what events tell counts from when it is about."""
    np.testing.assert_equal(Measure.of(text).value(RUN, RUN.totals), value)


def test_measures_say_what_they_are():
    """On an axis, in a title, and which way is better."""
    found = Measure.of("time_to:consensus.accuracy>0.8")
    assert found.label == "time (s) until accuracy of the mean model is above 0.8"
    assert (found.unit, found.less_is_better) == ("time (s)", True)
    better = {
        name: Measure.of(name).less_is_better
        for name in ("accuracy", "final:loss", "bytes", "wait_s", "reward")
    }
    assert better == {"accuracy": False, "final:loss": True, "bytes": True, "wait_s": True, "reward": False}


def table(rows: list[tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Return a tidy table of policy, ratio, seed and y."""
    names = ("policy", "ratio", "seed", "accuracy", "bytes")
    return {name: np.array([row[at] for row in rows]) for at, name in enumerate(names)}


TIDY = table(
    [
        (policy, ratio, seed, base + ratio + 0.01 * seed, 100.0 * len(policy))
        for policy, base in (("none", 0.1), ("average", 0.5))
        for ratio in (0.1, 0.4)
        for seed in range(6)
    ]
)


def test_a_response_has_an_interval_over_seeds_at_each_place():
    """Numbers are places, names stand in their order; a run that is missing is none."""
    found = sweeps.response(TIDY, "ratio", "accuracy", "policy")
    assert list(found.lines) == ["none", "average"] and found.ticks == ()
    line = found.lines["average"]
    assert line.x.tolist() == [0.1, 0.4] and [len(values) for values in line.seeds] == [6, 6]
    assert line.intervals[0].median == pytest.approx(0.625) and line.intervals[0].kind == "90 % interval"
    gap = {**TIDY, "accuracy": np.where(TIDY["seed"] > 2, np.nan, TIDY["accuracy"])}
    few = sweeps.response(gap, "policy", "accuracy")
    assert few.ticks == ("none", "average") and [len(values) for values in few.lines[""].seeds] == [6, 6]
    with pytest.raises(ParameterError, match="no finished run has this value"):
        sweeps.response({**TIDY, "accuracy": np.full(24, np.nan)}, "ratio", "accuracy")


def test_differences_are_between_partners():
    """Of one seed and setting; where only one gets there they are infinite, where neither does there is none."""
    found = sweeps.differences(TIDY, "accuracy", hue="policy", against="none", by=["policy", "ratio"])
    assert set(found["policy"]) == {"average"}
    np.testing.assert_allclose(found["accuracy"], np.full(12, 0.4))
    heights = TIDY["accuracy"].copy()
    heights[[0, 13, 2, 14]] = np.inf  # seed 0 of none; seed 1 of average; seed 2 of both
    found = sweeps.differences(
        {**TIDY, "accuracy": heights}, "accuracy", hue="policy", against="none", by=["ratio"]
    )
    np.testing.assert_equal(found["accuracy"][:3], [-np.inf, np.inf, np.nan])


def test_a_front_is_what_no_other_beats_in_both():
    """Fewer bytes and more accuracy are better; equal ones do not beat each other."""
    rows = [
        ("a", 0.1, 0, 0.9, 100.0),
        ("b", 0.1, 0, 0.8, 50.0),
        ("c", 0.1, 0, 0.7, 60.0),
        ("d", 0.1, 0, 0.9, 100.0),
    ]
    rows += [("e", 0.1, 0, 0.95, np.inf)]
    found = sweeps.front(table(rows), "bytes", "accuracy", hue="policy", by=["policy", "ratio"])
    assert [found.points[at].hue for at in found.best] == ["b", "a", "d"]
    assert found.points[0].name == "ratio 0.1"


def test_a_heat_map_has_a_cell_for_each_pair():
    """Numbers grow upwards, names stand from the top; a cell without runs is empty."""
    without = {name: values[6:] for name, values in TIDY.items()}
    found = sweeps.heat(without, "policy", "accuracy", "ratio")
    assert (found.columns, found.rows) == (("none", "average"), ("0.4", "0.1"))
    np.testing.assert_allclose(found.values, [[0.525, 0.925], [np.nan, 0.625]])
    names = sweeps.heat(TIDY, "ratio", "accuracy", "policy")
    assert names.rows == ("none", "average")


def test_infinite_values_stand_beyond_all_others():
    """At the edge of linear and logarithmic axes; intervals with them are values that were seen."""
    assert sweeps.edges(np.array([1.0, 2.0, np.inf])) == (2.15, 0.85, False)
    high, low, log = sweeps.edges(np.array([1.0, 100.0]))
    assert log and high > 150 and low < 0.7
    assert sweeps.edges(np.array([np.inf])).high == 1.0
    found = bootstrap_median([1.0, 2.0, 3.0, np.inf, np.inf])
    assert found.median == 3.0 and found.low in (1.0, 2.0, 3.0) and found.high == np.inf


def test_names_in_a_plane_do_not_cover_each_other():
    """Two settings of one outcome had their names written on one place, and neighbours overlapped."""
    names = ["ratio 0.1, no stragglers", "ratio 0.3, no stragglers", "ratio 0.5, slow", "ratio 0.7, slow"]
    even = Interval(0.5, 0.5, 0.5)
    places = [(100.0, even), (100.0, even), (101.0, even), (104.0, Interval(0.501, 0.501, 0.501))]
    points = [
        sweeps.Point("none", name, Interval(x, x, x), y) for name, (x, y) in zip(names, places, strict=True)
    ]
    points.append(sweeps.Point("average", "", Interval(400, 400, 400), Interval(0.9, 0.9, 0.9)))
    ax = sweeps.draw_front(sweeps.Front(tuple(points), ()))
    FigureCanvasAgg(ax.figure).draw()
    assert {text.get_text() for text in ax.texts} == {"\n".join(names[:2]), *names[2:]}
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(one.overlaps(other) for at, one in enumerate(boxes) for other in boxes[:at])


def test_never_keeps_clear_of_the_numbers_below_it():
    """It was written upon the tick of 3.5 seconds."""
    heights = np.array([0.4, 3.2, np.inf])
    ax = Figure().subplots()
    edge = sweeps.edges(heights)
    ax.plot([0, 1, 2], np.minimum(heights, edge.high))
    sweeps.mark_edges(ax, heights, edge)
    FigureCanvasAgg(ax.figure).draw()
    boxes = [label.get_window_extent() for label in ax.get_yticklabels() if label.get_text()]
    assert ax.get_yticklabels()[-1].get_text() == "never"
    assert not any(one.overlaps(boxes[-1]) for one in boxes[:-1])


def test_what_never_arrives_is_named_on_the_axis():
    """And a line in a figure of a user's own stays in it."""
    heights = np.where((TIDY["policy"] == "none") & (TIDY["seed"] > 1), np.inf, TIDY["accuracy"])
    ax = Figure().subplots()
    info = sweeps.response({**TIDY, "accuracy": heights}, "ratio", "accuracy", "policy")
    assert sweeps.draw(info, ax) is ax
    sweeps.mark_edges(ax, heights, sweeps.edges(heights))
    assert ax.get_yticklabels()[-1].get_text() == "never"
    assert max(ax.lines[0].get_ydata()) <= sweeps.edges(heights).high
    assert sweeps.draw_front(sweeps.front(TIDY, "bytes", "accuracy", hue="policy")).get_lines()
    assert sweeps.draw_heat(sweeps.heat(TIDY, "ratio", "accuracy", "policy")).images


def test_lines_are_told_apart_without_colour():
    """Each pair of looks differs in its dashes, its marker, or whether that is hollow."""
    looks = list(style.looks(f"policy {number}" for number in range(12)).values())
    assert len({(str(look.dashes), *look[2:]) for look in looks}) == 12


def test_panels_are_not_too_many():
    """A figure of very many is refused, with what to do."""
    asked = Asked(kind="response", x="ratio", y="accuracy", facet=("seed",))
    found = panels.panels(TIDY, asked.facet)
    assert [title for title, _ in found] == [f"seed {seed}" for seed in range(6)]
    figure = panels.figure(found, asked, "ranks and platform")
    assert "one seed each" in figure.get_supxlabel() or "seeds" in figure.get_supxlabel()
    many = {name: np.concatenate([values] * 3) for name, values in TIDY.items()}
    many["seed"] = np.arange(72)
    with pytest.raises(ParameterError, match="72 panels of seed: choose some"):
        panels.panels(many, ("seed",))


def test_a_policy_has_one_look_in_all_figures_of_a_sweep():
    """Also where another is left out, such as the one that differences are to."""
    found = panels.panels({name: values[12:] for name, values in TIDY.items()}, ())
    asked = Asked(kind="response", x="ratio", y="accuracy", hue="policy", hues=("groups", "average"))
    alone = panels.figure(found, asked).axes[0].lines[-1].get_color()
    names = np.where(TIDY["policy"] == "none", "groups", TIDY["policy"])
    both = panels.figure(panels.panels({**TIDY, "policy": names}, ()), asked).axes[0].lines
    assert alone == style.KNOWN["average"].colour
    assert {line.get_color() for line in both} == {alone, style.LOOKS[1].colour}


@pytest.mark.parametrize(("sizes", "scale"), [((8, 64, 256), "log"), ((8, 16), "linear")])
def test_bars_at_one_place_stand_side_by_side(sizes: tuple[int, ...], scale: str):
    """Those of two hues hid each other. Single seeds, and bands, stay where they are, and ticks do."""
    rows = [(hue, ranks, seed) for hue in ("a", "b", "c") for ranks in sizes for seed in range(5)]
    hue, ranks, seed = (np.array(each) for each in zip(*rows, strict=True))
    table = {"policy": hue, "ranks": ranks, "seed": seed, "accuracy": 0.5 + 0.01 * seed}
    for seeds, apart in ((1, False), (3, True), (5, False)):
        some = {name: values[seed < seeds] for name, values in table.items()}
        ax = sweeps.draw(sweeps.response(some, "ranks", "accuracy", "policy"))
        medians = [np.asarray(line.get_xdata(), float) for line in ax.lines if line.get_label() in "abc"]
        assert ax.get_xscale() == scale and ax.get_xticks().tolist() == [*sizes]
        assert medians[1].tolist() == [*sizes]
        assert (medians[0] < medians[1]).all() == (medians[1] < medians[2]).all() == apart
        assert np.allclose(medians[0], sizes, rtol=0.1)
        assert apart or medians[0].tolist() == medians[2].tolist() == [*sizes]


def test_bars_of_advice_stand_side_by_side():
    """Those of two policies at one cadence hid each other."""
    points = [(steps, 0.5, 0.4, 0.6) for steps in (10.0, 100.0)]
    ax = fidelity.draw_advice({"average": points, "selective": points}, [10, 100], 0.9)
    first, second = (np.asarray(each.lines[0].get_xdata(), float) for each in ax.containers)
    assert (first < second).all() and np.allclose(first, second, rtol=0.1)
