"""Masks of dropout in programs that do the unusual, and steps where memory runs short: as eagerly."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from spawnsim import TrainingStep
from spawnsim.errors import RankError
from spawnsim.training.batches import StepBatch
from spawnsim.training.row_step import RowStep
from tests.training.test_steps import RANKS, batch, build, loss_of, run, sgd


class Net(nn.Module):
    """The usual network, with dropout of its input and of what is hidden."""

    def __init__(self, seed):
        super().__init__()
        self.network, self.drop = build(seed), nn.Dropout(0.3)

    def forward(self, x):
        return self.network[2](self.drop(self.network[1](self.network[0](self.drop(x)))))


def trains(comm, model, loss=loss_of, given=batch, between=lambda iteration: None, optimizer=None, count=9):
    """Train; return weights, losses, and what is drawn afterwards."""
    optimizer, step, losses = (optimizer or (lambda m: sgd(m, lr=0.01)))(model), TrainingStep(loss), []
    for iteration in range(count):
        with comm.compute(0.01):
            losses.append(step(model, optimizer, *given(comm.rank, iteration)))
        between(iteration)
    return [p.detach().clone() for p in model.parameters()], torch.stack(losses), torch.rand(3)


def require_as_eager(main, **how):
    """Require that a program ends as eagerly."""
    eager, _ = run(main, eager=True, **how)
    together, _ = run(main, **how)
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------- steps are lost when memory runs out twice
def test_no_step_is_lost_where_memory_becomes_less_a_second_time(monkeypatch):
    """64 ranks on a GPU that has room for 16 models at first, and for 4 later (another process comes)."""
    compute, calls = StepBatch.compute, []

    def limited(self, works):
        calls.append(len(works))
        if len(works) > (16 if len(calls) < 6 else 4):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        compute(self, works)

    def main(comm):
        return trains(comm, build(comm.rank))

    eager, _ = run(main, ranks=64, eager=True)
    monkeypatch.setattr(StepBatch, "compute", limited)
    together, _ = run(main, ranks=64)
    assert not any(losses.isnan().any() for _, losses, _ in together)
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)


def test_a_step_is_not_made_twice_where_memory_runs_out_amid_its_update(monkeypatch):
    """It has counted its steps and updated its first group already: an error, and not other weights."""
    update, calls = RowStep._update_span, []

    def limited(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:  # the second group of the first update
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        update(self, *args, **kwargs)

    def main(comm):
        def adam(model):
            return torch.optim.Adam([{"params": model[i].parameters()} for i in (0, 2)], lr=0.01)

        return trains(comm, build(comm.rank), optimizer=adam)

    monkeypatch.setattr(RowStep, "_update_span", limited)
    with pytest.raises(RankError, match="CUDA out of memory") as error:
        run(main)
    notes = error.value.__cause__.__notes__
    assert notes[0] == f"amid an update of {calls[0] * RANKS} models together, which cannot be made again"


# ------------------------------------------------------------- masks keep the share that they had at first
class OfClass(Net):
    """Its share is an attribute of its class: `Config.p`, `args.dropout` are the same."""

    share = 0.3
    width = 20

    def forward(self, x):
        x = functional.pad(
            functional.dropout(x[:, : self.width], self.share, self.training), (0, 20 - self.width)
        )
        return self.network(x)


SHARE = 0.3


class OfVariable(Net):
    """Its share is a variable of the module, which its method reads."""

    def forward(self, x):
        return self.network(functional.dropout(x, SHARE, self.training))


TEACHER = None


def distilled(model, x, y):
    """A loss with a teacher that is a global."""
    with torch.no_grad():
        target = TEACHER(x)
    output = model(x)
    return cross_entropy(output, y) + (output - target).pow(2).mean()


def changes():
    """Yield how something is put as it was, how it is changed, a model and a loss."""

    def of_class(name, before, after):
        def put(value):
            OfClass.share, OfClass.width = 0.3, 20
            setattr(OfClass, name, value)

        return lambda: put(before), lambda: put(after), OfClass, loss_of

    def variable(value):
        def put():
            global SHARE
            SHARE = value

        return put

    def teacher():
        global TEACHER
        TEACHER = Net(99)

    yield "class attribute, 0.3 to 0.6", *of_class("share", 0.3, 0.6)
    yield "class attribute, 0.3 to 0", *of_class("share", 0.3, 0.0)
    yield "class attribute, 0 to 0.3", *of_class("share", 0.0, 0.3)
    yield "shape, by a class attribute", *of_class("width", 20, 10)
    yield "variable of a module", variable(0.3), variable(0.6), OfVariable, loss_of
    yield "teacher that is evaluated from then on", teacher, lambda: TEACHER.eval(), Net, distilled


CHANGES = {name: rest for name, *rest in changes()}


@pytest.mark.parametrize("name", CHANGES)
def test_masks_follow_what_a_method_reads(name):
    """Changed while no step waits, between two barriers."""
    before, after, kind, loss = CHANGES[name]

    def main(comm):
        if comm.rank == 0:
            before()
        comm.Barrier()
        model = kind(comm.rank)
        optimizer, step, losses = sgd(model, lr=0.01), TrainingStep(loss), []
        for iteration in range(12):
            with comm.compute(0.01):
                losses.append(step(model, optimizer, *batch(comm.rank, iteration)))
            if iteration == 5:
                float(losses[-1])
                comm.Barrier()
                if comm.rank == 0:
                    after()
                comm.Barrier()
        return torch.stack(losses), torch.rand(3)

    try:
        require_as_eager(main)
    finally:
        before()


# ----------------------------------------------------- masks are drawn in the order of another memory layout
def images(rank, iteration):
    """Images that on odd ranks lie as loaders of PIL images leave them: channels last."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    x = torch.randn(8, 4, 4, 3, generator=generator).permute(0, 3, 1, 2)
    return (x if rank % 2 else x.contiguous()), torch.randint(0, 5, (8,), generator=generator)


