"""BatchNorm: each rank's running mean and variance lie in rows of their own, and end as those of eager steps."""

from __future__ import annotations

import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from support.both_ways import RANKS, both, once
from torch import nn
from torch.nn.functional import cross_entropy

import spawnsim
from spawnsim import AsyncSelectiveAveragingPolicy, AverageAllPolicy, Evaluation, TrainingStep
from spawnsim.training import row_step, threads, tracing
from tests.training import test_settings
from tests.training.test_steps import accuracy_of, loss_of, sgd

COUNTS = 45  # of steps: more than 32, after which calls are repeated from a record


def batch(rank, iteration):
    """Inputs in float64, in which rounding cannot grow to anything."""
    x, y = test_settings.batch(rank, iteration)
    return x.double(), y


def dense(**how):
    """Normalize vectors."""
    return nn.Sequential(
        nn.BatchNorm1d(8, **how), nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5)
    )


def convolution():
    """Normalize pictures."""
    return nn.Sequential(
        nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(),
        nn.Conv2d(4, 4, 2, bias=False), nn.BatchNorm2d(4, affine=False, eps=1e-3), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


def volume():
    """Normalize volumes."""
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2, 1)), nn.BatchNorm3d(2), nn.Flatten(), nn.Linear(8, 5))


class Twice(nn.Module):
    """One normalization that is called twice, a frozen one, one that is never called, and dropout."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, 8), nn.Linear(8, 5), nn.Dropout(0.2)
        self.shared = self.again = nn.BatchNorm1d(8)
        self.frozen, self.idle = nn.BatchNorm1d(8).requires_grad_(False), nn.BatchNorm1d(8, affine=False)
        self.frozen.eval()

    def forward(self, x):
        return self.last(self.drop(self.again(self.first(self.frozen(self.shared(x))))))


class Apart(nn.Module):
    """A normalization in a list, where torch does not find it."""

    def __init__(self):
        super().__init__()
        self.layer, self.norms = nn.Linear(8, 5), [nn.BatchNorm1d(8, affine=False).double()]

    def forward(self, x):
        return self.layer(self.norms[0](x))


class Own(nn.BatchNorm1d):
    """One that may compute anything."""

    def forward(self, x):
        return super().forward(x) * 2


MODELS = {"dense": dense, "convolution": convolution, "volume": volume, "twice": Twice}
OPTIMIZERS = {
    "sgd": functools.partial(sgd, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters()),
}


def found_of(model):
    """Return all that a model holds, parameters and buffers."""
    return {name: each.clone() for name, each in model.state_dict().items()}


def trains(
    comm, build=dense, optimizer_of=sgd, between=lambda model, iteration: None, loss=loss_of, count=COUNTS
):
    """Train a model, whose batches are not centred; return what it holds at the end."""
    torch.manual_seed(comm.rank)
    model = build().double()
    optimizer, step, evaluate = optimizer_of(model), TrainingStep(loss), Evaluation(accuracy_of)
    for iteration in range(count):
        with comm.compute(0.01):
            x, y = batch(comm.rank, iteration)
            info = {"loss": step(model, optimizer, 2 * x + comm.rank, y)}
        between(model, iteration)
        if iteration % 7 == 6:
            model.eval()
            info["accuracy"] = evaluate(model, 2 * x + comm.rank, y)
            model.train()
            if isinstance(model, Twice):
                model.frozen.eval()
        comm.record(iteration=iteration, **info)
    return found_of(model)


def assert_alike(together, eager):
    """Assert the same records, times and models, up to rounding."""
    (one, ends), (other, eager_ends) = together, eager
    assert np.array_equal(one.table["time_s"], other.table["time_s"])
    for name in ("loss", "accuracy"):
        if name in other.table:
            np.testing.assert_allclose(one.table[name], other.table[name], rtol=1e-9, atol=1e-9)
    assert ends.keys() == eager_ends.keys()
    for rank, held in eager_ends.items():
        torch.testing.assert_close(ends[rank], held, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_normalizations_are_computed_together(model, optimizer, sizes):
    """Losses, evaluations, weights, running statistics and counts of batches are those of eager steps."""
    together, eager = both(functools.partial(trains, build=MODELS[model], optimizer_of=OPTIMIZERS[optimizer]))
    assert "warnings" not in together[0].what
    assert max(sizes) > RANKS // 2
    assert_alike(together, eager)
    counts = {
        name: int(each) for name, each in together[1][0].items() if name.endswith("num_batches_tracked")
    }
    if model == "twice":
        assert counts == {
            "shared.num_batches_tracked": 2 * COUNTS, "again.num_batches_tracked": 2 * COUNTS,
            "frozen.num_batches_tracked": 0, "idle.num_batches_tracked": 0,
        }  # fmt: skip
    else:
        assert set(counts.values()) == {COUNTS}


def test_the_same_bits_each_time():
    """Two runs have one digest."""
    (one, ends), _ = both(trains)
    (other, again), _ = both(trains)
    assert one.totals["digest"] == other.totals["digest"]
    assert all(torch.equal(ends[rank][name], again[rank][name]) for rank in ends for name in ends[rank])


def test_a_model_above_the_cache_and_many_ranks(sizes):
    """40 ranks, 150,000 weights."""

    def wide():
        return nn.Sequential(
            nn.Linear(8, 384), nn.BatchNorm1d(384), nn.Linear(384, 384), nn.Linear(384, 5)
        ).double()

    def doubled(model, x, y):
        return cross_entropy(model(x.double()), y)

    together, eager = both(functools.partial(trains, build=wide, loss=doubled, count=6), ranks=40)
    assert max(sizes) == 16  # of 40 ranks: as many weights as the cache holds
    assert_alike(together, eager)


CHANGES = {
    "reset": lambda norm: norm.reset_running_stats(),
    "in place": lambda norm: norm.running_var.mul_(2),
    "replaced": lambda norm: setattr(norm, "running_mean", torch.ones(24, dtype=torch.float64)),
    "by data": lambda norm: setattr(norm.running_mean, "data", torch.ones(24, dtype=torch.float64)),
    "by numpy": lambda norm: norm.running_mean.detach().numpy().__imul__(2),
    "momentum": lambda norm: setattr(norm, "momentum", 0.5),
    "all batches": lambda norm: setattr(norm, "momentum", None),
    "evaluating": lambda norm: norm.eval(),
    "not tracked": lambda norm: setattr(norm, "track_running_stats", False),
    "taken away": lambda norm: [setattr(norm, name, None) for name in ("running_mean", "running_var")],
    "loaded": lambda norm: norm.load_state_dict(nn.BatchNorm1d(24).state_dict()),
    "hooked": lambda norm: norm.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("every", [False, True])
def test_what_a_program_changes_in_the_middle(change, every):
    """Of one rank, or of all, with steps that wait before and behind it."""

    def changes(comm):
        def between(model, iteration):
            if iteration == 20 and (every or comm.rank == 4):
                CHANGES[change](model[2])

        return trains(comm, between=between, count=30)

    assert_alike(*both(changes))


def test_whoever_looks_sees_what_eager_steps_leave():
    """Prints, copies, pickles, state dicts, arrays, numbers, and a forward pass of the program's own."""
    looks = [
        lambda model: float(str(model[0].running_mean).split('[')[1].split(',')[0]),
        lambda model: copy.deepcopy(model)[0].running_mean,
        lambda model: pickle.loads(pickle.dumps(model))[0].running_var,
        lambda model: model.state_dict()["0.running_var"],
        lambda model: torch.tensor(model[0].running_mean.numpy()), lambda model: int(model[0].num_batches_tracked),
        lambda model: model(torch.ones(8, 8).double() + torch.arange(8.0)[:, None]).detach(),
        lambda model: [*model.buffers()][4],
    ]  # fmt: skip
    seen = []

    def main(comm):
        def between(model, iteration):
            if iteration % 3 == comm.rank % 3:
                outcome = looks[(iteration + comm.rank) % len(looks)](model)
                kept.append(outcome.clone() if isinstance(outcome, torch.Tensor) else torch.tensor(outcome))

        kept = []
        found = trains(comm, between=between)
        seen.append((comm.rank, kept))
        return found

    assert_alike(*both(main))
    one, other = dict(seen[:RANKS]), dict(seen[RANKS:])
    for rank, kept in one.items():
        assert {type(each) for each in kept} == {torch.Tensor}
        torch.testing.assert_close(kept, other[rank], rtol=1e-9, atol=1e-9)


