"""What a program does to its model, its optimizer and its steps: computed as eagerly, or refused with the reason."""

from __future__ import annotations

import math
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from spawnsim import Evaluation, TrainingStep
from spawnsim.training import steps
from tests.training.test_steps import RANKS, batch, build, loss_of, run, sgd, weights


def agree(main, *, rtol=1e-5, atol=1e-6):
    """Run it together and eagerly; return the warnings of the first."""
    (together, result), (eager, _) = (run(main, eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=rtol, atol=atol)
    return result.what.get("warnings", [])


def three_steps(comm):
    """Train a model; return its weights."""
    model = build(comm.rank)
    optimizer, step = sgd(model), TrainingStep(loss_of)
    for iteration in range(3):
        with comm.compute(0.01):
            step(model, optimizer, *batch(comm.rank, iteration))
    return weights(model)


def zeroed(optimizer, *_):
    """A hook of an optimizer, by which nothing is learnt."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.zero_()


def forgotten(parameter):
    """A hook of a parameter whose gradient is there, by which it learns nothing."""
    parameter.grad.zero_()


REFUSED = {
    "hook of a module": lambda m, o: m[0].register_forward_hook(lambda _, given, out: 2 * out),
    "hook of a parameter": lambda m, o: m[0].weight.register_hook(lambda gradient: 0 * gradient),
    "hook of a gradient": lambda m, o: m[0].bias.register_post_accumulate_grad_hook(forgotten),
    "hook of an optimizer": lambda m, o: o.register_step_pre_hook(zeroed),
    "hook in the dictionary": lambda m, o: m[0]._forward_hooks.update({-1: lambda _, given, out: 2 * out}),
    "another step": lambda m, o: setattr(o, "step", lambda: zeroed(o)),
}


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_passed_over_makes_a_model_step_alone(kind, at):
    """From the start, or from the middle on, when steps wait: they are made without it."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(6):
            if iteration == at:
                REFUSED[kind](model, optimizer)
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
        return weights(model)

    (warning,) = agree(main)
    assert "step alone" in warning
    assert ("hooks" if "hook" in kind else "replaced") in warning


@pytest.mark.parametrize(
    "register",
    [nn.modules.module.register_module_forward_pre_hook, register_optimizer_step_pre_hook],
    ids=["modules", "optimizers"],
)
def test_hooks_of_all_modules_and_optimizers_make_models_step_alone(register):
    """They are torch's own, and not a model's."""
    calls = []
    handle = register(lambda *_: calls.append(1) and None)
    try:
        (warning,) = agree(three_steps)
    finally:
        handle.remove()
    assert "hooks" in warning
    assert len(calls) % (2 * 3 * RANKS) == 0, "as often together as eagerly"


def test_a_scheduler_that_wraps_a_step_makes_no_model_step_alone():
    """Torch's own replaces `optimizer.step` by what calls it, here in the middle."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(6):
            if iteration == 3:
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            if iteration >= 3:
                schedule.step()
        return weights(model)

    assert agree(main) == []


class Tied(nn.Module):
    """Two layers that have one memory, but not one parameter."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.middle, self.last = (
            build(seed, (20, 12)),
            build(seed, (12, 12)),
            build(seed, (12, 12)),
        )
        self.last[0].weight.data = self.middle[0].weight.data

    def forward(self, x):
        return self.last(self.middle(self.first(x)))


