"""When batched calls execute, and that a program cannot tell: times, order, errors, memory that others access."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.live_models import RANKS, batch, both, loss_of, mlp, program, require_equal, sgd, warnings_of
from torch import nn

import spawnsim
from spawnsim import Evaluation, TrainingStep
from spawnsim.errors import RankError, UsageError
from spawnsim.models.platform import load_platform
from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.policies.averaging import RandomGroups
from spawnsim.virtual.mpi.module import MPI


def accuracy_of(model, x, y):
    """Return how much is right."""
    return (model(x).argmax(-1) == y).float().mean()


@pytest.mark.parametrize("straggler", [None, "lognormal:0.5", "exponential:0.5"])
def test_one_call_for_each_step_of_all(straggler, sizes):
    """Also of ranks that straggle: once its step is executed a rank runs ahead of the others."""
    require_equal(program(iterations=10), ranks=20, stragglers=straggler)
    assert sizes == [20] * 10


@pytest.mark.parametrize("ties", ["fifo", "reverse", "random:3"])
def test_several_calls_in_a_block_keep_their_order(ties, sizes):
    """A step, an evaluation, a step: each of all ranks at once; the time of the block passes once."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step, evaluate = mlp(), TrainingStep(loss_of), Evaluation(accuracy_of)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(5):
            x, y = batch(generator)
            with comm.compute(0.01) as block:
                first = step(model, optimizer, x, y)
                middle = evaluate(model, x, y)
                loss = step(model, optimizer, x, y)
            comm.record(iteration=iteration, loss=float(loss), first=float(first), middle=float(middle))
            comm.record(iteration=iteration, loss=float(evaluate(model, x, y)), took=block.seconds)

    require_equal(main, ranks=20, stragglers="lognormal:0.5", ties=ties)
    assert sizes[:3] == [20] * 3


def test_the_time_of_a_block_passes_in_its_first_step():
    """So what a program sends behind it leaves at the end, on batched and on eager ranks."""

    def main(comm):
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, (x, y) = sgd(model), batch(torch.Generator().manual_seed(comm.rank))
        with comm.compute(0.5):
            step(model, optimizer, x, y)
            inside = comm.clock.now()
            request = comm.isend(comm.rank, (comm.rank + 1) % comm.size)
        assert comm.recv(source=(comm.rank - 1) % comm.size) == (comm.rank - 1) % comm.size
        request.wait()
        loss = step(model, optimizer, x, y)  # outside of blocks: at the present time
        comm.record(iteration=0, loss=float(loss), inside=inside, after=comm.clock.now())

    run, eager = both(main)
    assert (run.table["inside"] == 0.5).all() and (eager.table["inside"] == 0.5).all()
    assert (run.table["after"] == eager.table["after"]).all()


def test_messages_and_collectives_between_steps():
    """Weights travel as they are after a step."""

    def between(comm, model, optimizer, iteration):
        weights = model[0].weight.detach().numpy()
        if iteration % 3 == 0:
            comm.Sendrecv_replace(
                weights, dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size
            )
        elif iteration % 3 == 1:
            mean = np.empty_like(weights)
            comm.Allreduce(weights, mean)
            weights[:] = mean / comm.size

    require_equal(program(between=between), stragglers="lognormal:0.3", rtol=1e-4)


POLICIES = {
    "average": lambda: AverageAllPolicy(average_every=3),
    "selective": lambda: AsyncSelectiveAveragingPolicy(None, average_every=3, replacement_ratio=0.3),
    "selective, new models": lambda: AsyncSelectiveAveragingPolicy(
        lambda: (model := mlp(), sgd(model)), average_every=3, replacement_ratio=0.3
    ),
}