def test_views_that_were_taken_before():
    """Whoever has an array of the statistics from before the first step has that of the model."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = dense().double()
        before, view = model[0].running_mean.numpy(), model[2].running_var[:3]
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(12):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
        float(loss)
        assert np.array_equal(before, model[0].running_mean)
        assert torch.equal(view, model[2].running_var[:3])
        return found_of(model)

    assert_alike(*both(main))


REFUSED = {
    "all batches": (functools.partial(dense, momentum=None), "0.running_mean"),
    "a class of its own": (lambda: nn.Sequential(Own(8), nn.Linear(8, 5)), "0.running_mean"),
    "in a list": (Apart, "BatchNorm1d, whose forward pass changes buffers"),
    "one for two": (lambda: _joined(dense().double()), "share memory"),
    "instances": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(),
                              nn.Linear(8, 5)),
        "1.running_mean",
    ),
}  # fmt: skip


def _joined(model):
    model.append(nn.BatchNorm1d(5).double())
    model.append(nn.BatchNorm1d(5).double())
    model[6].running_mean = model[5].running_mean
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_what_steps_alone_still(kind):
    """To the bits of eager steps, with one warning that says why."""
    build, why = REFUSED[kind]
    (together, ends), (eager, wanted) = both(functools.partial(trains, build=build, count=10))
    (warning,) = together.what["warnings"]
    assert "step alone" in warning and why in warning
    assert np.array_equal(together.table["loss"], eager.table["loss"])
    assert all(torch.equal(ends[rank][name], wanted[rank][name]) for rank in ends for name in ends[rank])


def test_a_loss_that_normalizes_by_itself_steps_alone():
    """A normalization that is not the model's, but the loss's, is no part of a row."""

    def main(comm):
        norm = nn.BatchNorm1d(8, affine=False).double()
        found = trains(
            comm, build=lambda: nn.Linear(8, 5), loss=lambda model, x, y: cross_entropy(model(norm(x)), y)
        )
        return found | {"norm": norm.running_mean.clone()}

    together, eager = both(main)
    assert_alike(together, eager)


def test_evaluations_in_training_mode_count():
    """They change the statistics, and are done at once."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = dense().double()
        optimizer, step, evaluate = sgd(model), TrainingStep(loss_of), Evaluation(accuracy_of)
        for iteration in range(12):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss, accuracy=evaluate(model, *batch(comm.rank, 100 + iteration)))
        return found_of(model)

    together, eager = both(main)
    assert_alike(together, eager)
    assert int(together[1][0]["0.num_batches_tracked"]) == 24


