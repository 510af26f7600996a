"""Training steps that are put off: they end as eager ones do, whoever looks, and whatever happens meanwhile."""

from __future__ import annotations

import collections
import copy
import gc
import pickle
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import spawnsim
from spawnsim import AverageAllPolicy, Evaluation, TrainingStep
from spawnsim.comm.backends import world
from spawnsim.errors import ParameterError, RankError
from spawnsim.training import batches
from spawnsim.training.arena import Rows, Seat
from spawnsim.training.batches import MOST_STEPS, StepBatch

RANKS = 12
WIDTHS = (20, 24, 5)


def loss_of(model, x, y):
    """The loss of most programs here."""
    return cross_entropy(model(x), y)


def accuracy_of(model, x, y):
    """What is evaluated."""
    return (model(x).argmax(-1) == y).float().mean()


def build(seed=0, widths=WIDTHS, dtype=torch.float32):
    """Return a model whose weights depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    model = nn.Sequential(*(each for layer in layers for each in (layer, nn.Tanh())))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) - 0.5)
    return model.to(dtype)


def batch(rank, iteration, dtype=torch.float32):
    """Return inputs and classes of a rank in an iteration."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    x = torch.randn(8, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, WIDTHS[-1], (8,), generator=generator)


def weights(model):
    """Return a copy of all weights, end to end."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def sgd(model, **how):
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | how))


def run(main, ranks=RANKS, **how):
    """Return what `main` returned on each rank."""
    found = [None] * ranks

    def keep(comm):
        found[comm.rank] = main(comm)

    result = spawnsim.run(keep, ranks=ranks, **({"stragglers": "lognormal:0.3"} | how))
    return found, result


def trained(optimizer_of=sgd, iterations=25, dtype=torch.float32, step_of=TrainingStep, looks=True, **how):
    """Train on each rank by itself; return final weights and losses of all."""

    def main(comm):
        model = build(comm.rank, dtype=dtype)
        optimizer = optimizer_of(model)
        step, losses = step_of(loss_of), []
        for iteration in range(iterations):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration, dtype))
            losses.append(loss.item() if looks else loss)
        return weights(model), torch.tensor([float(each) for each in losses]), optimizer

    return run(main, **how)[0]


OPTIMIZERS = {
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": sgd,
    "nesterov, decay": lambda m: sgd(m, nesterov=True, weight_decay=0.01),
    "maximize": lambda m: sgd(m, maximize=True, lr=0.001),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "groups": lambda m: torch.optim.AdamW(
        [{"params": m[0].parameters(), "lr": 0.02}, {"params": m[2].parameters(), "weight_decay": 0.1}],
        lr=0.01,
    ),
    "lr of a tensor": lambda m: torch.optim.SGD(m.parameters(), lr=torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_batched_training_ends_as_eager_training(optimizer, sizes):
    """Weights, losses and the optimizer's own state after 25 steps, 12 ranks that straggle."""
    batched = trained(OPTIMIZERS[optimizer])
    assert max(sizes) > RANKS // 3  # they were carried out together
    eager = trained(OPTIMIZERS[optimizer], eager=True)
    for (one, losses, ours), (other, expected, theirs) in zip(batched, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        mine, other_state = ours.state_dict(), theirs.state_dict()
        assert mine["param_groups"] == other_state["param_groups"]
        assert mine["state"].keys() == other_state["state"].keys()
        for number, entry in mine["state"].items():
            for name, value in entry.items():
                expected_value = other_state["state"][number][name]
                assert value.dtype == expected_value.dtype
                torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-5)


def test_float64_and_losses_looked_at_in_the_end():
    """In double precision the two ways agree to 1e-12; nobody looks before the loop is over."""
    batched, eager = (
        trained(dtype=torch.float64, looks=False, eager=e, iterations=10) for e in (False, True)
    )
    for (one, losses, _), (other, expected, _) in zip(batched, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)


