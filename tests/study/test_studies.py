"""The two training files run from top to bottom, and treat communicator and policy as the contract says."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import spawnsim
from spawnsim import cli
from spawnsim.cli import sweep as commands
from spawnsim.errors import ParameterError
from spawnsim.random import Streams
from spawnsim.record.table import Table
from spawnsim.run.program import load, program

STUDIES = Path(__file__).parents[2] / "studies"


class Recorder:
    """Keeps rows and events."""

    def __init__(self):
        self.rows, self.events = [], []

    def __call__(self, **values):
        self.rows.append(values)

    def event(self, kind, **fields):
        self.events.append((kind, fields))


class Solo:
    """One rank, no clock: as much of a communicator as a training file touches itself."""

    def __init__(self):
        self.rng, self.record, self.computed = Streams(7, 0), Recorder(), 0

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1

    @contextmanager
    def compute(self):
        self.computed += 1
        yield SimpleNamespace(seconds=0.01)


class Spy:
    """A policy that exchanges nothing and notes how it was called."""

    made: list[Spy]

    def __init__(self, *builder, **how):
        self.how, self.calls, self.shut = how, [], 0
        self.built = [build() for build in builder]
        Spy.made.append(self)

    def __call__(self, iteration, model, optimizer, local_metric=None, group=None):
        self.calls.append((iteration, local_metric, group))
        return model, optimizer, {"replaced": False}

    def shutdown(self):
        self.shut += 1


@pytest.fixture
def spies(monkeypatch):
    """Put spies in the places of both policies."""
    Spy.made = []
    for name in ("AverageAllPolicy", "AsyncSelectiveAveragingPolicy"):
        monkeypatch.setitem(vars(spawnsim), name, Spy)
    return Spy.made


@pytest.mark.parametrize("study", ["digits", "hypergrid"])
@pytest.mark.parametrize("policy", ["none", "average", "selective"])
def test_a_study_records_a_row_per_iteration(study, policy, spies):
    """Every iteration computes once and records once; the policy sees each, and is shut down once."""
    comm = Solo()
    load(STUDIES / f"{study}.py")(comm, policy=policy, iterations=20)
    assert [row["iteration"] for row in comm.record.rows] == list(range(20)) and comm.computed == 20
    assert all(("replaced" in row) == (policy != "none") for row in comm.record.rows)
    for spy in spies:
        assert [call[0] for call in spy.calls] == list(range(20)) and spy.shut == 1
        assert all(call[2] is comm for call in spy.calls)
    assert len(spies) == (policy != "none")


def test_digits_offers_its_loss_and_measures_accuracy_now_and_then(spies):
    """The metric is minus the loss; accuracy comes every tenth iteration and rises."""
    comm = Solo()
    load(STUDIES / "digits.py")(comm, policy="average", iterations=60)
    assert [call[1] for call in spies[0].calls] == [-row["loss"] for row in comm.record.rows]
    accuracy = {row["iteration"]: row["accuracy"] for row in comm.record.rows if "accuracy" in row}
    assert list(accuracy) == [9, 19, 29, 39, 49, 59] and accuracy[59] > max(0.6, accuracy[9])


def test_digits_can_be_judged_by_images_that_it_does_not_report(spies):
    """With judge="accuracy" the metric is an accuracy, new every tenth iteration, on the other half of the images."""
    comm = Solo()
    load(STUDIES / "digits.py")(comm, policy="average", iterations=30, judge="accuracy")
    metrics = [call[1] for call in spies[0].calls]
    assert len(set(metrics[:10])) == 1 and metrics[0] < metrics[29] <= 1


def test_hypergrid_tells_each_mode_once(spies):
    """Events hold the distinct modes, rows their number."""
    comm = Solo()
    load(STUDIES / "hypergrid.py")(comm, policy="none", iterations=150, height=8)
    modes = [fields["mode"] for _, fields in comm.record.events]
    assert sorted(modes) == sorted(set(modes)) and len(modes) == comm.record.rows[-1]["modes_found"] == 4


@pytest.mark.parametrize("study", ["digits", "hypergrid"])
def test_an_unknown_policy_is_refused_with_the_known_ones(study, spies):
    """The message lists what can be chosen."""
    with pytest.raises(ParameterError, match=r"policy='gossip': choose \"?none"):
        load(STUDIES / f"{study}.py")(Solo(), policy="gossip")


@pytest.mark.parametrize("policy", ["none", "average", "selective", "groups", "clock"])
def test_digits_judges_the_mean_of_all_models_under_each_policy(policy):
    """12 ranks with learning rates of their own: at each tenth of a second, until the last one has ended."""
    how = {"policy": policy, "iterations": 40, "spread": 0.5, "group_size": 4, "consensus_every_s": 0.1}
    run = spawnsim.run(
        STUDIES / "digits.py", ranks=12, parameters=how, compute="10 ms", stragglers="lognormal:0.3"
    )
    found = [event for event in run.events if event["kind"] == "consensus"]
    assert [event["at_s"] for event in found] == pytest.approx([0.1 * tick for tick in range(len(found))])
    assert 0.1 * len(found) > run.table["time_s"].max() > 0.4 - 1e-6
    assert found[0]["accuracy"] < 0.3 < 0.5 < found[-1]["accuracy"]
    assert run.totals["iterations"] == 40


def test_the_demo_takes_apart_a_run_of_several_policies_in_turn():
    """Each part has all of its ranks' rows, by the name of its policy, and a clock that begins with it."""
    how = {"policy": "none+average+selective", "iterations": 12, "accuracy_every": 4}
    run = spawnsim.run(
        STUDIES / "digits.py", ranks=11, parameters=how, compute="10 ms", stragglers="slow:0.1,3"
    )
    parts = [*inside("demo")["apart"](run)]
    assert [part.what["parameters"]["policy"] for part in parts] == ["none", "average", "selective"]
    for part in parts:
        assert part.table["iteration"].tolist() == [*range(12)] * 11
        assert part.table["rank"].tolist() == [rank for rank in range(11) for _ in range(12)]
        # The slow rank computes for 30 ms an iteration; an average waits for it in the first one.
        assert 0.0099 < part.table["time_s"].min() < 0.031 and part.table["time_s"].max() < 0.4
    with pytest.raises(ParameterError, match=r"policy='none.gossip': choose none"):
        load(STUDIES / "digits.py")(Solo(), policy="none+gossip")