@pytest.mark.parametrize("faults", [None, "crash:2@0.055"])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_decide_as_in_eager_runs(name, faults):
    """Decisions, times and events; ranks die in the middle of a block, and models are replaced."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, policy, step = mlp(), POLICIES[name](), TrainingStep(loss_of)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(12):
            with comm.compute():
                loss = step(model, optimizer, *batch(generator))
            if faults is None:
                model, optimizer, _ = policy(
                    iteration, model, optimizer, local_metric=-float(loss), group=comm
                )
            comm.record(iteration=iteration, loss=float(loss))
        policy.shutdown()

    run, eager = both(main, ranks=10, stragglers="lognormal:0.3", compute=0.01, faults=faults)
    assert (run.table["time_s"] == eager.table["time_s"]).all()
    torch.testing.assert_close(
        torch.from_numpy(run.table["loss"]), torch.from_numpy(eager.table["loss"]), rtol=1e-4, atol=1e-5
    )
    shown = [
        [(e["kind"], e["time_s"], e.get("replaced"), str(e.get("donors"))) for e in r.events]
        for r in (run, eager)
    ]
    assert shown[0] == shown[1]


def test_a_task_beside_the_program_sees_what_it_sees_in_eager_runs(sizes):
    """Its weights change when the step begins, as eager steps change them, and the block passes afterwards."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step, seen = mlp(), TrainingStep(loss_of), []
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)

        def look():
            for _ in range(10):
                comm.clock.sleep(0.007)
                seen.append(float(model[0].weight.detach().double().sum()))
                with torch.no_grad():
                    model[0].weight.mul_(0.99)

        task = comm.background(look)
        for iteration in range(6):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(generator))
            comm.record(iteration=iteration, loss=float(loss))
        task.join()
        for number, each in enumerate(seen):
            comm.record(iteration=-1 - number, loss=each)

    require_equal(main, stragglers=None)
    assert sizes == [RANKS] * 6
    require_equal(main, stragglers="lognormal:0.3")


@pytest.mark.parametrize("progress", ["poll", "async"])
def test_a_window_over_weights_shows_what_it_shows_in_eager_runs(progress):
    """Others read and write them at times of their own."""
    platform = replace(load_platform("ethernet-10g"), progress=progress)

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        weights = model[0].weight.detach().numpy()
        window = MPI.Win.Create(weights, comm=comm)
        taken = np.empty_like(weights)
        for iteration in range(6):
            with comm.compute(0.01 * (1 + comm.rank % 3)):
                loss = step(model, optimizer, *batch(generator))
            other = (comm.rank + 1) % comm.size
            window.Lock(other)
            window.Get(taken, other)
            window.Unlock(other)
            comm.record(iteration=iteration, loss=float(loss))
            comm.record(iteration=-1, loss=float(taken.sum()))
        comm.Barrier()
        window.Free()

    require_equal(main, platform=platform, rtol=1e-4)


def test_deadlines_do_not_end_steps():
    """A step in a long block is no wait for others."""

    def main(comm):
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, (x, y) = sgd(model), batch(torch.Generator().manual_seed(comm.rank))
        with comm.clock.deadline(1e-3), comm.compute(100.0):
            step(model, optimizer, x, y)
        comm.record(iteration=0, loss=0.0)

    assert require_equal(main, deadline_s=1.0).totals["virtual_seconds"] == 100.0


