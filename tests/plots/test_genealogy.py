"""Who descends from whom: shares by hand, in runs with one donor and with many, and what is drawn of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from support import synthetic

import spawnsim
from spawnsim.plots import genealogy
from spawnsim.plots.genealogy import Birth, births_of
from spawnsim.policies import PopulationBasedTrainingPolicy
from spawnsim.record import Table
from spawnsim.workloads.mlp import without_data


def birth(time_s: float, replaced: int, *donors: int, own: float = 0.0) -> Birth:
    """Return a birth whose donors count alike."""
    return Birth(time_s, replaced, donors, (1 / len(donors),) * len(donors), own)


def test_one_donor_each_makes_a_tree() -> None:
    """12 ranks: 3 takes over 0, 11 takes over 3, then 0 takes over 5: the line of 0 lives on in 3 and 11 alone."""
    found = genealogy.genealogy([birth(1, 3, 0), birth(2, 11, 3), birth(3, 0, 5)], 12, end_s=9)
    assert found.leading[:, 11].tolist() == [11, 11, 0, 0]
    assert found.leading[-1].tolist() == [5, 1, 2, 0, 4, 5, 6, 7, 8, 9, 10, 0]
    # Shares in twelfths at the end: 2 of founder 0, 2 of founder 5, 1 of eight others, none of 3 and 11.
    assert found.founders.tolist() == pytest.approx([12, 144 / 14, 144 / 18, 144 / 16])
    assert (found.time_s.tolist(), found.end_s) == ([0, 1, 2, 3], 9)


def test_several_donors_make_a_mixture() -> None:
    """Half of each of two; with momentum a rank keeps that share of itself; weights count as they are."""
    found = genealogy.genealogy([birth(1, 2, 0, 1, own=0.5)], 3)
    assert found.leading[-1].tolist() == [0, 1, 2]
    assert found.founders[-1] == pytest.approx(9 / (1.25**2 + 1.25**2 + 0.5**2))
    uneven = Birth(1.0, 2, (0, 1), (0.2, 0.8), 0.0)
    assert genealogy.genealogy([uneven], 3).leading[-1].tolist() == [0, 1, 1]


def test_events_that_tell_nonsense_are_taken_as_far_as_they_go() -> None:
    """No donors: no birth. Weights that do not fit, are no numbers, or are all zero: all donors alike."""
    events = [
        {"kind": "replacement", "rank": 1, "time_s": 3.0, "donors": []},
        {"kind": "replacement", "rank": 1, "time_s": 2.0, "donors": [0, 2], "weights": [1.0]},
        {"kind": "replacement", "rank": 2, "time_s": 1.0, "donors": [0, 1], "weights": [0.0, float("nan")]},
        {"kind": "replacement", "rank": 0, "time_s": 4.0, "donors": [1], "weights": [3.0], "momentum": 0.25},
        {"kind": "mode", "rank": 0, "time_s": 0.0},
    ]
    found = births_of(events, 3)
    assert [each.time_s for each in found] == [1.0, 2.0, 4.0]
    assert [each.weights for each in found] == [(0.5, 0.5), (0.5, 0.5), (1.0,)]
    assert found[-1].own == 0.25


def test_chance_is_the_same_each_time_and_loses_founders_more_slowly_than_one_family() -> None:
    """If rank 0 gives to all others one after the other, one founder is left; donors drawn at random leave several."""
    births = [birth(rank, rank, 0) for rank in range(1, 24)]
    first, second = (genealogy.genealogy(births, 24) for _ in range(2))
    assert first.founders[-1] == 1
    assert first.neutral[-1] > 3
    assert (first.neutral == second.neutral).all()


def test_the_axis_of_founders_says_whether_it_is_logarithmic() -> None:
    """It had two ticks, 64 and 96, unevenly spaced without a word; runs beside each other have one scale."""
    few = genealogy.genealogy([birth(1, 3, 0), birth(2, 11, 3)], 12)
    many = genealogy.genealogy([birth(rank, rank, 0) for rank in range(1, 24)], 24)
    linear, logarithmic, told = (
        genealogy.draw_founders(info, log=log) for info, log in ((few, None), (many, None), (few, True))
    )
    assert (linear.get_yscale(), linear.get_ylabel()) == ("linear", "effective\nfounders")
    low, high = linear.get_ylim()
    assert sum(low <= tick <= high for tick in linear.get_yticks()) >= 3
    assert [(ax.get_yscale(), ax.get_ylabel()) for ax in (logarithmic, told)] == [
        ("log", "effective\nfounders (log)")
    ] * 2


def test_the_legend_of_founders_lies_on_no_curve() -> None:
    """Where few founders are left soon it covered their curve."""
    births = [birth(rank, rank, 0) for rank in range(1, 24)]
    ax = genealogy.draw_founders(genealogy.genealogy(births, 24, end_s=300))
    FigureCanvasAgg(ax.figure).draw()
    legend = ax.get_legend().get_window_extent()
    for line in ax.lines:
        assert not line.get_path().transformed(ax.transData).intersects_bbox(legend, filled=False)


def test_runs_of_different_sizes_have_each_a_readable_tree() -> None:
    """A run of 4 ranks lay in a corner beside one of 100, whose axis it shared, under the latter's name."""
    sizes = (100, 4)
    drawn = genealogy.figure(
        {f"{ranks} ranks": synthetic.run("selective", ranks=ranks, iterations=30) for ranks in sizes}
    )
    trees, below = drawn.axes[:2], drawn.axes[2:]
    assert [(ax.get_ylim(), ax.get_ylabel()) for ax in trees] == [
        ((-1, ranks), f"{ranks} ranks, by family") for ranks in sizes
    ]
    # Numbers of founders compare, so they share an axis; from 100 to 2 only a logarithmic one shows both.
    assert [(ax.get_yscale(), ax.get_ylim() == below[0].get_ylim()) for ax in below] == [("log", True)] * 2


