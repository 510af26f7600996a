"""The two training files run from top to bottom, and treat communicator and policy as the contract says."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.random import Streams
from spawnsim.run.program import load

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