@pytest.mark.parametrize(
    ("name", "parameter"),
    [("digits", "policy"), ("hypergrid", "policy"), ("groups", "matchmaking"), ("selective_settings", "strategy"),
     ("diloco_measured", "algorithm")],
)  # fmt: skip
def test_a_choice_that_a_study_does_not_have_is_refused_before_the_run(name, parameter):
    """By `sweep --dry-run`, too: no misspelt name falls through to another branch."""
    with pytest.raises(ParameterError, match=f"{parameter}='dilco': give "):
        program(STUDIES / f"{name}.py", {parameter: "dilco"})
    path = str(STUDIES / f"{name}.py")
    assert cli.main(["sweep", path, "--ranks", "2", "--set", f"{parameter}=dilco", "--dry-run"]) == 2


# ------------------------------------------------------------------------------- studies: what they reckon, and say
def inside(name):
    """Return the names of a study's file."""
    return commands.load(STUDIES / f"{name}.py").__globals__


@pytest.mark.parametrize(
    ("noise", "every", "draw"),
    [
        ("exponential:0.5", 1, lambda rng, shape: 0.5 + 0.5 * rng.standard_exponential(shape)),
        ("exponential:1", 10, lambda rng, shape: rng.standard_gamma(10, shape) / 10),
        ("lognormal:0.3", 1, lambda rng, shape: rng.lognormal(-0.045, 0.3, shape)),
        ("pareto:2.5", 1, lambda rng, shape: 0.6 * (1 + rng.pareto(2.5, shape))),
        ("bimodal:0.01,10", 1, lambda rng, shape: np.where(rng.random(shape) < 0.01, 10.0, 1.0)),
        ("slow:0.02,5", 10, lambda rng, shape: np.where(rng.random(shape) < 0.02, 5.0, 1.0)),
    ],
)
def test_the_largest_of_37_draws_has_the_closed_form(noise, every, draw):
    """Against 20,000 drawings, within five standard errors."""
    largest = draw(np.random.default_rng(7), (20_000, 37)).max(1)
    scaling = inside("scaling")
    assert scaling["NOISES"].keys() >= {noise} or noise == "exponential:0.5"
    if noise == "exponential:1":
        assert scaling["expected"](noise, 1, 3) == pytest.approx(11 / 6)
    assert abs(scaling["expected"](noise, every, 37) - largest.mean()) < 5 * largest.std() / 20_000**0.5


def test_synchronous_rounds_last_as_long_as_their_slowest_rank():
    """One of 12 ranks is ten times slower: each round of one step is 10 s, of ten steps 100 s."""
    lengths = inside("scaling")["round_lengths"]
    assert lengths(1, "rank:3,10", 12, (1, 5)) == pytest.approx([10.0] * 4, rel=1e-4)
    assert lengths(10, "rank:3,10", 12, (1, 31)) == pytest.approx([100.0] * 3, rel=1e-4)


