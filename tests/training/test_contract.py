"""The contract of a step: it depends on model, arguments and constants. A breach is reported, never silent."""

import ast
import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.live_models import batch, loss_of, mlp, program, require_equal, sgd, warnings_of
from torch import nn
from torch.nn.functional import cross_entropy

import spawnsim
from spawnsim import Evaluation, TrainingStep
from spawnsim.errors import SpawnsimError, UsageError
from spawnsim.training.checks import EVERY

RANKS, BROKEN_AT = 8, 6
SCALE = 1.0
NUMBERS = itertools.count(2)


class Config:
    """Settings of a program."""

    def __init__(self):
        self.beta = 1.0


class Annealed(nn.Module):
    """Divides by an attribute."""

    def __init__(self):
        super().__init__()
        self.inner, self.temperature = mlp(), 1.0

    def forward(self, x):
        return self.inner(x) / self.temperature


def of_closure(comm):
    """A variable of the program."""
    coefficient = 1.0

    def change(model, iteration):
        nonlocal coefficient
        coefficient = 2.0 + comm.rank

    return lambda model, x, y: coefficient * loss_of(model, x, y), change, "the variable coefficient"


def of_list(comm):
    """A list that grows."""
    seen = []
    return (
        (lambda model, x, y: (1 + len(seen)) * loss_of(model, x, y)),
        (lambda m, i: seen.extend([i] * (1 + comm.rank))),
        "the variable seen",
    )


def of_global(comm):
    """A global."""

    def change(model, iteration):
        global SCALE
        SCALE = 2.0 + comm.rank

    return (lambda model, x, y: SCALE * loss_of(model, x, y)), change, "the global SCALE"


def of_array(comm):
    """An array that is written to."""
    weights = np.ones(3, np.float32)
    return (
        lambda model, x, y: float(weights.sum()) * loss_of(model, x, y),
        lambda m, i: weights.__setitem__(0, 3 + comm.rank),
        "the variable weights",
    )


def of_attribute(comm):
    """An attribute of the model."""
    return (
        loss_of,
        lambda model, iteration: setattr(model, "temperature", 2.0 + comm.rank),
        "the attribute temperature",
    )


def of_object(comm):
    """An attribute of an object."""
    config = Config()
    return (
        lambda model, x, y: config.beta * loss_of(model, x, y),
        lambda m, i: setattr(config, "beta", 3.0 + comm.rank),
        "the variable config",
    )


def of_tensor(comm):
    """A tensor that is written to."""
    weight = torch.ones(())
    return (
        lambda model, x, y: weight * loss_of(model, x, y), lambda m, i: weight.fill_(3.0 + comm.rank),
        "the variable weight",
    )  # fmt: skip


def of_pythons_random(comm):
    """Python's generator, from some step on."""
    late = Config()
    return (
        lambda model, x, y: (random.random() if late.beta > 1 else 1.0) * loss_of(model, x, y),
        lambda m, i: setattr(late, "beta", 2.0),
        "",
    )


def of_counter(comm):
    """A counter that each call moves on."""
    late = Config()
    return (
        lambda model, x, y: (next(NUMBERS) if late.beta > 1 else 1.0) * loss_of(model, x, y),
        lambda m, i: setattr(late, "beta", 2.0),
        "",
    )


def of_default(comm):
    """A default that is written to."""

    def loss(model, x, y, scale={"by": 1.0}):  # noqa: B006 - that is what is tried
        return scale["by"] * loss_of(model, x, y)

    return loss, lambda m, i: loss.__defaults__[0].__setitem__("by", 2.0 + comm.rank + i), "default 0"


BREACHES = {
    each.__name__: each
    for each in (
        of_closure, of_list, of_global, of_array, of_attribute, of_object, of_tensor, of_pythons_random, of_counter,
        of_default,
    )
}  # fmt: skip


def broken(breach, iterations):
    """Return a program in which ranks break the contract from some step on, each in its own way."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = Annealed()
        loss, change, _ = breach(comm)
        step, optimizer, generator = (
            TrainingStep(loss),
            sgd(model, lr=0.01),
            torch.Generator().manual_seed(comm.rank),
        )
        for iteration in range(iterations):
            if iteration >= BROKEN_AT:
                change(model, iteration)
            with comm.compute(0.01):
                step(model, optimizer, *batch(generator))
            comm.record(iteration=iteration)

    return main


@pytest.fixture(autouse=True)
def _scale():
    global SCALE
    SCALE = 1.0
    yield
    SCALE = 1.0


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_is_reported(name):
    """With rank and step, at once under `check_steps`, else within a hundred steps; it says what has changed."""
    global SCALE
    names = BREACHES[name](type("Comm", (), {"rank": 0}))[2]
    for check, last in ((True, BROKEN_AT + 2), (False, BROKEN_AT + EVERY + 1)):
        SCALE = 1.0
        with pytest.raises(UsageError, match=r"rank \d, step \d+, at .* s: ") as caught:
            spawnsim.run(broken(BREACHES[name], last), ranks=RANKS, check_steps=check)
        assert names in str(caught.value)
        step = int(str(caught.value).split("step ")[1].split(",")[0])
        assert BROKEN_AT < step <= (BROKEN_AT + 2 if check else BROKEN_AT + EVERY)


def test_a_breach_from_the_first_step_on_is_reported_or_steps_alone():
    """A loss that draws from Python's generator has no batched form: it steps alone, with a warning."""
    loss = lambda model, x, y: random.random() * loss_of(model, x, y)  # noqa: E731
    run = require_equal(program(loss=loss, iterations=4), rtol=0)
    assert "draws random numbers" in warnings_of(run)[0]
    calls = itertools.count(1)
    with pytest.raises(UsageError, match="step 1,"):
        spawnsim.run(program(loss=lambda model, x, y: next(calls) * loss_of(model, x, y)), ranks=RANKS)


