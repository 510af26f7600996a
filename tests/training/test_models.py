"""Batched steps are those of eager runs, for the models, optimizers and losses that programs have."""

import pytest
import torch
from support.live_models import RANKS, batch, mlp, program, require_equal, sgd, warnings_of
from torch import nn
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from spawnsim.training import vmapped


def adam(model, **how):
    """Return Adam."""
    return torch.optim.Adam(model.parameters(), lr=1e-3, **how)


OPTIMIZERS = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "momentum": sgd,
    "nesterov": lambda model: sgd(model, nesterov=True, weight_decay=1e-3),
    "maximize": lambda model: sgd(model, lr=0.01, maximize=True),
    "adam": adam,
    "amsgrad": lambda model: adam(model, amsgrad=True, weight_decay=1e-2),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "a rate as a tensor": lambda model: sgd(model, lr=torch.tensor(0.1)),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters(), "weight_decay": 0.1}], lr=1e-3
    ),
    # Their gradients are computed together; each makes its step itself.
    "dampening": lambda model: sgd(model, dampening=0.5),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, sizes):
    """After 100 steps losses agree to 1e-5, and so do weights and state."""
    run = require_equal(program(optimizer_of=OPTIMIZERS[name], iterations=100), rtol=3e-5)
    assert sizes == [RANKS] * 100
    assert run.totals["digest"].startswith("batched-")
    assert warnings_of(run) == []


class OfLast(nn.Module):
    """A class from the last state of a recurrent network."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.outer = kind(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.outer(self.inner(x)[0][:, -1])


class Attending(nn.Module):
    """Attention over a series, behind a normalization."""

    def __init__(self):
        super().__init__()
        self.norm, self.parts, self.outer = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x):
        parts = self.parts(self.norm(x)).view(len(x), -1, 2, 12).transpose(1, 2).chunk(3, -1)
        return self.outer(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2).mean(1))


class Tied(nn.Module):
    """One weight twice."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.outer = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.outer(self.other(torch.tanh(self.one(x))))


class Counting(nn.Module):
    """A running mean in a buffer that is assigned, and a constant one."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("scale", torch.full((8,), 0.5))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return self.inner((x - self.mean) * self.scale)


def series(generator):
    """Return series of seven."""
    return torch.randn(4, 7, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def frozen(model):
    """Freeze the first layer."""
    model[0].requires_grad_(False)
    return model


def in_double(generator):
    """Return a batch in float64."""
    x, y = batch(generator)
    return x.double(), y


MODELS = {
    "batchnorm": {
        "model_of": lambda: nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 5)
        )
    },
    "a mean of all batches": {
        "model_of": lambda: nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 5))
    },
    "dropout": {"model_of": lambda: nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 9), nn.Dropout(0.5), nn.Linear(9, 5))},
    "dropout by hand": {
        "loss": lambda model, x, y: cross_entropy(model(dropout(x, 0.3, inplace=True) + dropout(x * 2, 0.1)), y),
        "batch_of": lambda generator: (batch(generator)[0] * 1.0, batch(generator)[1]),
    },
    "gru": {"model_of": lambda: OfLast(nn.GRU), "batch_of": series},
    "lstm": {"model_of": lambda: OfLast(nn.LSTM), "batch_of": series},
    "attention": {"model_of": Attending, "batch_of": series},
    "tied weights": {"model_of": Tied},
    "a buffer that is assigned": {"model_of": Counting},
    "frozen": {"model_of": lambda: frozen(mlp())},
    "clipped": {"max_norm": 0.05},
    "float64": {"model_of": lambda: mlp().double(), "batch_of": in_double},
    "several outputs": {"loss": lambda model, x, y: (cross_entropy(out := model(x), y), out, out.argmax(-1))},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name, sizes):
    """Losses, weights, buffers, optimizer state and the rank's generator agree with those of eager steps."""
    how = dict(MODELS[name])
    if name == "dropout by hand":  # what is changed in place is no input
        how["loss"] = lambda model, x, y: cross_entropy(model(dropout(x, 0.3) + dropout(x * 2, 0.1)), y)
    run = require_equal(
        program(**how, iterations=100 if name in ("batchnorm", "dropout", "gru") else 20), rtol=1e-4
    )
    assert set(sizes) == {RANKS}
    assert warnings_of(run) == []


