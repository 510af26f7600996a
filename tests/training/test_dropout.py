"""Dropout: masks are drawn in each rank's turn from its own generator, to the bits of eager steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spawnsim
from spawnsim import AverageAllPolicy, Evaluation, TrainingStep
from spawnsim.training.objective import Mask, _Dropping
from tests.training.test_steps import RANKS, WIDTHS, accuracy_of, batch, build, loss_of, run, sgd, weights


class Dropping(nn.Module):
    """Dropout of several kinds: of the input, in place, of a tensor that lies turned round, by function, of none."""

    def __init__(self, seed):
        super().__init__()
        self.network, self.p = build(seed), 0.3
        self.first, self.second = nn.Dropout(0.1), nn.Dropout(0.4, inplace=True)
        self.none, self.all = nn.Dropout(0.0), nn.Dropout(1.0)

    def forward(self, x):
        x = self.none(self.first(x))
        hidden = self.network[1](self.second(self.network[0](x)))
        hidden = functional.dropout(hidden.t(), self.p, self.training).t()
        hidden = hidden * functional.dropout(hidden[:1, :1].expand(8, 24), 0.25, self.training)
        return self.network[2](hidden) + self.all(x[:, :5])


def programs():
    """Yield programs by name: of a communicator, to what a rank has found."""

    def trains(comm, model=None, between=lambda iteration: None, **how):
        model = Dropping(comm.rank) if model is None else model
        optimizer, step, losses = sgd(model, lr=0.01), TrainingStep(loss_of, **how), []
        for iteration in range(45):  # more than 32, after which calls are repeated from a record
            with comm.compute(0.01):
                losses.append(step(model, optimizer, *batch(comm.rank, iteration)))
            between(iteration)
        return weights(model), torch.stack(losses), torch.rand(3), optimizer.state_dict()["state"][0]

    def draws_in_between(comm):
        torch.manual_seed(100 + comm.rank)
        drawn = []
        found = trains(comm, between=lambda iteration: drawn.append(torch.randn(1 + iteration % 3).sum()))
        return found, torch.stack(drawn)

    def looks_now_and_then(comm):
        model = Dropping(comm.rank)
        seen = []
        return trains(
            comm, model, lambda i: seen.append(weights(model)) if (i + comm.rank) % 5 == 0 else None
        ), seen

    def is_evaluated_without(comm):
        model, evaluate, found = Dropping(comm.rank), Evaluation(accuracy_of), []

        def look(iteration):
            if iteration % 4 == 0:
                model.eval()
                found.append(evaluate(model, *batch(99, 0)))
                model.train()

        return trains(comm, model, look), torch.stack(found)

    def is_evaluated_with_it(comm):
        model, evaluate, found = Dropping(comm.rank), Evaluation(loss_of), []
        return trains(comm, model, lambda _: found.append(evaluate(model, *batch(99, 0)))), torch.stack(found)

    def changes_its_share(comm):
        model = Dropping(comm.rank)

        def change(iteration):
            if iteration in (10, 30):
                model.p, model.first.p = 0.1 * (comm.rank % 3), 0.5
            if iteration == 20:
                model.second.eval()

        return trains(comm, model, change)

    def is_averaged(comm):
        model, policy = Dropping(comm.rank), AverageAllPolicy(average_every=6)
        optimizer = sgd(model)
        return trains(comm, model, lambda iteration: policy(iteration, model, optimizer, group=comm))

    def takes_several_outputs_and_norms(comm):
        def loss(model, x, y):
            logits = model(x)
            return functional.cross_entropy(logits, y), logits.argmax(-1)

        model = Dropping(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss, max_norm=0.5, gradients=True)
        for iteration in range(9):
            with comm.compute(0.01):
                found = step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model), found, [p.grad for p in model.parameters()]

    yield trains
    yield draws_in_between
    yield looks_now_and_then
    yield is_evaluated_without
    yield is_evaluated_with_it
    yield changes_its_share
    yield is_averaged
    yield takes_several_outputs_and_norms


PROGRAMS = {each.__name__: each for each in programs()}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_ends_as_eager_training(name, sizes):
    """Weights, losses, what is drawn afterwards, state; carried out together, unless each rank has another share."""
    (together, result), (eager, _) = (run(PROGRAMS[name], eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)
    assert max(sizes) > RANKS // 3
    if name != "is_evaluated_with_it":
        assert not result.what.get("warnings")


def test_masks_are_drawn_once_where_activations_are_computed_twice():
    """A checkpoint of torch's puts its generator back; such a model steps alone."""

    class Twice(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.network = Dropping(seed)

        def forward(self, x):
            return checkpoint(self.network, x, use_reentrant=False)

    def main(comm):
        return PROGRAMS["trains"](comm, Twice(comm.rank))

    (together, _), (eager, _) = (run(main, eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_few_models_are_computed_one_by_one_with_the_same_masks(ranks):
    """Before their calls are repeated from a record."""
    (together, _), (eager, _) = (run(PROGRAMS["trains"], ranks=ranks, eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_masks_are_those_of_torch(p, dtype):
    """To the bit, as is what is drawn next; of tensors that lie turned round, too."""
    for given in (
        torch.randn(7, 33, dtype=dtype),
        torch.randn(33, 7, dtype=dtype).t(),
        torch.randn(4, 3, 5, dtype=dtype),
    ):
        mask = Mask(given.shape, given.stride(), dtype, p)
        torch.manual_seed(7)
        expected, after = functional.dropout(given, p), torch.rand(2)
        torch.manual_seed(7)
        drawn = torch.zeros(3, *given.shape, dtype=dtype)
        mask.draw(drawn[1])
        assert torch.equal(torch.rand(2), after)
        with _Dropping([mask], [drawn[1]]):
            assert torch.equal(functional.dropout(given, p), expected)


def test_a_mask_has_the_bits_of_torchs_own_dropout():
    """The loss of a first step is that of the eager step, to the bit but for the sum's order."""

    def main(comm):
        model = nn.Sequential(nn.Linear(20, 3000), nn.Dropout(0.2))
        step = TrainingStep(lambda model, x: (model(x).mean(), model(x).detach()))
        with comm.compute(0.01):
            _, seen = step(model, sgd(model), batch(comm.rank, 0)[0])
        return seen == 0

    (together, _), (eager, _) = (run(main, eager=each) for each in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(together, eager, strict=True))
    assert 0.15 < together[0].float().mean() < 0.25
    assert not torch.equal(together[0], together[1])


def test_a_resumed_run_drops_what_the_whole_one_does(tmp_path):
    """Generators stand at a checkpoint where eager steps would have left them."""

    def main(comm, iterations: int = 16):
        model = Dropping(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        saved = comm.restore(model=model, optimizer=optimizer)
        for iteration in range(saved.iteration if saved else 0, iterations):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss, iteration=iteration)
            if iteration == 6:
                comm.checkpoint(iteration=7, model=model, optimizer=optimizer)

    whole = spawnsim.run(main, ranks=RANKS, stragglers="lognormal:0.3", out=tmp_path / "whole")
    spawnsim.run(
        main, ranks=RANKS, stragglers="lognormal:0.3", out=tmp_path / "part", parameters={"iterations": 9}
    )
    again = spawnsim.run(main, ranks=RANKS, stragglers="lognormal:0.3", out=tmp_path / "part", resume=True)
    assert again.totals["digest"] == whole.totals["digest"]
    assert np.array_equal(again.table["loss"], whole.table["loss"])


def test_ranks_that_die_and_come_again(sizes):
    """A kill with steps put off, at the start, amid and near the end."""

    def main(comm):
        model = Dropping(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(20):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(iteration=iteration, loss=loss)

    faults = "crash:3@0.005s; crash:5@0.095s; crash:7@0.19s"
    together, eager = (spawnsim.run(main, ranks=RANKS, faults=faults, eager=each) for each in (False, True))
    assert together.table.rows == eager.table.rows
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-5)
    assert max(sizes) > RANKS // 2


OTHERWISE = {
    "another generator": lambda x: x * torch.rand_like(x),
    "dropout of torch's other kinds": lambda x: functional.alpha_dropout(x, 0.1, True),
    "dropout within attention": lambda x: functional.scaled_dot_product_attention(
        *[x[None]] * 3, dropout_p=0.1
    )[0],
    "both": lambda x: functional.dropout(x, 0.2) + torch.rand_like(x),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_draws_otherwise_steps_alone(name, sizes):
    """Bit for bit as eagerly, and the run says why."""

    def main(comm):
        model = build(comm.rank)
        optimizer = sgd(model)
        step = TrainingStep(lambda model, x, y: functional.cross_entropy(model(OTHERWISE[name](x)), y))
        for iteration in range(5):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model), torch.rand(2)

    (together, result), (eager, _) = (run(main, eager=each) for each in (False, True))
    assert all(
        torch.equal(a, b)
        for one, two in zip(together, eager, strict=True)
        for a, b in zip(one, two, strict=True)
    )
    assert not sizes
    (warning,) = result.what["warnings"]
    assert "draws random numbers otherwise than by torch.nn.Dropout" in warning


def test_a_model_of_some_size_in_float64():
    """Convolutions, 40,000 weights, ranks with batches of two sizes."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(
            nn.Unflatten(1, (1, 4, 5)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(),
            nn.Linear(160, 240), nn.Dropout(), nn.ReLU(), nn.Linear(240, WIDTHS[-1]),
        ).double()  # fmt: skip
        optimizer, step, losses = torch.optim.Adam(model.parameters(), lr=1e-3), TrainingStep(loss_of), []
        for iteration in range(12):
            x, y = batch(comm.rank, iteration, torch.float64)
            with comm.compute(0.01):
                losses.append(step(model, optimizer, x[iteration % 2 :], y[iteration % 2 :]))
        return weights(model), torch.stack(losses)

    (together, result), (eager, _) = (run(main, ranks=20, eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-8, atol=1e-10)
    assert not result.what.get("warnings")