def test_clipping_is_torchs():
    """A small norm: the first steps are all clipped."""

    def clipped(loss):
        return TrainingStep(loss, max_norm=0.05)

    batched, eager = (trained(step_of=clipped, eager=e) for e in (False, True))
    free = trained()
    for (one, _, _), (other, _, _), (unclipped, _, _) in zip(batched, eager, free, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert (one - unclipped).abs().max() > 0.01


def test_the_same_seed_gives_the_same_bits():
    """Twice the same digest and table, and another one than eagerly: the mode is part of it."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(8):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
            comm.allreduce(float(loss))

    once, again, eager = (run(main, eager=e)[1] for e in (False, False, True))
    assert once.totals["digest"] == again.totals["digest"] != eager.totals["digest"]
    assert once.totals["digest"].startswith("batched-") and "-" not in eager.totals["digest"]
    assert once.table.digest() == again.table.digest()
    np.testing.assert_allclose(once.table["loss"], eager.table["loss"], rtol=1e-5)
    assert once.totals["virtual_seconds"] == eager.totals["virtual_seconds"]


LOOKS = {
    "parameter": lambda model, optimizer, loss: model[0].weight.sum(),
    "detached": lambda model, optimizer, loss: model[0].weight.detach().clone(),
    "data": lambda model, optimizer, loss: model[2].bias.data.clone(),
    "numpy": lambda model, optimizer, loss: torch.from_numpy(model[0].bias.detach().numpy().copy()),
    "state dict": lambda model, optimizer, loss: {k: v.clone() for k, v in model.state_dict().items()},
    "deepcopy": lambda model, optimizer, loss: weights(copy.deepcopy(model)),
    "pickle": lambda model, optimizer, loss: weights(pickle.loads(pickle.dumps(model))),
    "forward": lambda model, optimizer, loss: model(torch.ones(3, WIDTHS[0])).detach(),
    "print": lambda model, optimizer, loss: torch.tensor([float(x) for x in model[2].bias.tolist()]),
    "momentum": lambda model, optimizer, loss: optimizer.state[model[0].weight]["momentum_buffer"].clone(),
    "optimizer": lambda model, optimizer, loss: copy.deepcopy(optimizer.state_dict()["state"]),
    "loss": lambda model, optimizer, loss: -loss,
    "norm": lambda model, optimizer, loss: nn.utils.get_total_norm(model.parameters()),
}


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_sees_the_step(look):
    """Each way of looking, right after the step and before anything else: as if it had been carried out at once."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(3):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            seen = LOOKS[look](model, optimizer, loss)
        return seen

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    for one, other in zip(batched, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_rank_that_has_come_to_its_time_waits_for_nobody_again(sizes):
    """Once the clock has passed a step, the others have put off theirs: the next step takes no turn of its own."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(10):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            comm.Iprobe()  # its turn; what follows is a microsecond later
        steps.append(comm._world.kernel.steps)

    steps = []
    run(main, stragglers=None)
    assert max(steps) <= RANKS * 10
    assert sizes[-9:] == [RANKS] * 9  # together all the same


@pytest.mark.parametrize("straggler", [None, "lognormal:0.3"])
def test_several_steps_of_a_model_are_put_off(sizes, straggler):
    """Nobody looks at a loss: ranks take turns once in `MOST_STEPS` steps, and the calls are as large as ever."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(1 + 3 * MOST_STEPS):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(iteration=iteration, loss=loss)
        steps.append(comm._world.kernel.steps)
        return weights(model)

    steps = []
    found, result = run(main, stragglers=straggler)
    assert max(steps) <= RANKS * 5
    assert straggler or sizes == [RANKS] * (1 + 3 * MOST_STEPS)
    eager, plain = run(main, eager=True, stragglers=straggler)
    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(result.table["loss"], plain.table["loss"], rtol=1e-4)


def test_inputs_that_take_much_memory_are_not_put_off_often(sizes, monkeypatch):
    """Of all steps that are put off the inputs are kept; room for those of three."""
    monkeypatch.setattr(batches, "STAGED_NBYTES", 3 * RANKS * (8 * WIDTHS[0] * 4 + 8 * 8) + 10)

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(7):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            pending.append(step._seat.steps)

    pending = []
    run(main, stragglers=None)
    assert max(pending) == 3 and sizes == [RANKS] * 7


def test_parameters_are_ordinary_after_a_look():
    """Classes, identities and `is_leaf`: nobody is left with a strange object."""

    def main(comm):
        model = build(comm.rank)
        before = list(model.parameters())
        optimizer, step = sgd(model), TrainingStep(loss_of)
        with comm.compute(0.01):
            loss = step(model, optimizer, *batch(comm.rank, 0))
        assert model[0].weight.shape == (24, 20)  # not a look
        assert type(model[0].weight) is not nn.Parameter
        float(loss)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        assert {type(p) for p in model.parameters()} == {nn.Parameter}
        assert type(loss) is torch.Tensor and not loss.requires_grad
        assert {type(v) for s in optimizer.state.values() for v in s.values()} == {torch.Tensor}
        assert all(p.is_leaf and p.requires_grad and p.grad is None for p in model.parameters())

    run(main)


def test_gradients_where_they_are_asked_for():
    """`p.grad` holds them, pending ones too; without it stays None."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of, gradients=True)
        for iteration in range(3):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return [p.grad.clone() for p in model.parameters()]

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["Allreduce", "Send", "window"])
def test_memory_handed_to_communication(when, how):
    """An array over a parameter, made before the first step or after it, holds the step when a call reads it."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        view = model[0].weight.detach().numpy() if when == "before" else None
        with comm.compute(0.01):
            step(model, optimizer, *batch(comm.rank, 0))
        if view is None:
            view = model[0].weight.detach().numpy()
        window = comm.Win.Create(view, comm=comm) if how == "window" else None
        comm.Barrier()
        with comm.compute(0.01):
            step(model, optimizer, *batch(comm.rank, 1))
        found = np.empty_like(view)
        other = (comm.rank + 1) % comm.size
        if how == "Allreduce":
            comm.Allreduce(view, found)
        elif how == "Send":
            comm.Sendrecv(view, other, 0, found, (comm.rank - 1) % comm.size, 0)
        else:
            window.Lock(other)
            window.Get(found, other)
            window.Unlock(other)
            comm.Barrier()
            window.Free()
        return torch.from_numpy(found)

    batched, eager = (run(main, eager=e, stragglers=None)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_what_is_received_into_weights_comes_after_the_step():
    """A receive that was posted before the step, and arrives while it is put off, is not overwritten by it."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        float(step(model, optimizer, *batch(comm.rank, 0)))
        view = model[2].bias.detach().numpy()
        request = comm.Irecv(view, (comm.rank - 1) % comm.size)
        comm.Send(np.full(5, float(comm.rank), np.float32), (comm.rank + 1) % comm.size)
        with comm.compute(0.01):
            step(model, optimizer, *batch(comm.rank, 1))
        request.Wait()
        return model[2].bias.tolist()

    found, _ = run(main)
    assert found == [[(rank - 1) % RANKS] * 5 for rank in range(RANKS)]


def test_policies_see_the_step_and_the_step_the_policy():
    """Averaging every second iteration: as eagerly, also for a model that was averaged before its first step."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step, policy = sgd(model), TrainingStep(loss_of), AverageAllPolicy(average_every=2)
        for iteration in range(10):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            model, optimizer, _ = policy(iteration, model, optimizer, local_metric=-loss, group=comm)
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_batches_may_be_overwritten_after_the_call():
    """One buffer for all batches of a rank: each step has read its own."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        x, y = torch.empty(8, WIDTHS[0]), torch.empty(8, dtype=torch.int64)
        for iteration in range(4):
            for buffer, values in zip((x, y), batch(comm.rank, iteration), strict=True):
                buffer.copy_(values)
            with comm.compute(0.01):
                step(model, optimizer, x, y)
            x.fill_(99.0), y.fill_(0)
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_learning_rates_and_schedules_are_each_ranks_own(sizes):
    """The rate at the time of the call counts, though the scheduler moves on before the step is carried out."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model, lr=0.01 * (comm.rank + 1)), TrainingStep(loss_of)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for iteration in range(5):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            scheduler.step()
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    assert max(sizes) > 3
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_a_scheduled_momentum_makes_no_new_batches(monkeypatch):
    """OneCycle moves rate and momentum in each step, on ranks that are not in step: one batch for the whole run."""
    made = []
    monkeypatch.setattr(StepBatch, "__init__", _counting(StepBatch.__init__, made))

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        for iteration in range(15):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            scheduler.step()
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    assert len(made) == 1
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_models_that_differ_form_groups(sizes):
    """Three widths and two losses among 12 ranks: no warning, and nobody is computed with another's."""

    def main(comm):
        model = build(comm.rank, (20, (16, 24, 32)[comm.rank % 3], 5))
        smoothing = 0.1 * (comm.rank % 2)

        def smooth(model, x, y):
            return cross_entropy(model(x), y, label_smoothing=smoothing)

        optimizer, step = sgd(model), TrainingStep(smooth)
        for iteration in range(4):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    (batched, result), (eager, _) = (run(main, ranks=30, stragglers=None, eager=e) for e in (False, True))
    assert set(sizes) == {5} and not result.what.get("warnings")
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_an_attribute_that_differs_is_no_weight():
    """Equal shapes, unequal scale: the ranks' models compute otherwise."""

    class Scaled(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.layer, self.scale = build(3), scale

        def forward(self, x):
            return self.layer(x) * self.scale

    def main(comm):
        model = Scaled(1 + comm.rank % 2)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(3):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


class Recurrent(nn.Module):
    """The inputs as a sequence of 5, and what the last one comes to."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.head = cell(4, 8, 2, batch_first=True), nn.Linear(8, WIDTHS[-1])

    def forward(self, x):
        return self.head(self.cell(x.unflatten(1, (5, 4)))[0][:, -1])


@pytest.mark.parametrize("cell", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_models_are_computed_together(cell, sizes):
    """They keep their parameters in a list as well, which a forward pass renews; looked at by a pass, and copied."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = Recurrent(cell)
        optimizer, step, seen = sgd(model), TrainingStep(loss_of), []
        for iteration in range(4):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            with torch.no_grad():
                seen.append(model(batch(0, 0)[0]).sum() + copy.deepcopy(model)(batch(0, 1)[0]).sum())
        return torch.cat([weights(model), torch.stack(seen)])

    (batched, result), (eager, _) = (run(main, stragglers=None, eager=e) for e in (False, True))
    assert set(sizes) == {RANKS} and not result.what.get("warnings")
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_attention_is_computed_together_without_a_word(recwarn):
    """There is no kernel of several models for it, and torch would warn that it goes one by one."""

    def main(comm):
        torch.manual_seed(comm.rank)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        model = nn.Sequential(nn.Unflatten(1, (5, 4)), layer, nn.Flatten())
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(2):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    (batched, result), (eager, _) = (run(main, stragglers=None, eager=e) for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-3, atol=1e-4)
    assert not result.what.get("warnings") and not [
        str(each.message) for each in recwarn if "batching" in str(each)
    ]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTHS[0], WIDTHS[-1])

    def forward(self, x):
        out = self.layer(x)
        return out * 2 if out.sum() > 0 else out


ALONE = {
    "buffers": (lambda: nn.Sequential(nn.BatchNorm1d(WIDTHS[0], momentum=None), build()), sgd),
    "random numbers": (lambda: nn.Sequential(nn.AlphaDropout(0.5), build()), sgd),
    "control flow": (Branching, sgd),
    "bfloat16": (lambda: build(dtype=torch.bfloat16), sgd),
    "dampening": (build, lambda m: sgd(m, dampening=0.1)),
    "RMSprop": (build, lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01)),
    "hooks": (lambda: _hooked(build()), sgd),
    "not in its optimizer": (build, lambda m: torch.optim.SGD(m[0].parameters(), lr=0.1)),
}


def _hooked(model):
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("kind", ALONE)
def test_what_cannot_be_computed_together_steps_alone_and_says_so_once(kind):
    """Bit for bit as eagerly, with one warning for the run that says why."""
    build_it, optimizer_of = ALONE[kind]

    def main(comm):
        torch.manual_seed(comm.rank)
        model = build_it()
        optimizer, step = optimizer_of(model), TrainingStep(loss_of)
        for iteration in range(3):
            with comm.compute(0.01):
                x, y = batch(comm.rank, iteration)
                step(model, optimizer, x.to(next(model.parameters()).dtype), y)
        return weights(model)

    (batched, result), (eager, _) = (run(main, eager=e) for e in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(batched, eager, strict=True))
    (warning,) = result.what["warnings"]
    assert "step alone" in warning
    assert (
        kind != "random numbers" or "it draws random numbers" in warning
    )  # vmap's own words name flags of another call


def test_frozen_parameters_and_thawed_ones():
    """A frozen layer stays, with its momentum; thawed later, it trains."""

    def main(comm):
        model = build(comm.rank)
        model[0].requires_grad_(False)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        seen = []
        for iteration in range(6):
            if iteration == 3:
                model[0].requires_grad_(True)
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            seen.append(weights(model))
        return torch.stack(seen)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)
    assert torch.equal(batched[0][0, :480], batched[0][2, :480]) != torch.equal(
        batched[0][2, :480], batched[0][5, :480]
    )


def test_an_optimizer_that_forgets_or_loads():
    """`state.clear()`, `load_state_dict` and `parameter.data = ...` between steps."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), TrainingStep(loss_of)
        for iteration in range(8):
            if iteration == 2:
                optimizer.state.clear()
            if iteration == 3:
                saved = copy.deepcopy(optimizer.state_dict())
            if iteration == 5:
                optimizer.load_state_dict(saved)
            if iteration == 6:
                model[0].weight.data = torch.ones(24, 20)
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("again", ["clear", "new"])
def test_state_that_begins_anew_takes_the_row_it_had(again, kept, monkeypatch):
    """As policies and programs reset it: a row is dear to make. One whose state somebody keeps is left alone."""
    made, init = [], Seat.__init__
    monkeypatch.setattr(Seat, "__init__", lambda *given: (made.append(given[0]), init(*given))[1])

    def main(comm):
        model, states = build(comm.rank), []
        optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), TrainingStep(loss_of)
        for iteration in range(20):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            if iteration % 5 == 4:
                states += [optimizer.state_dict()["state"]] if kept else []
                if again == "clear":
                    optimizer.state.clear()
                else:
                    optimizer.state = collections.defaultdict(dict)
        return weights(model), [each for state in states for some in state.values() for each in some.values()]

    batched, _ = run(main)
    assert len(made) == (4 * RANKS if kept else RANKS)
    torch.testing.assert_close(batched, run(main, eager=True)[0], rtol=1e-4, atol=1e-5)


def test_eager_steps_of_the_program_take_turns():
    """The program's own backward and `optimizer.step()` on the same model."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), TrainingStep(loss_of)
        for iteration in range(6):
            x, y = batch(comm.rank, iteration)
            with comm.compute(0.01):
                if iteration % 2:
                    optimizer.zero_grad()
                    loss_of(model, x, y).backward()
                    optimizer.step()
                else:
                    step(model, optimizer, x, y)
        return weights(model)

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


def test_rows_of_models_that_are_gone_are_used_again(monkeypatch):
    """A new model in each iteration, 40 of them on 12 ranks: no more rows than ranks, and none is taken too early."""
    from spawnsim.training import arena

    made = []
    monkeypatch.setattr(arena.Arena, "__init__", _counting(arena.Arena.__init__, made))

    def main(comm):
        step, kept = TrainingStep(loss_of), []
        for iteration in range(40):
            model = build(iteration)
            optimizer = sgd(model)
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            float(loss)
            if iteration == 7:
                kept = [p.detach() for p in model.parameters()]  # its row must not be given to another model
                expected = [p.clone() for p in kept]
        assert all(torch.equal(a, b) for a, b in zip(kept, expected, strict=True))

    run(main)
    assert len(made) <= 3  # 19 rows in a block; each rank has two models at a time, and keeps a third


@pytest.mark.parametrize("step_of", ["each rank's", "all ranks'"])
def test_memory_of_rows_is_given_back_without_the_collector(step_of, monkeypatch):
    """At each checkpoint, after which models take other rows, and when the run is over: it may be gigabytes."""
    memories, alive = [], []
    init = Rows.__init__

    def remembered(self, *args):
        init(self, *args)
        memories.append(weakref.ref(self.all.untyped_storage()))

    def living():
        return sum(each() is not None for each in memories)

    monkeypatch.setattr(Rows, "__init__", remembered)
    shared = TrainingStep(loss_of), Evaluation(accuracy_of)

    def main(comm):
        model = build(comm.rank)
        optimizer = sgd(model)
        step, evaluate = (
            (TrainingStep(loss_of), Evaluation(accuracy_of)) if step_of == "each rank's" else shared
        )
        for iteration in range(9):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(iteration=iteration, loss=loss, accuracy=evaluate(model, *batch(99, 0)))
            if iteration % 3 == 2:
                comm.checkpoint(iteration=iteration + 1, model=model, optimizer=optimizer)
        float(loss)
        comm.Barrier()
        alive.append(living())

    sgd(build())  # what torch loads for a first optimizer keeps the frames that it was loaded in
    gc.collect()
    gc.disable()
    try:
        run(main)
        assert len(memories) > 2 * max(
            alive
        )  # weights and momentum of several arenas, of which the last is there
        assert alive[0] == 2
        assert living() == 0
    finally:
        gc.enable()


def _counting(init, made):
    def counted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    return counted


def test_more_than_the_loss():
    """What the function returns besides comes back, too."""

    def main(comm):
        def both(model, x, y):
            out = model(x)
            return cross_entropy(out, y), out.argmax(1)

        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(both)
        with comm.compute(0.01):
            loss, named = step(model, optimizer, *batch(comm.rank, 0))
        return loss, named.clone()

    batched, eager = (run(main, eager=e)[0] for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-5, atol=1e-6)
    assert batched[0][1].dtype == torch.int64


def test_values_that_are_no_tensors_are_part_of_the_function(sizes):
    """A flag that ranks give differently makes two groups."""

    def scaled(model, x, y, scale):
        return mse_loss(model(x), torch.ones(8, 5)) * scale

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(scaled)
        for iteration in range(2):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration), 1.0 + comm.rank % 2)
        return weights(model)

    batched, eager = (run(main, eager=e, stragglers=None)[0] for e in (False, True))
    assert set(sizes) == {RANKS // 2}
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- errors
def test_an_error_of_one_rank_is_that_ranks():
    """A class that does not exist, on rank 7 in iteration 3: named with rank; the others' steps are whole."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(5):
            x, y = batch(comm.rank, iteration)
            if comm.rank == 7 and iteration == 3:
                y[2] = 5
            with comm.compute(0.01):
                loss = step(model, optimizer, x, y)
            comm.record(iteration=iteration, loss=loss)

    with pytest.raises(RankError, match=r"rank 7 .*out of bounds"):
        run(main, stragglers=None)


@pytest.mark.parametrize("caught", [True, False])
def test_what_was_put_off_behind_an_error_is_dropped(caught, tmp_path):
    """Rank 7's third step of six fails: its weights stay those of the second, and the note says when it was."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step, evaluate = sgd(model), TrainingStep(loss_of), Evaluation(accuracy_of)
        losses = []
        for iteration in range(6):
            x, y = batch(comm.rank, iteration)
            if comm.rank == 7 and iteration == 2:
                y[2] = 5
            with comm.compute(0.01):
                losses.append(step(model, optimizer, x, y))
            comm.record(
                iteration=iteration, loss=losses[-1], accuracy=evaluate(model, *batch(comm.rank, iteration))
            )
        if caught and comm.rank == 7:
            with pytest.raises(IndexError, match="out of bounds") as error:
                float(losses[-1])
            assert error.value.__notes__ == ["in work that rank 7 put off at 0.02 s"]
        return weights(model), losses

    if not caught:
        with pytest.raises(RankError, match=r"rank 7 raised IndexError.*out of bounds"):
            run(main, stragglers=None, out=tmp_path / "run")
        table = spawnsim.Run.load(tmp_path / "run").table
        losses = table["loss"][table["rank"] == 7]
        assert np.isnan(losses[2:]).all() and np.isfinite(losses[:2]).all()
        return
    found, result = run(main, stragglers=None)
    model = build(7)
    optimizer = sgd(model)
    for iteration in range(2):
        TrainingStep(loss_of)(model, optimizer, *batch(7, iteration))
    torch.testing.assert_close(found[7][0], weights(model), rtol=1e-5, atol=1e-6)
    assert torch.isfinite(torch.stack(found[6][1])).all()
    assert torch.isnan(torch.stack(found[7][1])).tolist() == [False] * 2 + [True] * 4
    assert np.isnan(result.table["accuracy"]).sum() == 4


@pytest.mark.parametrize("last", [True, False])
def test_an_error_that_nobody_looks_for_ends_the_run(last):
    """In the very last step, whose loss nobody asks for; or in one before."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(3):
            x, y = batch(comm.rank, iteration)
            if comm.rank == 7 and iteration == (2 if last else 1):
                y[2] = 5
            with comm.compute(0.01):
                step(model, optimizer, x, y)

    with pytest.raises(RankError, match=r"rank 7 .*out of bounds"):
        run(main)


def test_last_steps_are_carried_out_together(sizes):
    """Ranks end one after the other, and nobody looks at their last losses: one call, and the rows are complete."""

    def main(comm):
        model = build(comm.rank)
        with comm.compute(0.01 * (comm.rank + 1)):
            loss = TrainingStep(loss_of)(model, sgd(model), *batch(comm.rank, 0))
        comm.record(loss=loss)

    _, result = run(main, stragglers=None)
    assert sizes == [RANKS]
    assert np.isfinite(result.table["loss"]).all()


def test_of_errors_found_after_the_end_the_first_rank_to_end_is_told(tmp_path):
    """What was put off fails for two ranks, both at their ends; the others' rows are kept."""

    def main(comm):
        model, (x, y) = build(comm.rank), batch(comm.rank, 0)
        if comm.rank in (3, 9):
            y[2] = 5
        with comm.compute(0.01 * (RANKS - comm.rank)):
            loss = TrainingStep(loss_of)(model, sgd(model), x, y)
        comm.record(loss=loss)

    with pytest.raises(RankError, match=r"rank 9 raised IndexError.* at 0\.03 s"):
        run(main, stragglers=None, out=tmp_path / "run")
    losses = spawnsim.Run.load(tmp_path / "run").table["loss"]
    assert len(losses) == RANKS and np.isnan(losses).sum() == 2


def test_a_wrong_shape_is_told_at_the_call():
    """The first call of its kind is tried at once: the traceback is the program's own."""

    def main(comm):
        model = build(comm.rank)
        step = TrainingStep(loss_of)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            step(model, sgd(model), torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
        assert caught.value.__context__ is None, "ours is shown above it"
        return float(step(model, sgd(model), *batch(comm.rank, 0)))

    assert all(run(main)[0])


def test_a_loss_that_communicates_steps_alone():
    """Carried out for many ranks at once, whose call would it be? The warning says so; the values are right."""

    def main(comm):
        def talking(model, x, y):
            return loss_of(model, x, y) * world().allreduce(1)

        model = build()
        step = TrainingStep(talking)
        with comm.compute(0.01):
            loss = step(model, sgd(model), *batch(0, 0))
        return float(loss)

    found, result = run(main)
    assert len(set(found)) == 1 and found[0] > RANKS
    assert "cannot communicate" in result.what["warnings"][0]


@pytest.mark.parametrize("wrong", [{"loss": 3}, {"loss": loss_of, "max_norm": 0.0}])
def test_what_makes_no_sense_is_refused(wrong):
    """No function; no norm."""
    with pytest.raises(ParameterError):
        TrainingStep(**wrong)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_under_autocast_steps_are_made_at_once(device, sizes):
    """Of any device: elsewhere, where work is carried out, another rank's would be in force, or none."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(3):
            torch.set_autocast_enabled(device, True)
            try:
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            finally:
                torch.set_autocast_enabled(device, False)
            assert type(loss) is torch.Tensor
            comm.barrier()

    run(main)
    assert not sizes


def test_a_rank_that_dies_leaves_the_others_training():
    """Crashes with steps put off: the rest go on, and a restarted rank trains again."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(10):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(iteration=iteration, loss=loss)

    result = spawnsim.run(main, ranks=RANKS, faults="crash:3@0.035s; crash:5@0.055s")
    eager = spawnsim.run(main, ranks=RANKS, faults="crash:3@0.035s; crash:5@0.055s", eager=True)
    assert result.table.rows == eager.table.rows
    np.testing.assert_allclose(result.table["loss"], eager.table["loss"], rtol=1e-5)


# ------------------------------------------------------------------------------------------------ evaluation
def test_evaluations_are_those_of_their_time(sizes):
    """Before and after each step and an average, recorded without a look: each is of the weights of its time."""
    x, y = batch(99, 0)

    def main(comm):
        model = build(comm.rank)
        optimizer, step, evaluate = sgd(model), TrainingStep(loss_of), Evaluation(accuracy_of)
        policy = AverageAllPolicy(average_every=3)
        for iteration in range(7):
            before = evaluate(model, x, y)
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
                after = evaluate(model, x, y)
            model, optimizer, _ = policy(iteration, model, optimizer, group=comm)
            comm.record(
                before=before, loss=loss, after=after, averaged=evaluate(model, x, y), iteration=iteration
            )

    (_, batched), (_, eager) = (run(main, eager=e) for e in (False, True))
    assert max(sizes) > 3
    for name in ("rank", "time_s", "iteration"):
        assert np.array_equal(batched.table[name], eager.table[name])
    for name in ("before", "after", "averaged"):
        np.testing.assert_allclose(batched.table[name], eager.table[name], atol=1e-6)
    np.testing.assert_allclose(batched.table["loss"], eager.table["loss"], rtol=1e-5)


def test_rows_keep_their_order_though_values_come_later(tmp_path):
    """A row that waits for a value holds back the rank's later ones; the folder has them all."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(4):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(iteration=iteration, loss=loss)
            comm.record(iteration=iteration, note="later")

    result = spawnsim.run(main, ranks=RANKS, out=tmp_path / "run")
    assert result.table["iteration"].tolist() == [i for _ in range(RANKS) for i in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert np.isnan(result.table["loss"]).tolist() == [False, True] * 4 * RANKS
    loaded = spawnsim.Run.load(tmp_path / "run")
    assert loaded.table.digest() == result.table.digest()


def test_outside_of_virtual_ranks_it_is_plain_training():
    """The reference: `zero_grad`, `backward`, `step`."""
    model, twin = build(), build()
    optimizer, other = sgd(model), sgd(twin)
    step, evaluate = TrainingStep(loss_of), Evaluation(accuracy_of)
    for iteration in range(5):
        x, y = batch(0, iteration)
        loss = step(model, optimizer, x, y)
        other.zero_grad()
        expected = loss_of(twin, x, y)
        expected.backward()
        other.step()
        assert torch.equal(loss, expected.detach()) and evaluate(model, x, y) == accuracy_of(twin, x, y)
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("numpy", [True, False], ids=["main memory", "accelerator"])
def test_a_part_of_a_row_has_a_storage_of_its_own(numpy):
    """As long as the part, and in the memory of the row: on an accelerator, where it cannot be numpy's, too."""
    rows = Rows(torch.zeros(0, dtype=torch.float64), (4, 16))
    if not numpy:
        rows._memory = None
    part, _ = rows.part(2, slice(3, 10))
    part += torch.arange(7)
    assert part.untyped_storage().nbytes() == 7 * 8
    assert rows.all[2].tolist() == [0, 0, 0, *range(7), *[0] * 6]
    assert rows.all.sum() == 21
    del rows
    assert part.tolist() == [*range(7)]  # it keeps the memory alive