class Picky(nn.Module):
    """Refuses inputs that are not finite."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("ranks", [2, 8])
def test_an_error_is_raised_in_the_call_of_its_rank(ranks):
    """With its own traceback; the others go on, and so does a program that catches it."""
    caught = []

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(6):
            x, y = batch(generator)
            if (comm.rank, iteration) == (1, 3):
                y[0] = 77  # no such class
            try:
                with comm.compute(0.01):
                    loss = step(model, optimizer, x, y)
            except (IndexError, RuntimeError) as error:
                trace, names = error.__traceback__, []
                while trace is not None:
                    names.append(trace.tb_frame.f_code.co_name)
                    trace = trace.tb_next
                caught.append("loss_of" in names)
                loss = -1.0
            comm.record(iteration=iteration, loss=float(loss))

    run = require_equal(main, ranks=ranks)
    assert (run.table["loss"] == -1).sum() == 1
    assert caught == [True, True]
    assert warnings_of(run) == []
    with pytest.raises(RankError, match="rank 1 raised"):
        spawnsim.run(failing, ranks=ranks)


def failing(comm):
    """Let rank 1 fail."""
    model, step = mlp(), TrainingStep(loss_of)
    x, y = batch(torch.Generator())
    with comm.compute(0.01):
        step(model, sgd(model), x, y + 70 * (comm.rank == 1))


def test_what_others_overwrite_while_a_step_waits_is_copied():
    """A batch that all ranks of the process share; inputs of evaluations are not copied, and that is reported."""
    shared = torch.empty(8, 8)

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(5):
            x, y = batch(generator)
            with comm.compute(0.01):
                loss = step(model, optimizer, shared.copy_(x), y)
            comm.record(iteration=iteration, loss=float(loss))

    require_equal(main)

    def other(comm):
        torch.manual_seed(comm.rank)
        x, y = batch(torch.Generator().manual_seed(comm.rank))
        Evaluation(accuracy_of)(mlp(), shared.copy_(x), y)

    with pytest.raises(UsageError, match=r"another rank overwrote|is .* in the batched call"):
        spawnsim.run(other, ranks=8)


def test_a_model_that_all_ranks_train_is_trained_in_turn():
    """Each step alone, with a warning; so are models that share a layer."""

    def main(comm, model=None, layer=None):
        own = nn.Sequential(layer, nn.Tanh(), nn.Linear(12, 5)) if model is None else model
        step, optimizer, generator = (
            TrainingStep(loss_of),
            sgd(own, momentum=0),
            torch.Generator().manual_seed(comm.rank),
        )
        for iteration in range(4):
            with comm.compute(0.01):
                loss = step(own, optimizer, *batch(generator))
            comm.record(iteration=iteration, loss=float(loss))

    for given in ({"model": mlp()}, {"layer": nn.Linear(8, 12)}):
        run = spawnsim.run(main, ranks=5, parameters=given)
        assert any("several ranks train" in each for each in warnings_of(run))
        assert np.isfinite(run.table["loss"]).all()


class Noisy(nn.Linear):
    """Draws from torch's generator in each pass."""

    def forward(self, x):
        return super().forward(x) + 0.01 * torch.randn(())


class Deciding(nn.Linear):
    """Takes another way for other values."""

    def forward(self, x):
        out = super().forward(x)
        return out if float(out.detach().sum()) > 0 else -out


def halved(bias):
    """Return a number, and halve a bias."""
    with torch.no_grad():
        return float(bias.mul_(0.5)[0])


def hooked():
    """Return a model with a hook."""
    model = mlp()
    model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