def test_a_step_that_fails_leaves_statistics_as_they_were():
    """The others go on, and the failing rank may, too."""

    def refusing(model, x, y):
        out = model(x)
        if y.min() < 0:  # of each row, so all step alone here
            raise ValueError("a label below 0")
        return cross_entropy(out, y)

    def indexing(model, x, y):
        return -torch.log_softmax(model(x), 1).gather(1, y[:, None]).mean()

    def main(comm, loss):
        torch.manual_seed(comm.rank)
        model = dense().double()
        optimizer, step = sgd(model), TrainingStep(loss)
        for iteration in range(12):
            x, y = batch(comm.rank, iteration)
            if comm.rank == 5 and iteration == 6:
                y = y + 100
            failed = False
            try:
                with comm.compute(0.01):
                    loss = step(model, optimizer, x, y)
                float(loss)
            except Exception:  # noqa: BLE001 - what torch raises for an index
                failed = True
            comm.record(iteration=iteration, failed=failed)
        return found_of(model)

    (together, ends), (eager, wanted) = both(functools.partial(main, loss=indexing))
    assert together.table["failed"].sum() == eager.table["failed"].sum() == 1
    for rank in set(range(RANKS)) - {5}:
        torch.testing.assert_close(ends[rank], wanted[rank], rtol=1e-9, atol=1e-9)
    # Eagerly the forward pass had counted before the loss failed.
    assert int(ends[5]["0.num_batches_tracked"]) == 11 and int(wanted[5]["0.num_batches_tracked"]) == 12