def test_one_rank_that_differs_is_found():
    """Each rank's own steps are compared, one in a hundred."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, config = mlp(), Config()
        step = TrainingStep(lambda model, x, y: config.beta * loss_of(model, x, y))
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(130):
            if comm.rank == 5 and iteration == 20:
                config.beta = 1.5
            with comm.compute(0.01):
                step(model, optimizer, *batch(generator))

    with pytest.raises(UsageError, match="rank 5, step "):
        spawnsim.run(main, ranks=RANKS)


def test_evaluations_are_checked():
    """As steps are."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model, config = mlp(), Config()
        evaluate = Evaluation(lambda model, x: config.beta * model(x).mean())
        for iteration in range(4):
            config.beta += comm.rank * (iteration > 1)
            evaluate(model, batch(torch.Generator())[0])

    with pytest.raises(UsageError, match=r"rank \d, an evaluation, at 0 s: the result is"):
        spawnsim.run(main, ranks=RANKS, check_steps=True)


def test_equal_values_of_other_objects_are_one_group(sizes):
    """A closure's numbers, dictionaries, criteria, objects and small tensors; what differs is another group."""

    def main(comm, spread=0):
        torch.manual_seed(comm.rank)
        model, config, table = mlp(), Config(), {"by": [1.0, (2, "two")]}
        criterion, weight = nn.CrossEntropyLoss(label_smoothing=0.1), torch.full((5,), 0.5)
        config.beta = 1.0 + comm.rank % (1 + spread)
        step = TrainingStep(
            lambda model, x, y: (
                criterion(model(x), y) * config.beta * table["by"][0] + cross_entropy(model(x), y, weight)
            )
        )
        optimizer, generator = sgd(model), torch.Generator().manual_seed(comm.rank)
        for iteration in range(3):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(generator))
            comm.record(iteration=iteration, loss=float(loss))

    require_equal(main, ranks=8)
    assert sizes == [8] * 3
    sizes.clear()
    require_equal(lambda comm: main(comm, spread=1), ranks=8)
    assert sizes == [4] * 6


def test_rounding_where_a_number_decides_is_no_breach():
    """A sign, an argmax and a step function of numbers that are 0 but for rounding."""

    def loss(model, x, y):
        out = model(x)
        near = (out - out.mean()).sum() + 1e-7 * out[0, 0]  # nothing but rounding
        return cross_entropy(out, y) + torch.where(near > 0, 1.0, 2.0) * out.mean()

    assert (
        spawnsim.run(program(loss=loss, iterations=6), ranks=RANKS, check_steps=True).totals["ranks"] == RANKS
    )


def test_checks_change_nothing():
    """Neither bits nor generators nor the model: BatchNorm, dropout and several outputs."""
    main = program(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 5)),
        max_norm=1.0,
    )
    runs = [spawnsim.run(main, ranks=RANKS, check_steps=check) for check in (False, True)]
    np.testing.assert_array_equal(runs[0].table["loss"], runs[1].table["loss"])


def test_the_package_does_not_look_behind_python_and_torch():
    """No bytecode, no exchanged classes, no counted references, no replaced function of torch's, no TorchScript."""
    package = Path(spawnsim.__file__).parent
    forbidden = (
        "sys.getrefcount",
        "torch.jit.script(",
        "CompilationUnit",
        "torch.jit.trace",
        "fx.Graph",
    )
    for path in package.rglob("*.py"):
        if path.is_relative_to(package / "virtual" / "torch"):
            continue
        text = path.read_text(encoding="utf-8")
        assert [each for each in forbidden if each in text] == [], path
        assert re.search(r"^\s*(import|from) dis\b", text, re.MULTILINE) is None, path
        for node in ast.walk(ast.parse(text)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                named = ast.unparse(target)
                assert not named.endswith(".__class__") or named.startswith(
                    ("sys.modules", "mailbox.", "task.")
                ), path
                assert not named.startswith(("torch.", "nn.", "Tensor.")), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                assert not ast.unparse(node.args[0]).startswith(("torch", "nn.", "Tensor")), path


def test_errors_of_parameters():
    """Before anything runs."""
    with pytest.raises(SpawnsimError, match="give a function"):
        TrainingStep(3)
    with pytest.raises(SpawnsimError, match="max_norm"):
        TrainingStep(loss_of, max_norm=0.0)