@pytest.mark.parametrize(
    ("model_of", "why"), [(Tied, "share memory"), (lambda seed: torch.jit.script(build(seed)), "TorchScript")]
)
def test_models_that_no_rows_can_hold_step_alone(model_of, why):
    """Parameters over each other would come apart; of TorchScript's modules no attributes are seen."""

    def main(comm):
        model = model_of(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(4):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    (warning,) = agree(main)
    assert why in warning


def test_an_input_that_requires_a_gradient_gets_one():
    """Split learning: what came before learns through the features."""

    def main(comm):
        before, head = nn.Linear(20, 20), build(comm.rank)
        with torch.no_grad():
            before.weight.copy_(torch.eye(20))
            before.bias.zero_()
        early, late, step = sgd(before), sgd(head), TrainingStep(loss_of)
        for iteration in range(4):
            x, y = batch(comm.rank, iteration)
            early.zero_grad()
            with comm.compute(0.01):
                step(head, late, before(x), y)
            early.step()
        return weights(before), weights(head)

    (warning,) = agree(main)
    assert "requires a gradient" in warning


def test_a_loss_that_draws_from_a_ranks_streams_steps_alone():
    """Whose stream would it be, if it were computed once for all?"""

    def main(comm):
        model = build(comm.rank)
        optimizer = sgd(model)
        step = TrainingStep(lambda m, x, y: loss_of(m, x, y) * comm.rng("noise").uniform(0.5, 1.0))
        drawn = TrainingStep(lambda m, x, y, draw=comm.rng: loss_of(m, x, y) * draw.uniform(0.5, 1.0))
        for iteration in range(4):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
                drawn(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    assert ["streams" in each or "Streams" in each for each in agree(main)] == [True, True]


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_frozen_before_an_evaluation_stays(frozen):
    """Or is thawed: while an evaluation waits, as while nothing does."""

    def main(comm):
        model = build(comm.rank)
        model[0].requires_grad_(frozen)
        optimizer, step, evaluate = sgd(model), TrainingStep(loss_of), Evaluation(loss_of)
        for iteration in range(6):
            if iteration == 2:
                model[0].requires_grad_(not frozen)
                comm.record(loss=evaluate(model, *batch(0, 0)))
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model)

    agree(main)


@pytest.mark.parametrize("order", [(True, False), (False, True), (True, True, False, False, True)])
def test_a_step_leaves_gradients_or_none_whatever_waits_before_it(order):
    """Of two steps of one model that wait, the last decides."""

    def main(comm):
        model = build(comm.rank)
        optimizer, steps = sgd(model), [TrainingStep(loss_of, gradients=each) for each in (False, True)]
        for iteration, gradients in enumerate(order):
            with comm.compute(0.01):
                steps[gradients](model, optimizer, *batch(comm.rank, iteration))
        kept = [p.grad for p in model.parameters()]
        assert [each is not None for each in kept] == [order[-1]] * len(kept)
        return weights(model), [each for each in kept if each is not None]

    agree(main)


def test_a_steps_own_settings_count_from_the_next_call_on():
    """The norm to which it clips, whether it leaves gradients, and its function."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step, evaluate = sgd(model), TrainingStep(loss_of, max_norm=1.0), Evaluation(loss_of)
        seen = []
        for iteration in range(12):
            if iteration == 3:
                step.max_norm = 0.01
            if iteration == 6:
                step.function = evaluate.function = lambda m, x, y: 2 * loss_of(m, x, y)
            if iteration == 9:
                step.gradients = True
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            seen += [loss, evaluate(model, *batch(0, 0))]
        return weights(model), torch.stack(seen), [p.grad for p in model.parameters()]

    assert agree(main) == []


def test_numbers_differ_if_their_digits_do():
    """-0.0 is not 0.0, and NaN is itself: beside the batch, and around the loss."""

    def main(comm):
        model, given = build(comm.rank), [0.0, math.nan]
        optimizer = sgd(model, lr=0.0)
        step = TrainingStep(
            lambda m, x, y, sign: loss_of(m, x, y) * math.copysign(1, sign) * math.copysign(2, given[0])
        )
        losses = []
        for iteration in range(8):
            given[0] = -0.0 if iteration == 5 else 0.0
            with comm.compute(0.01):
                losses.append(
                    step(model, optimizer, *batch(comm.rank, iteration), 0.0 if iteration % 2 else -0.0)
                )
        return torch.stack(losses)

    assert agree(main) == []


READ = {
    "torch.tensor": lambda loss, model: torch.tensor(loss),
    "torch.tensor of a list": lambda loss, model: torch.tensor([loss, 2.0, loss]),
    "torch.as_tensor": lambda loss, model: torch.as_tensor([[loss], (loss,)]),
    "torch.FloatTensor": lambda loss, model: torch.FloatTensor([loss, loss]),
    "torch.full": lambda loss, model: torch.full((2,), fill_value=loss),
    "torch.scalar_tensor": lambda loss, model: torch.scalar_tensor(loss),
    "new_tensor": lambda loss, model: torch.ones(1).new_tensor([loss]),
    "new_full": lambda loss, model: torch.ones(1).new_full((2,), loss),
    "nn.Parameter": lambda loss, model: nn.Parameter(model[0].weight),
    "torch.full_like": lambda loss, model: torch.full_like(torch.ones(2), loss),
    "a deque": lambda loss, model: torch.tensor(deque([loss, loss])),
    "a sparse tensor": lambda loss, model: torch.sparse_coo_tensor(
        [[0]], [loss], (2,), check_invariants=True
    ).to_dense(),
    "as_subclass": lambda loss, model: model[0].weight.as_subclass(torch.Tensor),
    "numpy": lambda loss, model: torch.from_numpy(np.array([loss, loss])),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("kind", READ)
def test_what_torch_reads_without_asking_a_tensors_class_is_a_look(kind):
    """Of a loss or a parameter that waits; in the middle of a call, without autograd, or not."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(6):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            if iteration == 3:
                seen = READ[kind](loss, model).detach().clone().double()
        assert torch.is_grad_enabled()
        model(batch(0, 0)[0]).sum().backward()
        return weights(model), seen

    functions = torch.tensor, torch.Tensor.new_full, nn.Parameter.__new__
    assert agree(main) == []
    assert functions == (torch.tensor, torch.Tensor.new_full, nn.Parameter.__new__), (
        "they are torch's own again"
    )
    torch.ones(1, requires_grad=True).sum().backward()


def test_a_result_that_is_read_unnoticed_is_no_number():
    """As a number of an operation, of which torch does not tell: look at it first."""

    def main(comm):
        model = build(comm.rank)
        step = TrainingStep(loss_of)
        with comm.compute(0.01):
            loss = step(model, sgd(model), *batch(comm.rank, 0))
        return torch.add(torch.ones(1), torch.ones(1), alpha=loss)

    assert all(map(torch.isnan, run(main)[0]))
    assert all(map(torch.isfinite, run(main, eager=True)[0]))


def saved_twice(model, x):
    """A gradient by way of hooks of what autograd saves."""
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: 2 * saved, lambda saved: saved):
        outcome = model(x).sum()
    return torch.autograd.grad(outcome, model[0].weight)[0]