def convolution(seed):
    """A network of images."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(128, 5)
    )


def test_masks_of_inputs_that_lie_otherwise():
    """On some ranks alone."""
    require_as_eager(lambda comm: trains(comm, convolution(comm.rank), given=images))


def test_masks_of_images_of_one_channel_that_lie_otherwise():
    """They are contiguous either way, but what convolutions make of them is not."""

    def given(rank, iteration):
        x, y = images(0, 97 * rank + iteration)
        x = x[:, :1].contiguous()
        return (x.as_strided(x.shape, (16, 1, 4, 1)) if rank % 2 else x), y

    def network(seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Dropout(0.3), nn.Flatten(), nn.Linear(128, 5))

    require_as_eager(lambda comm: trains(comm, network(comm.rank), given=given))


def test_masks_of_an_input_that_lies_otherwise_from_some_step_on():
    """Of one rank alone, too."""

    def given(rank, iteration):
        x, y = batch(rank, iteration)
        return (x if iteration < 5 else x.t().contiguous().t()), y

    require_as_eager(lambda comm: trains(comm, Net(comm.rank), given=given))


def test_masks_of_a_model_whose_weights_lie_channels_last():
    """`model.to(memory_format=torch.channels_last)`: rows hold its weights contiguously, activations follow them."""

    def main(comm):
        model = convolution(comm.rank).to(memory_format=torch.channels_last)
        return trains(comm, model, given=lambda rank, i: images(0, 97 * rank + i))

    require_as_eager(main)


# --------------------------------------------------------------------- a loss that steers the generator itself
def seeds_in_a_fork(model, x, y):
    """The same mask at each step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        x = functional.dropout(x, 0.4)
    return cross_entropy(model(x), y)


def passes_twice(model, x, y):
    """Two passes with the same masks."""
    state = torch.get_rng_state()
    one = model(x)
    torch.set_rng_state(state)
    return cross_entropy(one, y) + 0.1 * (one - 2 * model(x)).pow(2).mean()


@pytest.mark.parametrize("loss", [seeds_in_a_fork, passes_twice])
def test_a_loss_that_puts_the_generator_back(loss):
    """It steps alone, though nothing seems to have been drawn in the end."""
    require_as_eager(lambda comm: trains(comm, Net(comm.rank), loss))


# -------------------------------------------------------------------------------- dropout of expanded tensors
def of_an_expanded_input(model, x, y):
    """Three samples of dropout for each input."""
    return cross_entropy(model.network(functional.dropout(x.expand(3, *x.shape), 0.3).mean(0)), y)


def of_what_is_hidden(model, x, y):
    """A mean, for all outputs."""
    output = model(x)
    return cross_entropy(output + functional.dropout(output.mean(1, keepdim=True).expand_as(output), 0.3), y)