@pytest.mark.parametrize("check", [False, True])
def test_learning_rates_and_schedules_are_each_ranks_own(check, sizes):
    """Rates differ from rank to rank, and a scheduler moves them; momentum changes in the middle."""

    def optimizer_of(model):
        optimizer = sgd(model, lr=0.02 * (1 + int(torch.randint(0, 5, ()))))
        optimizer.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return optimizer

    def between(comm, model, optimizer, iteration):
        optimizer.scheduler.step()
        optimizer.param_groups[0]["momentum"] = 0.9 if iteration < 6 else 0.5 + 0.01 * comm.rank

    require_equal(program(optimizer_of=optimizer_of, between=between), check_steps=check)
    assert set(sizes) == {RANKS}


def test_gradients_are_left_where_the_program_asks_for_them():
    """`gradients=True`: as after `backward`, in memory of their own; else None."""

    def between(comm, model, optimizer, iteration):
        comm.record(iteration=iteration, loss=float(sum(p.grad.double().norm() for p in model.parameters())))

    require_equal(program(gradients=True, max_norm=0.5, between=between))

    def nothing(comm, model, optimizer, iteration):
        assert all(p.grad is None for p in model.parameters())

    require_equal(program(between=nothing))


def test_layers_are_frozen_thawed_and_evaluate_in_the_middle(sizes):
    """What requires gradients, and whether modules train, is asked at each step."""

    def model_of():
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))

    def between(comm, model, optimizer, iteration):
        model[0].requires_grad_(iteration not in (3, 4))
        model[1].train(iteration not in (6, 7))

    require_equal(program(model_of, between=between))
    assert set(sizes) == {RANKS}


def test_a_program_may_do_with_its_model_what_it_likes(sizes):
    """Weights, memory, modules, state and optimizers are exchanged between steps."""

    def between(comm, model, optimizer, iteration):
        if iteration == 2:
            model[0].weight.data = torch.ones(12, 8) / 9
        elif iteration == 3:
            optimizer.state.clear()
        elif iteration == 4:
            with torch.no_grad():
                model[2].bias.add_(0.5)
        elif iteration == 5:
            optimizer.load_state_dict(optimizer.state_dict())
        elif iteration == 6:
            model.load_state_dict({name: each * 0.9 for name, each in model.state_dict().items()})
        elif iteration == 7:
            optimizer.param_groups[0]["params"].pop()
            model[2].bias.requires_grad_(False)
        elif iteration == 8:
            model[1] = nn.ReLU()

    require_equal(program(between=between))
    assert set(sizes) == {RANKS}


def test_views_and_arrays_of_parameters_stay_what_they_are():
    """A model keeps its own memory: whoever has an array over a weight sees each step."""

    def between(comm, model, optimizer, iteration):
        array = model.__dict__.setdefault("array", model[0].weight.detach().numpy())
        assert (array == model[0].weight.detach().numpy()).all()

    require_equal(program(between=between))


def test_many_ranks_take_several_calls(sizes, monkeypatch):
    """Each of at most so many rows; a last one of few executes one by one."""
    monkeypatch.setattr(vmapped, "CHUNK", (16, 20))
    require_equal(program(iterations=3), ranks=42)
    assert sizes == [20, 20] * 3


def test_fewer_than_four_execute_one_by_one(sizes):
    """To the bits of eager steps, and with their digest."""
    run = require_equal(program(lambda: nn.Sequential(nn.Dropout(0.5), mlp())), ranks=3, rtol=0)
    assert sizes == []
    assert not run.totals["digest"].startswith("batched-")


def test_the_same_seed_gives_the_same_bits():
    """Also of what rounds differently from eager steps."""
    runs = [require_equal(program(), ranks=20, stragglers="lognormal:0.3") for _ in range(2)]
    assert (runs[0].table["loss"] == runs[1].table["loss"]).all()
