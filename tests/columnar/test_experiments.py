"""Many experiments in one run over columns: their results are those of separate runs."""

import itertools

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim import columnar
from spawnsim.cli import main as command
from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OuterOptimizerPolicy
from tests.columnar.test_training import batches, built, loss_of

RANKS, ITERATIONS = 24, 40


def margin(model):
    """Return a score of a model."""
    return model[2].weight.abs().mean()


def middle(model):
    """Return another score of a model."""
    return model[0].weight.mean()


TRAINING = columnar.Training(built, loss_of, batches, score=margin, report=(middle,))
OTHER = columnar.Training(lambda rng: built(rng, "adam"), loss_of, batches, score=margin, report=(middle,))


def experiment(policy, training=TRAINING, **given):
    """Return an experiment with the usual size."""
    return columnar.Experiment(
        policy=policy, training=training, **{"ranks": RANKS, "iterations": ITERATIONS} | given
    )


def mixed(out=None):
    """Return experiments that differ in policy, cadence, seed, size, length, stragglers, faults and optimizer."""
    selective = [
        AsyncSelectiveAveragingPolicy(None, every, ratio, cooldown=cooldown)
        for every, ratio, cooldown in ((5, 0.25, 0), (10, 0.1, 20), (7, 0.5, 0))
    ]
    found = [experiment(policy, seed=seed) for policy in selective for seed in (1, 2)]
    found += [experiment(AverageAllPolicy(4), seed=seed, stragglers="lognormal:0.3") for seed in (1, 3)]
    found.append(experiment(AverageAllPolicy(5), ranks=7, iterations=23, platform="ethernet-10g"))
    found.append(experiment(selective[0], faults="crash:3@0.105s; crash:9@0.2s", detection_s=0.1))
    found.append(experiment(OuterOptimizerPolicy(8), ranks=40, seed=5))
    found += [experiment(selective[0], OTHER, seed=seed) for seed in (1, 2)]
    found.append(experiment(selective[1], None, model_nbytes=1000, mtbf_s=0.5, ranks=300))
    return found


def test_experiments_end_as_separate_runs():
    """Digests, totals, events and rows are equal."""
    together = columnar.run_all(mixed())
    for own, alone in zip(together, [columnar.run_all([each])[0] for each in mixed()], strict=True):
        assert own.totals["digest"] == alone.totals["digest"]
        assert {**own.totals, "wall_seconds": 0} == {**alone.totals, "wall_seconds": 0}
        assert own.events == alone.events
        for name in alone.table:
            np.testing.assert_array_equal(own.table[name], alone.table[name], err_msg=name)
    assert {"margin", "middle", "loss"} <= {*together[0].table}
    for event in together[6].events:  # a linear function: of the mean it is the mean
        if event["kind"] == "round":
            own = together[6].table.where(together[6].table["iteration"] == event["iteration"])["middle"]
            assert event["mean_middle"] == pytest.approx(own.mean(), rel=1e-4, abs=1e-7)
    assert len({own.totals["digest"] for own in together}) == len(together)


@pytest.mark.parametrize("ranks", [600, 200])
def test_models_of_a_large_fleet_are_those_of_separate_runs(ranks):
    """Chunks contain rows of several experiments (200 ranks), or of one (600, more than one chunk)."""
    every = [experiment(AverageAllPolicy(3), ranks=ranks, iterations=6, seed=seed) for seed in range(4)]
    alone = [columnar.run_all([each])[0].totals["digest"] for each in every]
    assert [own.totals["digest"] for own in columnar.run_all(every)] == alone


def test_batches_may_come_from_the_global_generators():
    """Each experiment continues with its own generators."""

    def drawn(rng, rank, size):
        while True:
            yield torch.randn(8, 6), torch.randint(4, (8,))

    training = columnar.Training(built, loss_of, drawn)
    every = [experiment(AverageAllPolicy(3), training, ranks=ranks, iterations=9) for ranks in (5, 12)]
    alone = [columnar.run_all([each])[0].totals["digest"] for each in every]
    assert [own.totals["digest"] for own in columnar.run_all(every)] == alone