def test_the_table_of_networks_says_what_it_shows():
    """Equal but for rounding is no ranking; the title counts the cases, and the caption tells the ranks."""
    networks = inside("networks")
    assert networks["ranking"]({"average, ring": 2.001, "average, doubling": 2.0, "selective": 1.0}) == [
        "selective", "average, ring", "average, doubling",
    ]  # fmt: skip

    def rows(*times):
        ways = [dict(zip(networks["WAYS"], each, strict=True)) for each in times]
        return [
            {
                "platform": "p",
                "size": "1 MB",
                "model": model,
                "ms": took,
                "ranking": networks["ranking"](took),
            }
            for model, took in zip(networks["MODELS"], ways, strict=True)
        ]

    drawn = networks["figure"](rows((1, 2, 3), (2, 1, 3)), 8)
    assert "decides the ranking in 1 of 1" in drawn.get_suptitle()
    assert "8 virtual ranks" in drawn.get_supxlabel()
    assert "rank alike" in networks["title"](rows((1, 2, 3), (4, 5, 6)))


def test_a_rank_that_is_away_costs_the_others_little_if_nobody_waits():
    """12 ranks, one is away for 10 s of 120: an average waits for its death to be known, replacement goes on."""
    study = inside("faults_goodput")
    shares = {}
    for policy in ("average, each step", "selective, each 10 steps"):
        assert study["goodput"]("Hockney", policy, np.inf, (12, 1)) == (pytest.approx(1.0, abs=0.02), 0)
        run = spawnsim.run(
            study["main"], ranks=12, deadline_s=1e6, faults="crash:7@50.5s; restart:7@60.5s",
            parameters={"policy": policy},
        )  # fmt: skip
        assert [each["kind"] for each in run.events if each["kind"] in ("crash", "restart")] == [
            "crash",
            "restart",
        ]
        shares[policy] = run.table.rows / (12 * 120)
    assert 0.94 < shares["average, each step"] <= shares["selective, each 10 steps"] < 1 - 9 / 1440


def test_the_verdict_between_two_policies_is_of_paired_differences(monkeypatch):
    """Five seeds: ahead in each of them, behind in each, or neither; a straggler's rows are also by iterations."""
    study = inside("selective_or_average")
    setting = study["Setting"]("some", modes=True)
    seeds = range(5)
    runs = {
        (setting, "Hockney", policy, seed): (policy, seed)
        for policy in setting.policies("Hockney") for seed in seeds
    }  # fmt: skip
    for gains, verdict in (
        ([1, 2, 3, 1, 2], "wins"),
        ([-1, -2, -3, -1, -2], "loses"),
        ([1, -2, 0, 1, -1], "level"),
    ):
        monkeypatch.setitem(
            study, "modes", lambda run, _, gains=gains: 9 * run[1] + gains[run[1]] * (run[0] == "selective")
        )
        assert study["compared"](setting, runs, "Hockney", seeds, True)["verdict"] == verdict
    names = [each.name for each in study["SETTINGS"]]
    assert len(set(names)) == len(names)


def test_what_a_policy_came_to_is_the_higher_of_median_rank_and_mean_model():
    """At a time: rows and judgements that come later do not count, and who has no row yet counts as 0."""
    study = inside("selective_or_average")
    table = {
        "rank": np.array([0, 0, 1, 2]), "time_s": np.array([0.1, 0.9, 0.2, 2.0]),
        "accuracy": np.array([0.3, 0.5, 0.6, 0.9]),
    }  # fmt: skip
    events = [
        {"kind": "consensus", "at_s": at, "accuracy": each}
        for at, each in ((0.0, 0.1), (0.5, 0.4), (1.5, 0.8))
    ]
    run = SimpleNamespace(table=Table(table), events=events)
    assert study["accuracy"](run, 1.0) == 0.5
    assert study["accuracy"](run, 0.15) == 0.1
    assert study["accuracy"](run, np.inf) == 0.8


@pytest.mark.parametrize("strategy", ["none", "weighted_mean", "pbt"])
def test_settings_of_replacement_are_tried_on_ranks_whose_rates_differ(strategy):
    """12 ranks, 20 iterations: two measurements each, and donors as the strategy has them."""
    how = {"strategy": strategy, "iterations": 20, "every": 5}
    run = spawnsim.run(STUDIES / "selective_settings.py", ranks=12, seed=7, compute="10 ms", parameters=how)
    assert np.count_nonzero(~np.isnan(run.table["accuracy"])) == 24
    donors = [len(event["donors"]) for event in run.events if event["kind"] == "replacement"]
    assert (len(donors) > 0) == (strategy != "none")
    assert all(count == 1 if strategy == "pbt" else count > 1 for count in donors)