def checkpointed(model, x):
    """A gradient for which the model is computed twice."""
    outcome = checkpoint(model, x, use_reentrant=False).sum()
    return torch.autograd.grad(outcome, model[0].weight)[0]


def on_meta(model, x):
    """Weights, under a mode by which new tensors have no numbers."""
    with torch.device("meta"):
        return model[0].weight.detach().clone()


def counted(model, x):
    """How many operations a forward pass has."""
    with FlopCounterMode(display=False) as counter:
        model(x)
    return torch.tensor(float(counter.get_total_flops()))


def traced(x, loss):
    """An outcome by way of a trace, of a function that looks at a loss: weights would have to be its arguments."""
    return torch.jit.trace(lambda given: given * loss.item(), x)(x)


WITHIN = {
    "vmap": lambda model, x, loss: torch.vmap(model)(x),
    "jacobian": lambda model, x, loss: torch.func.jacrev(lambda given: model(given).sum(0))(x),
    "gradient": lambda model, x, loss: torch.func.grad(lambda given: model(given).sum())(x),
    "saved": lambda model, x, loss: saved_twice(model, x),
    "checkpoint": lambda model, x, loss: checkpointed(model, x),
    "device": lambda model, x, loss: on_meta(model, x),
    "counted": lambda model, x, loss: counted(model, x),
    "traced": lambda model, x, loss: traced(x, loss),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit.trace")
@pytest.mark.parametrize("kind", WITHIN)
def test_a_look_in_the_middle_of_something_of_torchs_changes_nothing_there(kind):
    """Nor does it change what others compute: they neither run then, nor are their steps seen by a vmap or a mode."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        seen = []
        for iteration in range(6):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            if iteration % 3 == comm.rank % 3:
                seen.append(WITHIN[kind](model, batch(0, 0)[0], loss).detach().clone())
        return weights(model), seen

    assert agree(main, rtol=1e-4) == []


def test_numbers_of_an_optimizer_may_be_tensors():
    """A learning rate that is a loss which waits; a weight decay that is changed in place."""

    def main(comm):
        model = build(comm.rank)
        decay = torch.tensor(0.01)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
        step = TrainingStep(loss_of)
        for iteration in range(12):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            if iteration == 5:
                optimizer.param_groups[0]["lr"] = loss
            if iteration == 8:
                optimizer.param_groups[0]["lr"] = 0.01
                decay.fill_(0.5)
        return weights(model)

    assert agree(main, rtol=1e-3, atol=1e-4) == []


def test_state_that_begins_anew_with_other_settings_takes_another_row():
    """`amsgrad` keeps one tensor more."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = torch.optim.AdamW(model.parameters(), lr=0.01), TrainingStep(loss_of)
        for iteration in range(8):
            if iteration == 4:
                optimizer.state.clear()
                optimizer.param_groups[0]["amsgrad"] = True
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model), [state["max_exp_avg_sq"] for state in optimizer.state.values()]

    assert agree(main, rtol=1e-4) == []


class Learning(nn.Module):
    """A model with a number that is trained, though it is no parameter."""

    def __init__(self, seed):
        super().__init__()
        self.layers, self.factor = build(seed), torch.tensor(1.0, requires_grad=True)

    def forward(self, x):
        return self.layers(x) * self.factor


