"""Programs that do with models, losses and optimizers what a batch of steps does not expect: batched ends as eager."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import spawnsim
from spawnsim import Evaluation, TrainingStep, checkpoints
from spawnsim.comm.deferred import WAITING
from spawnsim.errors import ParameterError, RankError
from spawnsim.policies import one_storage
from spawnsim.virtual.mpi.payload import dumps
from tests.training.test_steps import accuracy_of, batch, build, loss_of, run, sgd, weights

RANKS = 13
OF_ALL_RANKS = TrainingStep(loss_of)


def train(comm, model, optimizer, step, *, between=lambda *_: None, inputs=batch, iterations=6):
    """Train; return weights and losses, none of which is looked at before."""
    losses = []
    for iteration in range(iterations):
        with comm.compute(0.01):
            losses.append(step(model, optimizer, *inputs(comm.rank, iteration)))
        between(iteration, losses[-1])
    return weights(model), torch.tensor([float(loss) for loss in losses])


def keyword_defaults(comm):
    """Ranks' losses differ in the default of a keyword."""

    def scaled(model, x, y, *, scale=1.0 + comm.rank):
        return loss_of(model, x, y) * scale

    model = build(comm.rank)
    return train(comm, model, sgd(model), TrainingStep(scaled))


def variable_that_changes(comm):
    """A weight of the loss that grows, as in annealing."""
    beta = 0

    def annealed(model, x, y):
        return loss_of(model, x, y) * (1 + beta)

    def grow(iteration, loss):
        nonlocal beta
        beta = iteration

    model = build(comm.rank)
    return train(comm, model, sgd(model), TrainingStep(annealed), between=grow)


def values_equal_but_for_their_type(comm):
    """True on odd ranks, 1 on others."""

    def doubled(model, x, y, flag):
        return loss_of(model, x, y) * (2.0 if flag is True else 1.0)

    model = build(comm.rank)
    flag = True if comm.rank % 2 else 1
    return train(comm, model, sgd(model), TrainingStep(doubled), inputs=lambda *at: (*batch(*at), flag))


def tensors_in_a_tuple(comm):
    """One buffer for all batches, given as a pair."""
    x, y = torch.empty(8, 20), torch.empty(8, dtype=torch.int64)

    def filled(rank, iteration):
        for buffer, values in zip((x, y), batch(rank, iteration), strict=True):
            buffer.copy_(values)
        return ((x, y),)

    model = build(comm.rank)
    step = TrainingStep(lambda model, pair: loss_of(model, *pair))
    return train(comm, model, sgd(model), step, inputs=filled, between=lambda *_: x.fill_(9.0))


def teacher_that_is_an_input(comm):
    """A mean teacher, which follows the student after each step."""
    student, teacher = build(comm.rank), build(comm.rank + 100)

    @torch.no_grad()
    def follow(iteration, loss):
        for mean, p in zip(teacher.parameters(), student.parameters(), strict=True):
            mean.mul_(0.5).add_(p, alpha=0.5)

    step = TrainingStep(lambda model, x, teacher: mse_loss(model(x), teacher(x).detach()))
    found = train(
        comm, student, sgd(student), step, between=follow, inputs=lambda *at: (batch(*at)[0], teacher)
    )
    return found, weights(teacher)


def one_step_object_for_all_ranks(comm):
    """Made where the module is loaded, and used by each rank for two models, with looks that come unevenly."""
    models = [build(comm.rank), build(comm.rank + 50)]
    optimizers = [sgd(model) for model in models]
    for iteration in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            with comm.compute(0.01):
                loss = OF_ALL_RANKS(model, optimizer, *batch(comm.rank, iteration))
            if (iteration + comm.rank) % 4 == 0:
                float(loss)
    return [weights(model) for model in models]