def test_no_line_of_the_caption_ends_in_a_dot() -> None:
    """In the narrowest figure a line was broken behind what separates its parts."""
    drawn = genealogy.figure({"selective": synthetic.run("selective", ranks=20, iterations=30)})
    assert not any(line.endswith("·") for line in drawn.get_supxlabel().split("\n"))


def test_the_family_tree_of_a_population_is_drawn() -> None:
    """20 virtual ranks under population based training, the higher the better: all descend from the best quarter."""

    def main(comm: spawnsim.Comm) -> None:
        model, optimizer = without_data(100)
        policy = PopulationBasedTrainingPolicy(2)
        for iteration in range(30):
            with comm.compute():
                pass
            model, optimizer, _ = policy(iteration, model, optimizer, float(comm.Get_rank()), comm)
            comm.record(iteration=iteration)
        policy.shutdown()

    run = spawnsim.run(main, ranks=20, seed=7)
    found = genealogy.of_run(run)
    assert all(len(each.donors) == 1 and each.donors[0] >= 15 for each in found.births)
    assert set(found.leading[-1, :5].tolist()) <= set(range(15, 20))
    drawn = genealogy.figure(
        {"population": run, "synthetic": synthetic.run("selective", ranks=20, iterations=30)}
    )
    tree, _, below, _ = drawn.axes
    # A line for each rank and each change of its family, and those from donors to replaced.
    lines, births = (collection.get_segments() for collection in tree.collections)
    assert len(lines) == 20 + np.count_nonzero(np.diff(found.leading, axis=0))
    assert len(births) == len(found.births)
    assert [line.get_label() for line in below.lines] == ["this run", "at random"]
    assert "20 virtual ranks" in drawn.get_supxlabel()


def test_the_tree_of_a_short_run_counts_milliseconds() -> None:
    """As all other figures over time do; it had ticks such as 0.0025 s."""
    run = synthetic.run("selective", ranks=20, iterations=30)
    run = dataclasses.replace(
        run,
        table=Table({**run.table, "time_s": run.table["time_s"] / 100}),
        events=[event | {"time_s": event["time_s"] / 100} for event in run.events],
    )
    assert genealogy.figure({"selective": run}).axes[-1].get_xlabel() == "virtual time (ms)"


def test_founders_have_a_colour_and_a_name():
    """Of four ranks all founders, also those without heirs; a family's name stands at its height."""
    found = genealogy.genealogy([birth(1, 1, 3), birth(2, 0, 3)], 4, end_s=4)
    ax = genealogy.draw_tree(found)
    lines = ax.collections[0]
    begun = {
        float(path.vertices[0, 1]): tuple(ink)
        for path, ink in zip(lines.get_paths(), lines.get_colors(), strict=True)
        if path.vertices[0, 0] == 0
    }
    assert len(begun) == len(set(begun.values())) == 4
    assert to_rgba(genealogy.OTHERS) not in begun.values()
    assert sorted(label.get_text() for label in ax.get_yticklabels()) == ["0", "1", "2", "3"]
    assert {text.get_text() for text in ax.texts} == {"2", "3"}