def test_an_attribute_that_requires_a_gradient_gets_one():
    """By another optimizer, perhaps, or by hand."""

    def main(comm):
        model = Learning(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(4):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
            with torch.no_grad():
                model.factor -= 0.1 * model.factor.grad
                model.factor.grad = None
        return weights(model), model.factor.detach()

    (warning,) = agree(main)
    assert "factor requires a gradient" in warning


def test_tensors_may_be_swapped_while_steps_wait():
    """The steps that wait are those of the weight that was there."""

    def main(comm):
        model, other = build(comm.rank), build(RANKS + comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(6):
            if iteration == 3:
                torch.utils.swap_tensors(model[0].weight, other[0].weight)
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model), weights(other)

    assert agree(main) == []


def test_a_batch_that_fails_by_itself_keeps_nobody_alone(sizes):
    """The first batch of the first rank has a class that there is not."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(6):
            x, y = batch(comm.rank, iteration)
            if comm.rank == iteration == 0:
                with pytest.raises(IndexError):
                    step(model, optimizer, x, y + 1000)
            with comm.compute(0.01):
                step(model, optimizer, x, y)
        return weights(model)

    assert agree(main) == []
    assert max(sizes) == RANKS


class Head:
    """What a loss makes, and what reads the model as it is made."""

    def __init__(self, model):
        self.scale = model.scale

    def __call__(self, outcome):
        return outcome * self.scale


class Losses:
    """A loss that is inherited."""

    @staticmethod
    def of(model, x, y):
        """Return it."""
        return model.scale * loss_of(model, x, y)


class Own(Losses):
    """Who inherits it."""


class Mapped:
    """Settings under other names, as some libraries have them."""

    def __init__(self, scale):
        self.scale = scale

    def __getattribute__(self, name):
        return super().__getattribute__("scale" if name == "factor" else name)


UNSEEN = {
    "as an object is made": lambda m, x, y: cross_entropy(Head(m)(m(x)), y),
    "by what is inherited": lambda m, x, y: Own.of(m, x, y),
    "by another name": lambda m, x, y: m.settings.factor * loss_of(m, x, y),
    "by a call that was set": lambda m, x, y: loss_of(m, x, y),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_ranks_are_computed_with_their_own_settings_however_they_are_read(kind):
    """Where nobody is seen to read them, too."""

    def main(comm):
        model = build(comm.rank)
        model.scale = 1.0 + comm.rank
        model.settings = Mapped(2.0 + comm.rank)
        if kind == "by a call that was set":
            model[1].forward = torch.relu if comm.rank % 2 else torch.sigmoid
        optimizer, step = sgd(model), TrainingStep(UNSEEN[kind])
        for iteration in range(6):
            if kind == "by a call that was set" and iteration == 4:
                model[1].forward = torch.tanh
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)
        return weights(model)

    (together, _), (eager, _) = (run(main, eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)


def test_state_that_begins_anew_leaves_views_of_it_alone():
    """Kept to go back to, as an array or without its gradient."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = torch.optim.Adam(model.parameters(), lr=0.01), TrainingStep(loss_of)
        kept = []
        for iteration in range(8):
            if iteration == 4:
                kept = [state["exp_avg"].detach() for state in optimizer.state.values()]
                optimizer.state.clear()
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return weights(model), kept

    assert agree(main, rtol=1e-4, atol=1e-5) == []


def test_a_loss_under_autocast_steps_alone():
    """Entered within the loss: in half precision rows round otherwise."""

    def loss_in_half(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            outcome = model(x)
        return cross_entropy(outcome.float(), y)

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_in_half)
        for iteration in range(4):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        assert pickle.loads(pickle.dumps(torch.tensor)) is torch.tensor
        return weights(model)

    (warning,) = agree(main, rtol=0.0, atol=0.0)
    assert "autocast" in warning


def test_models_step_alone_where_torch_is_too_old(monkeypatch):
    """Rows are held by what Python keeps of a storage, which earlier versions let go."""
    monkeypatch.setattr(steps, "OLDEST", "99.1")
    (warning,) = agree(three_steps, rtol=0.0, atol=0.0)
    assert f"torch {torch.__version__} is older than 99.1" in warning


def test_a_default_device_keeps_nobody_from_stepping_together(sizes):
    """It is a mode of torch's, and that of all ranks."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        losses = []
        for iteration in range(4):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            losses.append(float(loss))
        return weights(model), losses

    torch.set_default_device("cpu")
    try:
        assert agree(main) == []
    finally:
        torch.set_default_device(None)
    assert sizes and min(sizes) > 1


def test_to_begin_a_step_makes_no_generators():
    """Of a rank that draws nothing: they would be saved with it, and restored, which takes time."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        saved = comm.restore(model=model, optimizer=optimizer)
        for iteration in range(saved.iteration if saved else 0, 10):
            with comm.compute(0.02):
                step(model, optimizer, *batch(comm.rank, iteration))
            if iteration % 3 == 2:
                comm.checkpoint(iteration=iteration + 1, model=model, optimizer=optimizer)
            comm.Barrier()
        return weights(model)

    faults = "crash:*@0.1s; restart:*@0.3s"
    (together, result), (eager, plain) = (run(main, eager=each, faults=faults) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-5, atol=1e-6)
    assert result.totals["virtual_seconds"] == plain.totals["virtual_seconds"]
