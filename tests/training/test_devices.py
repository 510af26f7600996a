"""Training together on whatever device is at hand: a GPU, where rows are not taken before they are used, or the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.room import limit_rows
from torch import nn

import spawnsim
from spawnsim import Evaluation, TrainingStep
from spawnsim.comm.deferred import caller
from spawnsim.errors import RankError
from spawnsim.training.functions import Run
from spawnsim.workloads import Digits
from studies.digits import main as digits
from tests.training import test_steps
from tests.training.test_steps import OPTIMIZERS, RANKS, accuracy_of, loss_of, run, sgd, weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (20, 600, 5)  # 15,605 weights


def build(seed):
    """Return a model on the device."""
    return test_steps.build(seed, WIDTHS).to(DEVICE)


def batch(rank, iteration):
    """Return a batch on the device."""
    return [each.to(DEVICE) for each in test_steps.batch(rank, iteration)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_losses_are_those_of_eager_steps(optimizer, sizes):
    """Of every optimizer, recorded without a look and looked at; the last steps of all ranks are one call."""

    def main(comm):
        model = build(comm.rank)
        chosen = OPTIMIZERS[optimizer](model)
        step, evaluate = TrainingStep(loss_of), Evaluation(accuracy_of)
        for iteration in range(12):  # Adam amplifies the last bits, tenfold in five steps
            with comm.compute(0.01):
                loss = step(model, chosen, *batch(comm.rank, iteration))
            comm.record(loss=loss, accuracy=evaluate(model, *batch(99, 0)), iteration=iteration)
        return float(loss)

    (_, together), (_, again), (_, eager) = (run(main, eager=each) for each in (False, False, True))
    assert max(sizes) == RANKS
    assert together.totals["digest"] == again.totals["digest"]
    assert np.array_equal(together.table["loss"], again.table["loss"])
    assert np.array_equal(together.table["time_s"], eager.table["time_s"])
    np.testing.assert_allclose(together.table["loss"], eager.table["loss"], rtol=1e-4)
    np.testing.assert_allclose(together.table["accuracy"], eager.table["accuracy"], atol=0.13)  # one of 8


@pytest.mark.parametrize("policy", ["average", "selective", "groups", "clock"])
def test_policies_decide_as_with_eager_steps(policy):
    """The digits study, on 20 ranks: who is replaced from whom, and when."""
    given = {"policy": policy, "iterations": 30, "device": DEVICE}
    together, eager = (
        spawnsim.run(digits, ranks=20, seed=7, stragglers="lognormal:0.3", parameters=given, eager=each)
        for each in (False, True)
    )
    assert not any("step alone" in each for each in together.what.get("warnings") or ())
    for name in together.table:
        one, other = together.table[name], eager.table[name]
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=1e-4, err_msg=name)
        else:
            assert np.array_equal(one, other), name


def test_rows_of_models_that_are_gone_are_used_again():
    """Thirty models of each rank, one after the other, take one arena."""

    def main(comm):
        for number in range(30):
            model = build(comm.rank + number)
            optimizer, step = sgd(model), TrainingStep(loss_of)
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, number))
            float(loss)
        return [len(each) for each in Run.of(caller()[0]).arenas.values()]

    found, _ = run(main)
    assert found[0] == [1]


def test_ranks_may_have_several_models():
    """All alive, so that one arena does not hold them."""

    def main(comm):
        models = [build(10 * comm.rank + number) for number in range(4)]
        optimizers, step = [sgd(model) for model in models], TrainingStep(loss_of)
        for iteration in range(4):
            with comm.compute(0.01):
                for model, optimizer in zip(models, optimizers, strict=True):
                    step(model, optimizer, *batch(comm.rank, iteration))
        return [weights(model) for model in models]

    (together, _), (eager, _) = (run(main, eager=each) for each in (False, True))
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    """With the draws of the device, too."""

    def main(comm, iterations: int = 12):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        saved = comm.restore(model=model, optimizer=optimizer)
        for iteration in range(saved.iteration if saved else 0, iterations):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss, noise=torch.rand((), device=DEVICE).item(), iteration=iteration)
            if iteration == 5:
                comm.checkpoint(iteration=6, model=model, optimizer=optimizer)

    whole = spawnsim.run(main, ranks=RANKS, out=tmp_path / "whole")
    spawnsim.run(main, ranks=RANKS, out=tmp_path / "part", parameters={"iterations": 8})
    resumed = spawnsim.run(main, ranks=RANKS, out=tmp_path / "part", resume=True)
    assert resumed.totals["digest"] == whole.totals["digest"]
    for name in ("loss", "noise"):
        assert np.array_equal(resumed.table[name], whole.table[name])


# --------------------------------------------------------------------------------------------- too little memory
def trained(comm):
    """Train for some steps, of which several wait; return the weights."""
    model = build(comm.rank)
    optimizer, step = OPTIMIZERS["adam"](model), TrainingStep(loss_of)
    for iteration in range(12):
        with comm.compute(0.01):
            loss = step(model, optimizer, *batch(comm.rank, iteration))
        comm.record(loss=loss)
    return weights(model)


def test_where_memory_is_too_small_fewer_are_computed_at_a_time(monkeypatch, sizes):
    """As many as there is room for; each step counts once, and the run says so."""
    eager, _ = run(trained, eager=True)
    limit_rows(monkeypatch, 3)
    together, result = run(trained)
    torch.testing.assert_close(together, eager, rtol=1e-4, atol=1e-5)
    assert sizes.count(RANKS) == 1  # it was tried once
    assert sizes[-1] == 3
    assert [each.split(", since")[0] for each in result.what["warnings"]] == [
        "Sequential models are computed 6 at a time", "Sequential models are computed 3 at a time",
    ]  # fmt: skip


def test_where_there_is_no_room_for_one_it_is_its_ranks_error(monkeypatch):
    """With a note of what it was at."""
    limit_rows(monkeypatch, 0)
    with pytest.raises(RankError, match=r"raised OutOfMemoryError: CUDA out of memory"):
        run(trained)


def test_digits_lie_where_they_are_wanted():
    """Images, labels and model."""

    def main(comm):
        mine = Digits(comm.rng, comm.rank, comm.size, device=DEVICE)
        model, optimizer = mine.build()
        loss = mine.step(model, optimizer)
        assert isinstance(model, nn.Module)
        return {each.device.type for each in (loss, *model.parameters(), mine.test.x)}

    assert run(main)[0] == [{DEVICE}] * RANKS