def of_overlapping_windows(model, x, y):
    """Windows of four, that begin at each second number."""
    return cross_entropy(model.network(x), y) + 0.01 * functional.dropout(x.unfold(1, 4, 2), 0.2).sum()


@pytest.mark.parametrize("loss", [of_an_expanded_input, of_what_is_hidden, of_overlapping_windows])
def test_dropout_of_what_lies_over_itself(loss):
    """Masks of it are dense."""
    require_as_eager(lambda comm: trains(comm, Net(comm.rank), loss))


# --------------------------------------------------------------- vmap, gradients and dtypes within the loss
def each_its_own(model, x, y):
    """A mask for each example."""
    return cross_entropy(
        model.network(torch.func.vmap(lambda one: functional.dropout(one, 0.4), randomness="different")(x)), y
    )


def unless_gradients_are_recorded(model, x, y):
    """The second dropout is one of evaluation alone."""
    x = functional.dropout(functional.dropout(x, 0.2), 0.4, not torch.is_grad_enabled())
    return cross_entropy(model.network(x), y)


def of_frozen_weights(model, x, y):
    """The same, by a parameter."""
    x = functional.dropout(functional.dropout(x, 0.2), 0.4, not model.network[0].weight.requires_grad)
    return cross_entropy(model.network(x), y)


@pytest.mark.parametrize("loss", [each_its_own, unless_gradients_are_recorded, of_frozen_weights])
def test_masks_are_those_of_the_step_itself(loss):
    """With gradients, and not those of one example where vmap has many."""
    require_as_eager(lambda comm: trains(comm, Net(comm.rank), loss))


def fails_without_randomness(model, x, y):
    """Torch's own error, eagerly."""
    return cross_entropy(model.network(torch.func.vmap(lambda one: functional.dropout(one, 0.4))(x)), y)


def of_integers(model, x, y):
    """Likewise: "result type Float can't be cast to the desired output type Long"."""
    return cross_entropy(model.network(x * functional.dropout((x > 0).long(), 0.3)), y)


@pytest.mark.parametrize("loss", [fails_without_randomness, of_integers])
def test_what_torch_refuses_is_refused(loss):
    """Together, too."""
    for eager in (True, False):
        with pytest.raises(Exception, match=r"random operation|can't be cast"):
            run(lambda comm: trains(comm, Net(comm.rank), loss), eager=eager)


# ------------------------------------------------------------------- a mode of the program's around the step
class Doubled(TorchFunctionMode):
    """Doubles what linear layers give."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        outcome = function(*args, **(kwargs or {}))
        return outcome * 2 if function is functional.linear else outcome


def test_a_mode_around_the_step_counts():
    """As autocast does: around it steps are carried out at once."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step, losses = sgd(model, lr=0.01), TrainingStep(loss_of), []
        for iteration in range(5):
            with comm.compute(0.01), Doubled():
                losses.append(step(model, optimizer, *batch(comm.rank, iteration)))
        return torch.stack(losses)

    require_as_eager(main)


# --------------------------------------------------------------------------------------- what the run says
def test_models_are_never_computed_more_at_a_time_after_they_were_fewer(monkeypatch):
    """Room for 3 of 13."""
    compute = StepBatch.compute

    def limited(self, works):
        if len(works) > 3:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        compute(self, works)

    monkeypatch.setattr(StepBatch, "compute", limited)
    _, result = run(lambda comm: trains(comm, build(comm.rank)), ranks=13)
    sizes = [int(each.split(" at a time")[0].split()[-1]) for each in result.what["warnings"]]
    assert sizes == sorted(sizes, reverse=True)


def test_a_loss_that_raises_now_and_then_makes_no_groups():
    """Twelve equal models and three numbers, though what was refused is tried again."""

    def loss(model, x, y, number):
        if number == 2:
            raise ValueError("not this one")
        return cross_entropy(model(x), y)

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model, lr=0.01), TrainingStep(loss)
        for iteration in range(6):
            try:
                with comm.compute(0.01):
                    value = step(model, optimizer, *batch(comm.rank, iteration), iteration % 3)
                float(value)
            except ValueError:
                pass

    _, result = run(main, ranks=RANKS)
    assert not any("groups and more" in each for each in result.what.get("warnings") or ())