@pytest.mark.parametrize("policy", ["average", "selective"])
def test_policies_exchange_statistics(policy, sizes):
    """Averages of all, and replacement, also of ranks that are killed at several times."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = convolution().double()
        optimizer, step = sgd(model, momentum=0.9), TrainingStep(loss_of)
        if policy == "average":
            exchange = AverageAllPolicy(average_every=4)
        else:

            def anew():
                model = convolution().double()
                return model, sgd(model, momentum=0.9)

            exchange = AsyncSelectiveAveragingPolicy(anew, average_every=4, replacement_ratio=0.3)
        for iteration in range(40):
            with comm.compute(0.01):
                x, y = batch(comm.rank, iteration)
                loss = step(model, optimizer, 2 * x + comm.rank, y)
            model, optimizer, info = exchange(iteration, model, optimizer, local_metric=-loss, group=comm)
            comm.record(iteration=iteration, loss=loss, replaced=info.get("replaced", False))
        exchange.shutdown()
        return found_of(model)

    together, eager = both(main, ranks=12)
    assert max(sizes) > 6
    assert np.array_equal(together[0].table["replaced"], eager[0].table["replaced"])
    assert_alike(together, eager)


def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path):
    """What a checkpoint saves of a model is what its steps have made of it."""

    def main(comm, iterations: int = 16):
        torch.manual_seed(comm.rank)
        model = dense().double()
        optimizer, step = sgd(model, momentum=0.9), TrainingStep(loss_of)
        saved = comm.restore(model=model, optimizer=optimizer)
        for iteration in range(saved.iteration if saved else 0, iterations):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss, iteration=iteration)
            if iteration == 6:
                comm.checkpoint(iteration=7, model=model, optimizer=optimizer)
        comm.record(mean=model[0].running_mean.sum(), batches=int(model[2].num_batches_tracked))

    how = {"ranks": RANKS, "stragglers": "lognormal:0.3"}
    whole = spawnsim.run(main, out=tmp_path / "whole", **how)
    spawnsim.run(main, out=tmp_path / "part", parameters={"iterations": 9}, **how)
    again = spawnsim.run(main, out=tmp_path / "part", resume=True, **how)
    assert again.totals["digest"] == whole.totals["digest"]
    for name in ("loss", "mean", "batches"):
        assert np.array_equal(again.table[name], whole.table[name], equal_nan=True)
    assert np.nanmax(again.table["batches"]) == 16


def test_ranks_that_die_and_come_again():
    """At the start, amid steps that wait, and near the end; each life begins with statistics of its own."""
    faults = "crash:2@0.001s; crash:5@0.123s; restart:5@0.2s; crash:7@0.2s; restart:7@0.21s; crash:11@0.39s"
    assert_alike(*both(functools.partial(trains, build=convolution), faults=faults))


def test_several_threads_keep_their_own_rows(monkeypatch):
    """Up to rounding: torch's BatchNorm adds up in another order where it has more threads, alone too.

    Eagerly with one thread: torch's own wait for each other in each operation, for minutes on a busy machine.
    """
    eager = once(trains, True)
    monkeypatch.setattr(row_step, "CHUNK", (5, 5))
    monkeypatch.setattr(tracing, "CALLS_BEFORE", 1)
    mapped, sides = threads.Threads.map, []

    def counted(self, call, items):
        sides.append(len(items))
        return mapped(self, call, items)

    monkeypatch.setattr(threads.Threads, "map", counted)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_alike(once(trains, False), eager)
    finally:
        torch.set_num_threads(before)
    assert max(sides) > 1


def _precise(model, x):
    model.train()
    out = model(x)
    model.eval()
    return out.mean()


def _halving(model, x):
    model[0].running_mean.mul_(0.5)
    return model(x).mean()


EVALUATIONS = {
    "in training mode": _precise,
    "by function": lambda model, x: nn.functional.batch_norm(
        x, model[0].running_mean, model[0].running_var, training=True
    ).mean(),
    "in place": _halving,
}


@pytest.mark.parametrize("kind", EVALUATIONS)
def test_evaluations_that_change_statistics_are_made_at_once(kind):
    """Also where the model is not in training mode before and after."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = dense().double()
        optimizer, step, evaluate = sgd(model), TrainingStep(loss_of), Evaluation(EVALUATIONS[kind])
        for iteration in range(6):
            x, y = batch(comm.rank, iteration)
            with comm.compute(0.01):
                loss = step(model, optimizer, x, y)
            model.eval()
            comm.record(loss=loss, accuracy=evaluate(model, x))
            model.train()
        return found_of(model)

    assert_alike(*both(main))


def _assigns(model, x, y):
    model[0].running_mean = 0.5 * model[0].running_mean + 0.1 * x.detach().mean(0)
    return cross_entropy(model(x), y)


def _restores(model, x, y):
    loss = cross_entropy(model(x), y)
    kept = model[0].running_mean.clone(), model[0].running_var.clone()
    loss = loss + cross_entropy(model(x + 1), y)
    model[0].running_mean, model[0].running_var = kept
    return loss


def _takes_away(model, x, y):
    model[0].running_mean = model[0].running_var = None
    return cross_entropy(model(x), y)


@pytest.mark.parametrize("loss", [_assigns, _restores])
def test_losses_that_assign_statistics_step_alone(loss):
    """Rows would not notice."""
    together, eager = both(functools.partial(trains, loss=loss, count=8))
    assert any("it assigns buffers" in each for each in together[0].what["warnings"])
    assert_alike(together, eager)


def test_a_loss_that_takes_statistics_away_does():
    """From its first call on."""
    together, eager = both(functools.partial(trains, loss=_takes_away, count=8))
    assert_alike(together, eager)
    assert "0.running_mean" not in together[1][0]


def test_statistics_that_a_step_returns_are_those_of_its_time():
    """Copies, eagerly, too."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = dense().double()
        optimizer = sgd(model)
        step, kept = TrainingStep(lambda m, x, y: (loss_of(m, x, y), m[0].num_batches_tracked)), []
        for iteration in range(5):
            with comm.compute(0.01):
                loss, count = step(model, optimizer, *batch(comm.rank, iteration))
            kept.append(count)
            comm.record(loss=loss)
        return {"counts": torch.stack(kept)}

    together, eager = both(main)
    assert_alike(together, eager)
    assert together[1][0]["counts"].tolist() == [1, 2, 3, 4, 5]
