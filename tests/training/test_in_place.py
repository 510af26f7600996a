"""Changes in place, anomalies, parametrizations, classes made for one object, rows taken anew: as eagerly, or alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.both_ways import RANKS, both
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations

import spawnsim
from spawnsim import Evaluation, TrainingStep
from spawnsim.errors import RankError, program_traceback
from tests.training.test_settings import batch


def loss_of(model, x, y):
    """The usual loss."""
    return cross_entropy(model(x), y)


def assert_alone(main, why, **how):
    """Assert the bits of eager steps, and one warning that tells the reason."""
    (together, ends), (eager, wanted) = both(main, **how)
    (warning,) = together.what["warnings"]
    assert "step alone" in warning and why in warning
    for name in eager.table:
        if name in ("loss", "value"):
            assert np.array_equal(together.table[name], eager.table[name])
    torch.testing.assert_close(ends, wanted, rtol=0, atol=0)


def _clipped(model):
    with torch.no_grad():
        model.weight.clamp_(-0.2, 0.2)


WEIGHTS = {
    "clamp_": _clipped,
    "clamp_ of data": lambda model: model.weight.data.clamp_(-0.2, 0.2),
    "masked_fill_": lambda model: model.weight.data.masked_fill_(model.weight.data > 0.3, 0.0),
    "renorm_": lambda model: model.weight.data.renorm_(2, 0, 0.5),
    "fill_diagonal_": lambda model: model.weight.data.fill_diagonal_(0.0),
    "mul_": lambda model: model.weight.data.mul_(0.9),
}


@pytest.mark.parametrize("change", WEIGHTS)
def test_a_loss_that_changes_weights_steps_alone(change):
    """Whether or not the ranks of a call are neighbours."""

    def changing(model, x, y):
        WEIGHTS[change](model)
        return cross_entropy(model(x), y)

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Linear(8, 5), TrainingStep(changing)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(8):
            with comm.compute(0.01 * (1 + comm.rank % 2)):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
        return model.weight.detach().clone()

    assert_alone(main, "it changes a tensor that it was given")


def test_embeddings_with_a_norm_step_alone():
    """They change their weights in each forward pass; words that a rank never saw stay as they are."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Linear(8, 5)), TrainingStep(loss_of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(6):
            count, first = 5 if comm.rank == 5 and iteration > 2 else 6, 10 if comm.rank == 5 else 0
            with comm.compute(0.01):
                loss = step(
                    model,
                    optimizer,
                    torch.randint(first, first + 10, (count,)),
                    torch.randint(0, 5, (count,)),
                )
            comm.record(loss=loss)
        return model[0].weight.detach().clone()

    assert_alone(main, "it changes a tensor that it was given")


INPUTS = {
    "masked_fill_": lambda x: x.masked_fill_(x > 1, 0.0), "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "zero_": lambda x: x[:2].zero_(), "fill_": lambda x: x[0].fill_(1), "triu_": lambda x: x.triu_(),
    "cumsum_": lambda x: x.cumsum_(0), "mul_": lambda x: x.mul_(0.5),
    "dropout": lambda x: nn.Dropout(0.5, inplace=True)(x),
}  # fmt: skip


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("change", INPUTS)
def test_a_loss_that_changes_its_batch_steps_alone(change, dropout):
    """The batch ends as after eager steps, on each rank; also behind dropout, which is tried apart."""

    def changing(model, x, y):
        INPUTS[change](x)
        return cross_entropy(model(x), y)

    def main(comm):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Dropout(0.3), nn.Linear(8, 5)) if dropout else nn.Linear(8, 5)
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), TrainingStep(changing)
        x, y = torch.randn(6, 8), torch.randint(0, 5, (6,))
        for _ in range(4):
            with comm.compute(0.01):
                loss = step(model, optimizer, x, y)
            comm.record(loss=loss)
        return x, torch.rand(2)

    assert_alone(main, "it changes a tensor that it was given")


def test_what_changes_the_shape_of_a_view_is_no_change(sizes):
    """`squeeze_` of a view of the batch: the batch stays as it is."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = nn.Linear(8, 5)
        step = TrainingStep(lambda m, x, y: cross_entropy(m(x), y.view(-1, 1).squeeze_(1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(5):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)

    (together, _), (eager, _) = both(main)
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-5)
    assert max(sizes) > RANKS // 2 and "warnings" not in together.what


def test_many_shapes_are_one_function(sizes):
    """One step with ever new shapes is computed together all the same."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Linear(8, 5), TrainingStep(loss_of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(90):
            x, y = batch(0, 0)
            with comm.compute(0.01):
                step(model, optimizer, x.repeat(1 + iteration, 1), y.repeat(1 + iteration))

    assert "warnings" not in spawnsim.run(main, ranks=5).what
    assert sum(sizes) == 90 * 5