def momentum_later(comm):
    """None at first."""
    model = build(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def begin(iteration, loss):
        optimizer.param_groups[0]["momentum"] = 0.9 * (iteration > 1)

    return train(comm, model, optimizer, TrainingStep(loss_of), between=begin)


def group_added_later(comm):
    """A frozen layer joins the optimizer, and is thawed two steps later."""
    model = build(comm.rank)
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

    def thaw(iteration, loss):
        if iteration == 1:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
        model[2].requires_grad_(iteration >= 3)

    return train(comm, model, optimizer, TrainingStep(loss_of), between=thaw)


def converted_to_double(comm):
    """`model.double()` between steps."""
    model = build(comm.rank)

    def convert(iteration, loss):
        if iteration == 2:
            model.double()

    def inputs(rank, iteration):
        return batch(rank, iteration, torch.float64 if iteration > 2 else torch.float32)

    return train(
        comm,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        TrainingStep(loss_of),
        between=convert,
        inputs=inputs,
    )


def evaluated_in_inference_mode(comm):
    """As programs evaluate."""
    model, evaluate, found = build(comm.rank), Evaluation(accuracy_of), []

    @torch.inference_mode()
    def look(iteration, loss):
        found.append(evaluate(model, *batch(99, 0)))

    trained = train(comm, model, sgd(model), TrainingStep(loss_of), between=look)
    return trained, torch.stack(found)


class Tied(nn.Module):
    """An embedding whose weights are those of the output, too."""

    def __init__(self, seed):
        super().__init__()
        self.inner, self.outer = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.inner.weight.data = build(seed, (6, 11))[0].weight.data
        self.outer.weight = self.inner.weight

    def forward(self, tokens):
        return self.outer(self.inner(tokens).mean(1))


def tied_parameters(comm):
    """Both uses count for the gradient."""
    model = Tied(comm.rank)

    def inputs(rank, iteration):
        return torch.arange(12).view(4, 3) % (7 + rank % 4), torch.tensor([1, 2, 3, (rank + iteration) % 11])

    return train(comm, model, sgd(model), TrainingStep(loss_of), inputs=inputs)


class Remembering(nn.Module):
    """Keeps its last outputs."""

    def __init__(self, seed):
        super().__init__()
        self.inner, self.last = build(seed), None

    def forward(self, x):
        self.last = self.inner(x)
        return self.last


def outputs_kept_in_an_attribute(comm):
    """The program looks at them, half of the ranks also before their first step."""
    model, seen = Remembering(comm.rank), []
    if comm.rank % 2:
        model(torch.ones(1, 20))
    found = train(
        comm,
        model,
        sgd(model),
        TrainingStep(loss_of),
        between=lambda *_: seen.append(model.last.detach().mean()),
    )
    return found, torch.stack(seen)


class Moded(nn.Module):
    """Computes otherwise in training."""

    def __init__(self, seed):
        super().__init__()
        self.inner = build(seed)

    def forward(self, x):
        return self.inner(x) * (2.0 if self.training else 1.0)


def steps_in_another_mode(comm):
    """`train()` and `eval()` between steps, each rank by itself."""
    model = Moded(comm.rank)
    return train(
        comm,
        model,
        sgd(model),
        TrainingStep(loss_of),
        between=lambda iteration, _: model.train(iteration % 2 == comm.rank % 2),
    )


def look_by_vmap(comm):
    """A parameter that torch wraps for `vmap` without telling its class."""
    model, seen = build(comm.rank), []

    def look(iteration, loss):
        seen.append(torch.vmap(lambda row: row * 2)(model[0].weight).detach().clone())

    return train(comm, model, sgd(model), TrainingStep(loss_of), between=look), torch.stack(seen)


def optimizer_that_loads_in_between(comm):
    """The state of momentum is exchanged after the second step, which nobody has looked at."""
    model = build(comm.rank)
    optimizer = sgd(model)
    other_model = build(comm.rank + 100)
    other = sgd(other_model)
    loss_of(other_model, *batch(comm.rank, 100)).backward()
    other.step()
    saved = other.state_dict()

    def load(iteration, loss):
        if iteration == 2:
            optimizer.load_state_dict(saved)

    return train(comm, model, optimizer, TrainingStep(loss_of), between=load, iterations=9)


def batches_of_two_sizes(comm):
    """A short one now and then, on other ranks at other times."""

    def some(rank, iteration):
        x, y = batch(rank, iteration)
        return (x[:5], y[:5]) if (rank + iteration) % 3 == 0 else (x, y)

    model = build(comm.rank)
    return train(comm, model, sgd(model), TrainingStep(loss_of), inputs=some, iterations=20)


def two_losses_in_turn(comm):
    """Two step objects train one model, under one optimizer or under two."""
    model = build(comm.rank)
    steps = TrainingStep(loss_of), TrainingStep(lambda m, x, y: m(x).square().mean())
    optimizers = [sgd(model), sgd(model, lr=0.01)]
    losses = []
    for iteration in range(20):
        with comm.compute(0.01):
            step, optimizer = steps[iteration % 2], optimizers[iteration >= 10 and iteration % 2]
            losses.append(step(model, optimizer, *batch(comm.rank, iteration)))
    return weights(model), torch.stack(losses)


def more_steps_than_are_put_off(comm):
    """With Adam and a schedule; ranks look at different times."""
    model = build(comm.rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)

    def look(iteration, loss):
        schedule.step()
        if iteration % 11 == comm.rank % 11:
            float(loss)

    return train(comm, model, optimizer, TrainingStep(loss_of), between=look, iterations=30)


def outcomes_that_are_inputs(comm):
    """The loss and the output before, another model's weight, and the momentum: none has been looked at."""
    model, other = build(comm.rank), build(comm.rank + 50)
    optimizer, of_other = sgd(model), sgd(other)

    def loss(model, x, y, before, output, weight):
        found = model(x)
        return loss_of(model, x, y) + 0.1 * before + mse_loss(found, output) + (
            model[0].weight * weight
        ).mean(), found

    step, plain = TrainingStep(loss), TrainingStep(loss_of)
    evaluate = Evaluation(lambda m, w: (m[0].weight * w).sum())
    before, output, seen = torch.tensor(0.5), torch.zeros(8, 5), []
    for iteration in range(7):
        x, y = batch(comm.rank, iteration)
        with comm.compute(0.01):
            plain(other, of_other, x, y)
            momentum = of_other.state[other[0].weight]["momentum_buffer"]
            given = other[0].weight if iteration % 2 else momentum
            plain(model, optimizer, x, y)
            before, output = step(model, optimizer, x, y, before, output, given)
        seen += [before, evaluate(model, given)]
    return weights(model), weights(other), torch.stack(seen)


def weights_exchanged_for_an_evaluation(comm):
    """By `parameter.data`, and back, as programs that keep a moving average do; two models exchange a layer, too."""
    models = [build(comm.rank), build(comm.rank + 50)]
    optimizers, seen = [sgd(m) for m in models], []
    step, evaluate = TrainingStep(loss_of), Evaluation(accuracy_of)
    for iteration in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        kept = [p.data for p in models[0].parameters()]
        for p in models[0].parameters():
            p.data = torch.full_like(p, 0.1)
        seen.append(evaluate(models[0], *batch(99, 0)))
        if iteration % 2:  # trained as well
            seen.append(step(models[0], optimizers[0], *batch(comm.rank, 50 + iteration)))
        for p, data in zip(models[0].parameters(), kept, strict=True):
            p.data = data
        one, other = models[0][2].weight, models[1][2].weight
        one.data, other.data = other.data, one.data
    return [weights(model) for model in models], torch.stack(seen)


def state_that_begins_anew(comm):
    """Of one parameter, under Adam; and a saved state, loaded twice, which torch goes on changing. Two losses."""
    model = build(comm.rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    steps = TrainingStep(loss_of), TrainingStep(loss_of)
    losses, saved = [], {}
    for iteration in range(12):
        with comm.compute(0.01):
            losses.append(steps[iteration % 2](model, optimizer, *batch(comm.rank, iteration)))
        if iteration == 2 + comm.rank % 2:
            optimizer.state[model[2].weight] = {}
        if iteration == 5:
            saved = copy.deepcopy(optimizer.state_dict())
        if iteration in (7, 10):
            optimizer.load_state_dict(saved)
    return weights(model), torch.stack(losses), [dict(each) for each in optimizer.state.values()]


def model_that_is_rebuilt(comm):
    """A new head, a hook and a setting that the rows do not know; a copy that trains on."""
    model = build(comm.rank)
    optimizer, step, losses, calls = sgd(model), TrainingStep(loss_of), [], []
    for iteration in range(12):
        with comm.compute(0.01):
            losses.append(step(model, optimizer, *batch(comm.rank, iteration)))
        if iteration == 2:
            optimizer.param_groups[0]["dampening"] = 0.5
        if iteration == 4:
            model, optimizer = copy.deepcopy((model, optimizer))
            assert all(type(p) is nn.Parameter for p in model.parameters())
            optimizer.param_groups[0]["dampening"] = 0
        if iteration == 6:
            model[2] = build(comm.rank + 50)[2]
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if iteration == 8:
            hook = model.register_forward_hook(lambda module, given, output: output * 2)
        if iteration == 9:
            hook.remove()
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
    return weights(model), torch.stack(losses), torch.tensor(calls)


def gradients_that_are_kept(comm):
    """Those of the step before, beside the new ones; set to None between; and none where they are not asked for."""
    model, seen = build(comm.rank), []
    optimizer, kept, last = sgd(model), TrainingStep(loss_of, gradients=True), None
    plain, weight = TrainingStep(loss_of), model[0].weight
    for iteration in range(8):
        with comm.compute(0.01):
            kept(model, optimizer, *batch(comm.rank, iteration))
        if iteration % 3 == 1:
            seen += [weight.grad.sum(), torch.zeros(()) if last is None else last.sum()]
            last = weight.grad
        if iteration % 3 == 2:
            optimizer.zero_grad()
        if iteration > 5:
            loss_of(model, *batch(comm.rank, 9)).backward()
            plain(model, optimizer, *batch(comm.rank, 9))
            seen.append(torch.tensor(float(weight.grad is None)))
    return weights(model), torch.stack(seen)


def pickled(comm):
    """Models, parameters, states and results of calls, sent to another rank; one model lies in one storage."""
    sizes, made = [], [build(comm.rank), build(comm.rank + 50), build(comm.rank + 90)]
    one_storage(made[2])
    optimizers = [sgd(made[0]), torch.optim.AdamW(made[1].parameters(), lr=0.01), sgd(made[2])]
    for model, optimizer in zip(made, optimizers, strict=True):
        step = TrainingStep(lambda m, x, y: (loss_of(m, x, y), m(x)), gradients=model is not made[1])
        for iteration in range(3):
            with comm.compute(0.01):
                loss, output = step(model, optimizer, *batch(comm.rank, iteration))
        accuracy = Evaluation(accuracy_of)(model, *batch(comm.rank, 7))
        grads = [p.grad for p in model.parameters()]
        weight, states = model[0].weight, [model.state_dict(), optimizer.state_dict()]
        sent = [model, optimizer, *states, weight, weight.data, weight[1], grads, loss, output, accuracy]
        for each in sent:
            sizes.append(len(dumps(each)))
            comm.send(each, (comm.rank + 1) % comm.size)
            comm.recv()
    root = comm.bcast(made[0] if comm.rank == 3 else None, 3)
    return weights(root), torch.tensor(sizes), torch.tensor(comm.clock.now())


def dropout_in_an_evaluation(comm):
    """Draws of the first evaluation of a run count as those of the others."""
    torch.manual_seed(comm.rank)
    model, evaluate, found = nn.Sequential(nn.Dropout(0.3), build(comm.rank)), Evaluation(loss_of), []

    def look(iteration, loss):
        found.append(evaluate(model, *batch(99, 0)))

    return train(comm, model, sgd(model), TrainingStep(loss_of), between=look), torch.stack(found)


def _noisy(model, x, y):
    return loss_of(model, x, y) * random.random() * np.random.rand()


def random_numbers_that_are_not_torchs(comm):
    """Each rank draws them from generators of its own, in a loss and in an evaluation."""
    model, plain, evaluate = build(comm.rank), build(comm.rank), Evaluation(_noisy)
    found = train(comm, model, sgd(model), TrainingStep(_noisy))
    train(comm, plain, sgd(plain), TrainingStep(loss_of))
    return found, [float(evaluate(plain, *batch(99, 0))) for _ in range(3)], random.random()


def parameters_in_part_of_a_storage(comm):
    """What is pickled of them is all of the storage, also where others have left it; the same of their state."""
    sizes, models = [], [build(comm.rank) for _ in range(3)]
    one_storage(models[0])
    one_storage(models[1])
    models[1][0].weight.data = models[1][0].weight.detach().clone()
    models[2][0].bias.data = torch.zeros(9, 50).t()[3:27, 2]
    optimizers = [sgd(model) for model in models]
    saved = optimizers[0].state_dict()
    shapes = [p.shape for p in models[0].parameters()]
    saved["state"] = {i: {"momentum_buffer": torch.ones(2, *shape)[1]} for i, shape in enumerate(shapes)}
    for optimizer in optimizers:
        optimizer.load_state_dict(saved)
    for model, optimizer in zip(models, optimizers, strict=True):
        before = [(p.stride(), p.storage_offset()) for p in model.parameters()]
        found = train(comm, model, optimizer, TrainingStep(loss_of))
        assert [(p.stride(), p.storage_offset()) for p in model.parameters()] == before
        sizes += [found, *(len(dumps(each)) for each in (model, optimizer.state_dict(), *model.parameters()))]
    return sizes


def outputs_that_are_weights_and_inputs(comm):
    """As they were before the update, also where the program uses one buffer for all batches."""
    x, y, seen = torch.empty(8, 20), torch.empty(8, dtype=torch.int64), []

    def filled(rank, iteration):
        for buffer, values in zip((x, y), batch(rank, iteration), strict=True):
            buffer.copy_(values)
        return x, y

    def loss(model, x, y):
        return loss_of(model, x, y), model[0].weight, model[2].bias[1:], x.t(), y

    model = build(comm.rank)
    optimizer, step = sgd(model), TrainingStep(loss)
    for iteration in range(9):
        with comm.compute(0.01):
            seen.append(step(model, optimizer, *filled(comm.rank, iteration)))
        if (iteration + comm.rank) % 4 == 0:
            float(seen[-1][0])
    return weights(model), seen


PROGRAMS = [
    outputs_that_are_weights_and_inputs,
    parameters_in_part_of_a_storage, pickled, dropout_in_an_evaluation, random_numbers_that_are_not_torchs,
    outcomes_that_are_inputs, weights_exchanged_for_an_evaluation, state_that_begins_anew, model_that_is_rebuilt,
    gradients_that_are_kept,
    keyword_defaults, variable_that_changes, values_equal_but_for_their_type, tensors_in_a_tuple,
    teacher_that_is_an_input, one_step_object_for_all_ranks, momentum_later, group_added_later, converted_to_double,
    optimizer_that_loads_in_between, batches_of_two_sizes, two_losses_in_turn, more_steps_than_are_put_off,
    evaluated_in_inference_mode, tied_parameters, outputs_kept_in_an_attribute, steps_in_another_mode, look_by_vmap,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_batched_ends_as_eager(program):
    """Weights, losses and what was seen, on ranks that straggle."""
    (batched, one), (eager, other) = (run(program, ranks=RANKS, eager=e) for e in (False, True))
    torch.testing.assert_close(batched, eager, rtol=1e-4, atol=1e-5)
    assert one.totals["virtual_seconds"] == other.totals["virtual_seconds"]


DISTRIBUTED = """
import torch
import torch.distributed as dist
from spawnsim import TrainingStep
from spawnsim.virtual.engine.kernel import current_task
from tests.training.test_steps import batch, build, loss_of, sgd, weights
dist.init_process_group("gloo")
rank = dist.get_rank()
model, step = build(rank), TrainingStep(loss_of)
optimizer = sgd(model)
for iteration in range(5):
    views = [p.data for p in model.parameters()]
    received = [torch.empty_like(view) for view in views]
    step(model, optimizer, *batch(rank, iteration))
    dist.all_reduce(views[0])
    views[0] /= dist.get_world_size()
    step(model, optimizer, *batch(rank, iteration))
    dist.isend(views[1], rank ^ 1)
    dist.recv(received[1], rank ^ 1)
    step(model, optimizer, *batch(rank, iteration))
    dist.broadcast(views[2], 3)
    step(model, optimizer, *batch(rank, iteration))
    dist.recv(views[3], 0) if rank else [dist.send(views[3], to) for to in range(1, 10)]
    torch.save((weights(model), received[1], current_task().clock), f"{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("compute", ["5us", "counted:l40s"])
def test_memory_that_is_handed_to_torch_distributed(compute, tmp_path, monkeypatch):
    """Views of weights that were taken before the step; computing that is counted takes its time at the call."""
    script, found = tmp_path / "train.py", []
    script.write_text(DISTRIBUTED)
    monkeypatch.chdir(tmp_path)
    for eager in (False, True):
        result = spawnsim.run(script, ranks=10, compute=compute, eager=eager)
        found.append(([torch.load(tmp_path / f"{rank}.pt") for rank in range(10)], result.totals))
    (batched, one), (eagerly, other) = found
    torch.testing.assert_close(batched, eagerly, rtol=1e-4, atol=1e-5)
    assert [each[-1] for each in batched] == [each[-1] for each in eagerly]
    assert [one[key] for key in ("virtual_seconds", "messages", "bytes", "events")] == [
        other[key] for key in ("virtual_seconds", "messages", "bytes", "events")
    ]


def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path):
    """Its steps go on together as they did, though batches and evaluations begin anew; it warns where that one did."""

    def main(comm, stop=0):
        model, dropping = build(comm.rank), nn.Sequential(nn.AlphaDropout(0.2), build(comm.rank + 50))
        both = nn.ModuleList([model, dropping])
        optimizers = [sgd(model), sgd(dropping)]
        saved = comm.restore(model=both, optimizer=optimizers[0])
        step, evaluate, short = TrainingStep(loss_of), Evaluation(accuracy_of), TrainingStep(loss_of)
        for iteration in range(saved.iteration if saved else 0, 11):
            for number in range(2 + (iteration % 5 == 4)):
                x, y = batch(comm.rank, iteration)
                with comm.compute(0.01 + 0.001 * comm.rank):
                    loss = (short if number else step)(model, optimizers[0], x[number:], y[number:])
            with comm.compute(0.01):
                step(dropping, optimizers[1], *batch(comm.rank, iteration))
            comm.record(iteration=iteration, loss=loss, accuracy=evaluate(model, *batch(99, 0)))
            if iteration == 3:
                optimizers[1].state.clear()
                comm.checkpoint(iteration=4, model=both, optimizer=optimizers[0])
            if iteration + 1 == stop and comm.rank == 3:
                raise KeyboardInterrupt

    how = {"ranks": RANKS, "stragglers": "lognormal:0.3"}
    whole = spawnsim.run(main, out=tmp_path / "whole", **how)
    with pytest.raises(KeyboardInterrupt):
        spawnsim.run(main, out=tmp_path / "again", parameters={"stop": 8}, **how)
    again = spawnsim.run(main, out=tmp_path / "again", resume=True, **how)
    assert again.totals["digest"] == whole.totals["digest"]
    assert again.what["warnings"] == whole.what["warnings"] != []


@pytest.mark.parametrize("first", ["evaluation", "step"])
def test_a_resumed_run_begins_anew_as_the_one_that_was_not_stopped(first, tmp_path):
    """A model that is evaluated before its first step, and two whose first steps do not come at the same time."""

    def main(comm, stop=0):
        models = nn.ModuleList([build(comm.rank), build(comm.rank + 50, (20, 9, 5))])
        optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
        saved = comm.restore(model=models)
        for optimizer, state in zip(optimizers, saved.extra if saved else (), strict=False):
            optimizer.load_state_dict(state)
        steps, evaluate = [TrainingStep(loss_of), TrainingStep(loss_of)], Evaluation(loss_of)
        for iteration in range(saved.iteration if saved else 0, 9):
            x, y = batch(comm.rank, iteration)
            if first == "evaluation":
                comm.allgather(float(evaluate(models[0], x, y)))
            for step, model, optimizer in zip(steps, models, optimizers, strict=True):
                with comm.compute(0.01):
                    loss = step(model, optimizer, x, y)
            if iteration % 3 == comm.rank % 3:
                float(loss)
            if iteration == 3:
                states = [optimizer.state_dict() for optimizer in optimizers]
                comm.checkpoint(iteration=4, model=models, extra=states)
            if iteration + 1 == stop and comm.rank == 3:
                raise KeyboardInterrupt
        comm.allgather([weights(model) for model in models])

    how = {"ranks": 9, "stragglers": "lognormal:0.5"}
    whole = spawnsim.run(main, **how)
    with pytest.raises(KeyboardInterrupt):
        spawnsim.run(main, out=tmp_path, parameters={"stop": 6}, **how)
    again = spawnsim.run(main, out=tmp_path, resume=True, **how)
    assert again.totals["digest"] == whole.totals["digest"]


def test_a_checkpoint_keeps_nothing_of_a_rank_whose_step_has_failed(tmp_path):
    """The last rank's step fails, and is carried out because others look; it has not looked itself."""

    def main(comm):
        model, last = build(comm.rank), comm.rank == comm.size - 1
        optimizer, step = sgd(model), TrainingStep(loss_of)
        x, y = batch(comm.rank, 0)
        y[2] = 5 if last else 0
        with comm.compute(0.01):
            loss = step(model, optimizer, x, y)
        with comm.compute(0.1 if last else 0.0):
            pass
        if not last:
            float(loss)
        comm.checkpoint(iteration=1, model=model, optimizer=optimizer)
        with comm.compute(1.0):
            pass
        step(model, optimizer, *batch(comm.rank, 1))

    with pytest.raises(RankError, match="out of bounds"):
        run(main, stragglers=None, out=tmp_path)
    assert not checkpoints.whole(tmp_path)


def test_a_model_that_ranks_share_makes_each_ranks_step():
    """Gradients that do not depend on the weights, so that the order of the ranks does not count."""
    model = build()
    start, optimizer = weights(model), torch.optim.SGD(model.parameters(), lr=0.01)

    def main(comm):
        step = TrainingStep(lambda model, x: sum(p.sum() for p in model.parameters()) * x)
        for _ in range(4):
            with comm.compute(0.01):
                step(model, optimizer, torch.tensor(1.0))

    run(main, ranks=RANKS)
    torch.testing.assert_close(weights(model), start - 4 * RANKS * 0.01)


def test_a_model_of_another_rank_is_evaluated_as_it_was():
    """Rank 1 has put off its evaluation behind a step of its own when rank 0 trains the model on."""
    shared = build()

    def main(comm):
        own, optimizer = build(comm.rank), sgd(shared)
        mine, step = sgd(own), TrainingStep(loss_of)
        evaluate = Evaluation(lambda model: model[0].weight.sum())
        found = []
        for iteration in range(4):
            if comm.rank == 0:
                step(shared, optimizer, *batch(0, iteration))
            comm.barrier()
            if comm.rank == 1:
                step(own, mine, *batch(1, iteration))
            found.append(evaluate(shared))
            comm.barrier()
        return torch.stack(found)

    batched = run(main, ranks=3)[0]
    shared = build()
    torch.testing.assert_close(batched, run(main, ranks=3, eager=True)[0], rtol=1e-4, atol=1e-5)


def test_no_gradients_no_step():
    """Under `no_grad` torch refuses to differentiate, in each step and not only in the first."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        step(model, optimizer, *batch(comm.rank, 0))
        with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
            step(model, optimizer, *batch(comm.rank, 1))

    run(main)


def test_what_is_recorded_beside_a_loss_counts_as_it_was():
    """A counter that is changed in place after its row, which waits for the loss."""

    def main(comm):
        model, seen = build(comm.rank), torch.zeros(())
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(4):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss, seen=seen)
            comm.record(again=seen)
            seen += 1

    table = run(main, ranks=RANKS)[1].table
    assert table["seen"][::2].tolist() == table["again"][1::2].tolist() == [0.0, 1.0, 2.0, 3.0] * RANKS


@pytest.mark.parametrize("then", ["ends", "steps", "sends", "records"])
def test_an_error_reaches_its_rank_though_others_had_it_carried_out(then):
    """The others look while rank 7 is still computing; it learns of its error in whatever it does next."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        float(step(model, optimizer, *batch(comm.rank, 0)))
        x, y = batch(comm.rank, 1)
        y[2] = 5 if comm.rank == 7 and then != "records" else 0
        with comm.compute(0.01):
            loss = step(model, optimizer, x, y)
        if comm.rank == 7 and then == "records":
            comm.record(loss=loss, more=[1, 2])
        with comm.compute(0.1 if comm.rank == 7 else 0.0):
            pass
        if comm.rank != 7:
            float(loss)
        elif then == "steps":
            step(model, optimizer, *batch(7, 2))
        elif then == "sends":
            comm.bcast(1, root=7)

    with pytest.raises((RankError, ParameterError), match=r"rank 7 .*out of bounds|record arrays"):
        run(main, stragglers=None)
    assert not WAITING


def test_an_error_of_a_rank_that_died_ends_the_run():
    """Rank 3's third step fails, and the rank dies before anybody has looked."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(7):
            x, y = batch(comm.rank, iteration)
            y[0] = 7 if comm.rank == 3 and iteration == 2 else 0
            with comm.compute(0.01):
                step(model, optimizer, x, y)

    with pytest.raises(RankError, match=r"rank 3 raised IndexError.*out of bounds"):
        run(main, stragglers=None, faults="crash:3@0.055s")
    assert not WAITING