ALONE = {
    "random numbers": ({"model_of": lambda: Noisy(8, 5)}, "random"),
    "values decide": ({"model_of": lambda: Deciding(8, 5)}, "item"),
    "hooks": ({"model_of": hooked}, "hooks"),
    "two dtypes": (
        {"model_of": lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5).double()), "batch_of": lambda g: batch(g),
         "loss": lambda model, x, y: nn.functional.cross_entropy(model[1](model[0](x).double()), y)}, "dtype",
    ),
    "an unused parameter": ({"loss": lambda model, x, y: model[0](x).mean()}, "does not depend on 2.weight"),
    "weights in place": (
        {"loss": lambda model, x, y: loss_of(model, x + 0 * halved(model[0].bias), y)}, "in place",
    ),
    "not in the optimizer": (
        {"optimizer_of": lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1)}, "not in its optimizer",
    ),
    "a tuple": (
        {"batch_of": lambda g: (batch(g),), "loss": lambda model, both: loss_of(model, *both)}, "give tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_what_cannot_be_batched_steps_alone(name):
    """Bit for bit as eagerly, with one warning that says why."""
    how, words = ALONE[name]
    run, eager = both(program(**how, iterations=4))
    np.testing.assert_array_equal(run.table["loss"], eager.table["loss"])
    assert not run.totals["digest"].startswith("batched-")
    found = warnings_of(run)
    assert len(found) == 1 and words in found[0] and "step alone" in found[0]


def test_what_a_loss_may_not_do_steps_alone():
    """It communicates, or draws from a rank's streams: in its rank's turn it can."""

    def main(comm):
        model = mlp()

        def loss(model, x, y):
            return loss_of(model, x, y) * float(comm.rng("loss").random())

        step, optimizer, generator = TrainingStep(loss), sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(3):
            with comm.compute(0.01):
                found = step(model, optimizer, *batch(generator))
            comm.record(iteration=iteration, loss=float(found))

    run = require_equal(main, rtol=0)
    assert "cannot communicate" in warnings_of(run)[0]


def test_modes_and_autocast_execute_alone():
    """Under no_grad a step fails as eagerly, and leaves nothing behind."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, (x, y) = sgd(model), batch(torch.Generator().manual_seed(comm.rank))
        with pytest.raises(RuntimeError, match="grad"), torch.no_grad(), comm.compute(0.01):
            step(model, optimizer, x, y)
        with torch.autocast("cpu", torch.bfloat16), comm.compute(0.01):
            first = step(model, optimizer, x, y)
        with torch.inference_mode(), comm.compute(0.01):
            right = Evaluation(accuracy_of)(model, x, y)
        comm.record(iteration=0, loss=float(first) + float(right))
        with comm.compute(0.01):
            comm.record(iteration=1, loss=float(step(model, optimizer, x, y)))

    require_equal(main)


def test_many_groups_are_reported():
    """Each rank's loss holds an object of its own."""

    def main(comm):
        held = object()
        step, model = TrainingStep(lambda model, x, y: loss_of(model, x, y) + 0 * (held is None)), mlp()
        with comm.compute(0.01):
            step(model, sgd(model), *batch(torch.Generator()))

    run = spawnsim.run(main, ranks=9)
    assert "8 or more groups" in warnings_of(run)[0]


def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path):
    """To the bit, with its digest."""

    def main(comm, iterations: int = 12):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5))
        step, optimizer = TrainingStep(loss_of), sgd(model)
        saved = comm.restore(model=model, optimizer=optimizer)
        for iteration in range(0 if saved is None else saved.iteration, iterations):
            with comm.compute(0.01):
                loss = step(model, optimizer, torch.rand(8, 8), torch.arange(8) % 5)
            comm.record(iteration=iteration, loss=float(loss))
            if iteration == 5:
                comm.checkpoint(iteration=iteration + 1, model=model, optimizer=optimizer)

    how = {"ranks": 8, "stragglers": "lognormal:0.3", "seed": 3}
    whole = spawnsim.run(main, out=tmp_path / "whole", **how)
    spawnsim.run(main, out=tmp_path / "part", parameters={"iterations": 7}, **how)
    rest = spawnsim.run(main, out=tmp_path / "part", resume=True, **how)
    assert rest.totals["digest"] == whole.totals["digest"]
    assert whole.totals["digest"].startswith("batched-")


def test_random_groups_run_with_batched_steps():
    """A policy with a task beside the program: decisions are those of eager runs."""
    from spawnsim.policies import DecentralizedAveragingPolicy

    def main(comm):
        torch.manual_seed(comm.rank)
        model, step = mlp(), TrainingStep(loss_of)
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        policy = DecentralizedAveragingPolicy(
            3, asynchronous=True, matchmaking=RandomGroups(4), target_group_size=4, min_matchmaking_time=0.05,
            request_timeout=0.04, step_timeout=0.3,
        )  # fmt: skip
        for iteration in range(12):
            with comm.compute():
                loss = step(model, optimizer, *batch(generator))
            model, optimizer, _ = policy(iteration, model, optimizer, local_metric=-float(loss), group=comm)
            comm.record(iteration=iteration, loss=float(loss))
        policy.shutdown()

    require_equal(main, ranks=8, stragglers="lognormal:0.2", compute=0.02, rtol=1e-3)