def test_an_evaluation_that_changes_weights_is_made_at_once():
    """Between steps that are carried out together."""

    def clipping(model, x):
        _clipped(model)
        return model(x).mean()

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step, evaluate = nn.Linear(8, 5), TrainingStep(loss_of), Evaluation(clipping)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(8):
            x, y = batch(comm.rank, iteration)
            with comm.compute(0.01):
                loss = step(model, optimizer, x, y)
            comm.record(loss=loss, value=evaluate(model, x))
        return model.weight.detach().clone()

    (together, ends), (eager, wanted) = both(main)
    np.testing.assert_allclose(together.table["value"], eager.table["value"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ends, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["around each step", "from then on"])
def test_anomalies_are_looked_for_where_a_program_asks(how):
    """Also once calls are repeated from a record: the same rank raises at the same time."""

    def rooted(model, x):
        return model(x).square().sum().sqrt()  # its gradient at 0 is NaN

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Linear(8, 5, bias=False), TrainingStep(rooted)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for iteration in range(45):
            x = torch.zeros(6, 8) if (comm.rank, iteration) == (3, 42) else torch.randn(6, 8)
            if how == "from then on" and iteration == 38:
                torch.autograd.set_detect_anomaly(True)
            with comm.compute(0.01), torch.autograd.set_detect_anomaly(iteration >= 38):
                loss = step(model, optimizer, x)
            comm.record(loss=loss)

    errors = []
    for eager in (False, True):
        try:
            with (
                pytest.warns(UserWarning, match="anomal|Error detected"),
                pytest.raises(RankError) as caught,
            ):
                spawnsim.run(main, ranks=5, eager=eager)
        finally:
            torch.autograd.set_detect_anomaly(False)
        errors.append(str(caught.value).split(" (")[0])
    assert errors[0] == errors[1] and "rank 3 raised" in errors[0]


PARAMETRIZED = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(8, 5)),
    "within": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 5)
    ),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 5)),
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_parametrized_models_are_computed_together(kind, sizes):
    """Torch makes a class for each of them."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = PARAMETRIZED[kind](), TrainingStep(loss_of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(40):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
        return {name: each.clone() for name, each in model.state_dict().items()}

    (together, ends), (eager, wanted) = both(main)
    if kind != "orthogonal":  # vmap has no rule for it
        assert max(sizes) > RANKS // 2 and "warnings" not in together.what
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-4)
    torch.testing.assert_close(ends, wanted, rtol=1e-3, atol=1e-4)


def test_other_parametrizations_are_other_groups(sizes):
    """The same class and another rule: each as by itself."""

    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    class Shifted(nn.Module):
        def forward(self, x):
            return x + 0.1

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Linear(8, 5), TrainingStep(loss_of)
        nn.utils.parametrize.register_parametrization(
            model, "weight", Doubled() if comm.rank % 2 else Shifted()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(10):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
        return model.weight.detach().clone()

    (together, ends), (eager, wanted) = both(main)
    assert max(sizes) == RANKS // 2
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-4)
    torch.testing.assert_close(ends, wanted, rtol=1e-4, atol=1e-5)


def test_classes_of_each_rank_are_told_of():
    """Each is a group of its own."""

    def main(comm):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(8, 5)

            def forward(self, x):
                return self.inner(x)

        model, step = Net(), TrainingStep(loss_of)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(3):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))

    (warning,) = spawnsim.run(main, ranks=RANKS).what["warnings"]
    assert "8 groups and more" in warning and "define classes outside of functions" in warning


def _turned(model, i):
    model[i % 2].requires_grad_(False)
    model[1 - i % 2].requires_grad_(True)


TURNS = {
    "optimizers": lambda model, optimizers, i: optimizers[i % 2],
    "layers": lambda model, optimizers, i: _turned(model, i) or optimizers[2],
}


@pytest.mark.parametrize("turn", TURNS)
def test_what_is_trained_in_turn_steps_alone(turn, sizes):
    """Two optimizers, or layers that are frozen in turn: each move costs more than a step gains."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), TrainingStep(loss_of)
        optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01, 0.05)]
        for iteration in range(30):
            with comm.compute(0.01):
                loss = step(model, TURNS[turn](model, optimizers, iteration), *batch(comm.rank, iteration))
            comm.record(loss=loss)
        return model[0].weight.detach().clone()

    (together, ends), (eager, wanted) = both(main)
    (warning,) = together.what["warnings"]
    assert "step alone" in warning and "others every few steps" in warning
    assert sum(sizes) <= 10 * RANKS
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-4)
    torch.testing.assert_close(ends, wanted, rtol=1e-4, atol=1e-5)


def test_a_model_whose_layers_are_thawed_one_by_one_stays_together(sizes):
    """A few moves, or many with steps between, cost less than they gain."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5)), TrainingStep(loss_of)
        for iteration in range(100):
            if iteration % 10 == 0:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + iteration))
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)

    result = spawnsim.run(main, ranks=RANKS)
    assert "warnings" not in result.what
    assert sum(sizes) == 100 * RANKS


def test_a_step_that_is_made_anew_each_time_steps_alone_in_the_end(sizes):
    """Over each batch: a function for each step, each of which would be kept."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = nn.Linear(8, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for iteration in range(40):
            x, y = batch(comm.rank, iteration)
            step = TrainingStep(lambda m, x=x, y=y: cross_entropy(m(x), y))
            with comm.compute(0.01):
                loss = step(model, optimizer)
            comm.record(loss=loss)
        return model.weight.detach().clone()

    (together, ends), (eager, wanted) = both(main, ranks=5)
    assert any("make one TrainingStep, and give it the batch" in each for each in together.what["warnings"])
    assert sum(sizes) <= 64 + 4 * 5
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-4)
    torch.testing.assert_close(ends, wanted, rtol=1e-4, atol=1e-5)


def test_a_traceback_shows_the_program_and_not_what_called_it():
    """The frames of spawnsim between the program and its loss are left out; what raised stays."""

    def loss(model, x):
        return model(x).sum()

    def main(comm):
        model = torch.nn.Linear(8, 1)
        spawnsim.TrainingStep(loss)(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(2, 7))

    with pytest.raises(RankError) as caught:
        spawnsim.run(main, ranks=2)
    assert caught.value.__cause__ is not None
    shown = program_traceback(caught.value.__cause__)
    assert "in main" in shown and "in loss" in shown and "linear.py" in shown
    assert "spawnsim/training" not in shown