def test_model_is_of_the_experiment_whose_round_it_is():
    """Experiments may share one Training."""
    seen = {}

    def noting(seed):
        return lambda round_: seen.setdefault(seed, []).append(margin(TRAINING.model(3)).item())

    run = columnar.run_all(
        [experiment(AverageAllPolicy(10), seed=seed, on_round=noting(seed)) for seed in range(3)]
    )
    for seed, own in enumerate(run):
        last = own.table.where(own.table["rank"] == 3)
        # The rows have the score before the average, the callback after it.
        assert len(seen[seed]) == 4
        assert len({*seen[seed]}) == 4
        assert not {*seen[seed]} & {*last["margin"].tolist()}
    assert not {*seen[0]} & {*seen[1]}


def test_an_error_names_its_experiment():
    """An error of a share names rank and iteration, an error of a policy its experiment."""

    def ending(rng, rank, size):
        yield from itertools.islice(batches(rng, rank, size), 30 if rank == 5 else 100)

    training = columnar.Training(built, loss_of, ending)
    with pytest.raises(UsageError, match="batches of rank 5 ended before iteration 30"):
        columnar.run_all([experiment(AverageAllPolicy(10), training, seed=seed) for seed in range(2)])

    class Wrong:
        def columns(self, metrics, expired):
            return np.zeros(3, np.bool_)

    policies = [
        AsyncSelectiveAveragingPolicy(None, 10, selection=each) if each else AverageAllPolicy(10)
        for each in (None, Wrong())
    ]
    with pytest.raises(ValueError, match="broadcast") as found:
        columnar.run_all([experiment(each, seed=4) for each in policies])
    assert any(
        "AsyncSelectiveAveragingPolicy, 24 ranks, seed 4, iteration 10" in each
        for each in found.value.__notes__
    )


def test_reports_need_names_of_their_own():
    """They are columns of rows."""
    with pytest.raises(ParameterError, match="names of their own"):
        columnar.Training(built, loss_of, batches, report=(margin, margin))
    with pytest.raises(ParameterError, match="names of their own"):
        columnar.Training(built, loss_of, batches, report=(lambda model: margin(model),))


def test_a_sweep_over_columns_has_the_numbers_of_ordinary_runs(tmp_path, capsys):
    """Averages of digits: the same models, clocks and bytes; the second command finds all runs done."""
    line = "sweep digits -n 12 --set iterations=20 --seeds 2 --compute 10ms --straggler lognormal:0.3"
    assert (
        command([*line.split(), "--set", "policy=average", "--out", str(tmp_path / "a"), "--jobs", "0"]) == 0
    )
    columns = [*line.split(), "--columns", "--jobs", "0", "--out", str(tmp_path / "b")]
    assert command([*columns, "--set", "policy=average,selective"]) == 0
    names = ("virtual_seconds", "bytes", "messages", "final:accuracy", "final:loss")
    ordinary, own = (spawnsim.Sweep.load(tmp_path / each).table(*names[3:]) for each in "ab")
    own = own.where(own["policy"] == "average")
    for name in names:
        np.testing.assert_allclose(own[name], ordinary[name], rtol=1e-6, err_msg=name)
    capsys.readouterr()
    assert command([*columns, "--set", "policy=average,selective", "--dry-run"]) == 0
    assert "4 runs, 0 to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--set policy=clock", "policy='clock': over columns choose none, average,"),
        ("--set alpah=1", "takes no alpah; did you mean alpha?"),
        ("--set interval_ms=5", "takes no interval_ms"),
        ("--ties reverse", "--columns has no --ties"),
        ("--record-every 2", "--columns has no --record-every"),
    ],
)
def test_a_sweep_refuses_settings_without_a_form_over_columns(more, words, tmp_path, capsys):
    """Before anything runs."""
    line = f"sweep digits --columns -n 12 --out {tmp_path / 'a'}"
    assert command([*line.split(), *more.split()]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
