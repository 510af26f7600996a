"""What a loss and a model compute with besides tensors: it counts as it was when a step was called."""

from __future__ import annotations

import functools
import operator
import random
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import spawnsim
from spawnsim import AverageAllPolicy, Evaluation, TrainingStep
from spawnsim.training import tracing
from spawnsim.training.settings import Settings

RANKS, ITERATIONS = 11, 12
STRAGGLERS = "lognormal:0.3"  # so that ranks meet in ever new numbers
NUMBERS = {"scale": 0.5, "parts": [1.0, 2.0]}
ARRAY = torch.ones(5).numpy()


def batch(rank, iteration):
    """Inputs (6, 8), and a class for each."""
    draw = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randn(6, 8, generator=draw), torch.randint(0, 5, (6,), generator=draw)


def plain(model, x, y):
    """The usual loss."""
    return functional.cross_entropy(model(x), y)


@dataclass
class Config:
    """Numbers of a model or a loss."""

    scale: float = 1.0
    name: str = "plain"


class Loss:
    """A loss with numbers of its own."""

    def __init__(self):
        self.scale, self.config, self.calls = 1.0, Config(), 0

    def __call__(self, model, x, y):
        return plain(model, x, y) * self.scale * self.config.scale


class Trainer:
    """Who has a loss, and much that the loss does not read."""

    def __init__(self, model):
        self.model, self.history, self.scale, self.iteration = model, [], 1.0, 0
        self.step = TrainingStep(self.loss)

    def scaled(self, value):
        """Return a part of the loss."""
        return value * self.scale

    def loss(self, model, x, y):
        """Return the loss."""
        return self.scaled(plain(model, x, y))


class Criterion(nn.Module):
    """A loss that is a module, with a module of torch that has room for weights, and none."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.CrossEntropyLoss(label_smoothing=0.1), 1.0

    def forward(self, model, x, y):
        return self.inner(model(x), y) * self.scale


class Net(nn.Module):
    """A model with numbers, a tensor and a buffer, all of which it reads, and a number that it does not."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale, self.config, self.epoch = nn.Linear(8, 5), 1.0, Config(), 0
        self.numbers, self.tensor = [1.0], torch.ones(())
        self.register_buffer("buffer", torch.ones(5))
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.layer(x) * self.scale * self.config.scale * self.numbers[0] * self.tensor * self.buffer


def closing(kept, read):
    """Return a loss that refers to a variable around it."""
    return lambda model, x, y: plain(model, x, y) * read(kept)


def by_object(model):
    """A loss that is an object."""
    loss = Loss()
    return TrainingStep(loss), lambda value: setattr(loss, "scale", value)


def by_config(model):
    """One whose numbers are in an attribute."""
    loss = Loss()
    return TrainingStep(loss), lambda value: setattr(loss.config, "scale", value)


def by_method(model):
    """One that is a method of an object with a model."""
    trainer = Trainer(model)
    return trainer.step, lambda value: setattr(trainer, "scale", value)


def by_module(model):
    """One that is a module."""
    criterion = Criterion()
    return TrainingStep(criterion), lambda value: setattr(criterion, "scale", value)


def by_library(model):
    """One that calls a module of torch."""
    criterion = nn.CrossEntropyLoss()
    step = TrainingStep(lambda model, x, y: criterion(model(x), y))
    return step, lambda value: setattr(criterion, "label_smoothing", value / 4)


def by_dictionary(model):
    """One that reads a dictionary around it."""
    kept = {"scale": 1.0}
    return TrainingStep(closing(kept, lambda kept: kept["scale"])), lambda value: kept.update(scale=value)


def by_list(model):
    """One that reads a list in a list."""
    kept = [[1.0]]
    return TrainingStep(closing(kept, lambda kept: kept[0][0])), lambda value: kept[0].__setitem__(0, value)


def by_variable(model):
    """One that reads a variable around it."""
    scale = 1.0

    def change(value):
        nonlocal scale
        scale = value

    return TrainingStep(lambda model, x, y: plain(model, x, y) * scale), change


def by_tensor(model):
    """One that reads a tensor around it."""
    kept = torch.ones(())
    return TrainingStep(closing(kept, lambda kept: kept)), kept.fill_


def by_partial(model):
    """One that is given an object beforehand."""
    kept = types.SimpleNamespace(scale=1.0)

    def loss(kept, model, x, y):
        return plain(model, x, y) * kept.scale

    return TrainingStep(functools.partial(loss, kept)), lambda value: setattr(kept, "scale", value)


def of_model(change):
    """The usual loss, of a model that changes."""
    return lambda model: (TrainingStep(plain), functools.partial(change, model))


CHANGED = {
    "attribute of a loss": by_object,
    "within an attribute of a loss": by_config,
    "attribute that a method reads": by_method,
    "attribute of a criterion": by_module,
    "attribute of torch's criterion": by_library,
    "dictionary": by_dictionary,
    "list": by_list,
    "variable": by_variable,
    "tensor": by_tensor,
    "argument of a partial": by_partial,
    "attribute of a model": of_model(lambda model, value: setattr(model, "scale", value)),
    "within an attribute of a model": of_model(lambda model, value: setattr(model.config, "scale", value)),
    "list of a model": of_model(lambda model, value: model.numbers.__setitem__(0, value)),
    "tensor of a model": of_model(lambda model, value: model.tensor.fill_(value)),
    "buffer": of_model(lambda model, value: model.buffer.fill_(value)),
    "exchanged buffer": of_model(lambda model, value: setattr(model, "buffer", torch.full((5,), value))),
}


def trained(made, values, **how):
    """Return a run in which each rank's setting is `values(rank, iteration)`, unless that is None."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step, change = made(model)
        for iteration in range(ITERATIONS):
            model.epoch = iteration
            value = values(comm.rank, iteration)
            if value is not None:
                change(value)
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)  # nobody looks: up to eight steps wait

    return spawnsim.run(main, ranks=RANKS, stragglers=STRAGGLERS, **how)


@pytest.mark.parametrize("kind", CHANGED)
def test_a_setting_that_changes_now_and_then_counts_from_the_next_step_on(kind):
    """Steps put off before are computed with what there was; all are computed together."""

    def values(rank, iteration):
        return {5: 0.5, 9: 0.25}.get(iteration)

    together, eager = (trained(CHANGED[kind], values, eager=each) for each in (False, True))
    assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
    # Of a tensor of each rank there is no telling what it holds: it is that rank's alone.
    assert ("warnings" in together.what) == (kind == "tensor")


@pytest.mark.parametrize("kind", CHANGED)
def test_a_setting_that_changes_all_the_time_is_told(kind):
    """Right from the first step on, alone from the fourth, and the run says what to do."""

    def values(rank, iteration):
        return 1 / (1 + rank + iteration)

    together, eager = (trained(CHANGED[kind], values, eager=each) for each in (False, True))
    assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
    told = together.what["warnings"]
    # With an exchanged buffer a model is another one.
    assert kind == "exchanged buffer" or any("give it as a tensor, beside the batch" in each for each in told)
    assert "groups and more" in told[0] and len(told) <= 3


def by_numbers(model, x, y):
    """One that reads a dictionary of the module."""
    return plain(model, x, y) * NUMBERS["scale"] * sum(NUMBERS["parts"])


def by_array(model, x, y):
    """One that reads an array of the module."""
    return plain(model, x, y) * torch.from_numpy(ARRAY).sum()


STYLES = {
    "method": lambda model: Trainer(model).step,
    "object": lambda model: TrainingStep(Loss()),
    "module": lambda model: TrainingStep(Criterion()),
    "dictionary": lambda model: TrainingStep(by_numbers),
    "array": lambda model: TrainingStep(by_array),
    "partial": lambda model: by_partial(model)[0],
    "closure": lambda model: by_list(model)[0],
    "buffers": lambda model: TrainingStep(plain),
}


@pytest.mark.parametrize("style", STYLES)
def test_programs_of_all_styles_are_computed_together_and_recorded(style, sizes, monkeypatch):
    """Whatever way a loss keeps its numbers, of each rank its own; with a policy that averages buffers, too."""
    monkeypatch.setattr(tracing, "CALLS_BEFORE", 1)
    records, compile_graph = [], tracing._compiled
    monkeypatch.setattr(tracing, "_compiled", lambda graph: records.append(1) or compile_graph(graph))

    def main(comm):
        torch.manual_seed(comm.rank)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, policy = STYLES[style](model), AverageAllPolicy(average_every=3)
        right = Evaluation(lambda model, x, y: (model(x).argmax(-1) == y).float().mean())
        for iteration in range(ITERATIONS):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            model, optimizer, _ = policy(iteration, model, optimizer, group=comm)
            comm.record(loss=loss, right=right(model, *batch(0, iteration)))

    together, eager = (spawnsim.run(main, ranks=RANKS, eager=each) for each in (False, True))
    assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
    assert together.table["right"] == pytest.approx(eager.table["right"], abs=0.2)
    assert "warnings" not in together.what
    assert set(sizes) == {RANKS} and len(records) == 1


def test_each_rank_with_a_tensor_of_its_own_is_told_to_give_it():
    """Its loss cannot be another rank's; to compute each alone is what nobody would notice otherwise."""

    def main(comm):
        torch.manual_seed(comm.rank)
        data, labels = torch.randn(50, 8), torch.arange(50) % 5
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainingStep(
            lambda model, chosen: functional.cross_entropy(model(data[chosen]), labels[chosen])
        )
        with comm.compute(0.01):
            step(model, optimizer, torch.arange(6))

    (warning,) = spawnsim.run(main, ranks=RANKS).what["warnings"]
    assert "groups and more" in warning and "beside the batch" in warning


def test_a_number_beside_the_batch_that_changes_all_the_time_is_told():
    """Each of its values would take memory for all ranks' inputs."""

    def main(comm, as_tensor):
        torch.manual_seed(comm.rank)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = TrainingStep(lambda model, x, y, scale: plain(model, x, y) * scale)
        for iteration in range(ITERATIONS):
            scale = 1 / (1 + iteration)
            with comm.compute(0.01):
                loss = step(
                    model,
                    optimizer,
                    *batch(comm.rank, iteration),
                    torch.tensor(scale) if as_tensor else scale,
                )
            comm.record(loss=loss)

    numbers, tensors, eager = (
        spawnsim.run(functools.partial(main, as_tensor=tensor), ranks=RANKS, eager=each)
        for tensor, each in ((False, False), (True, False), (False, True))
    )
    assert numbers.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
    assert tensors.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
    (warning,) = numbers.what["warnings"]
    assert "ever new values: give it as a tensor" in warning and "warnings" not in tensors.what


def test_normalizations_that_count_all_batches_step_alone():
    """A mean of all batches hangs on their number; without it, and with a momentum, they are as any other."""

    def main(comm, counting):
        torch.manual_seed(comm.rank)
        norm = nn.BatchNorm1d(8, track_running_stats=counting, momentum=None)
        model = nn.Sequential(norm, nn.Linear(8, 5))
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), TrainingStep(plain)
        for iteration in range(4):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)

    for counting in (True, False):
        together, eager = (
            spawnsim.run(functools.partial(main, counting=counting), ranks=RANKS, eager=each)
            for each in (False, True)
        )
        assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
        told = together.what.get("warnings", [])
        assert len(told) == counting and (not told or "0.running_mean" in told[0])


class Counting(nn.Module):
    """A model whose forward pass changes a buffer that torch knows nothing of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.register_buffer("kept", torch.zeros(()))

    def forward(self, x):
        self.kept += 1
        return self.layer(x) / self.kept


class Remembering(nn.Module):
    """A model that keeps what its last layer was given: the forward pass writes it, and reads it never."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(8, 6), nn.Linear(6, 5), None

    def forward(self, x):
        self.kept = self.first(x).relu()
        return self.last(self.kept)


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_a_forward_pass_that_changes_its_model_keeps_it_alone(kind):
    """A buffer, or a tensor kept as an attribute, where the program would find one of many models."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = kind()
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.1), TrainingStep(plain)
        for iteration in range(4):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss, kept=model.kept.mean())

    together, eager = (spawnsim.run(main, ranks=RANKS, eager=each) for each in (False, True))
    assert (together.table["loss"] == eager.table["loss"]).all()
    assert (together.table["kept"] == eager.table["kept"]).all()
    assert "step alone" in together.what["warnings"][0]


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_refused_is_not_asked_again(shared, monkeypatch):
    """Neither by a step nor by an evaluation, of one rank or shared by all: it would take as long as a step alone."""
    made, init = [], Settings.__init__
    monkeypatch.setattr(Settings, "__init__", lambda *given: (made.append(1), init(*given))[1])
    kept = Slotted()
    kept.scale = 0.5

    def loss_of(model, x, y):
        return plain(model, x, y) * kept.scale

    def measure_of(model, x):
        return model(x).mean() * kept.scale

    ours = TrainingStep(loss_of), Evaluation(measure_of)

    def main(comm):
        torch.manual_seed(comm.rank)
        model = Net()
        optimizer, together = torch.optim.SGD(model.parameters(), lr=0.1), TrainingStep(plain)
        step, measure = ours if shared else (TrainingStep(loss_of), Evaluation(measure_of))
        for iteration in range(8):
            x, y = batch(comm.rank, iteration)
            with comm.compute(0.01):
                together(model, optimizer, x, y)
                loss = step(model, optimizer, x, y)
            comm.record(loss=loss, measure=measure(model, x))

    together = spawnsim.run(main, ranks=RANKS)
    asked = len(made)
    eager = spawnsim.run(main, ranks=RANKS, eager=True)
    assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
    assert together.table["measure"] == pytest.approx(eager.table["measure"], rel=1e-3)
    assert asked <= 3 * RANKS + 2, "three functions of each rank, and trials"


class Slotted:
    """An object without a dictionary of attributes."""

    __slots__ = ("scale",)


class Term:
    """One that says it equals others of its name."""

    def __init__(self, name, scale):
        self.name, self.scale = name, scale

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Weighted(nn.CrossEntropyLoss):
    """A criterion of torch's, with another way to be called."""

    def forward(self, model, x, y):
        return super().forward(model(x), y)


class Scaled(nn.Module):
    """A model of which the loss, or something that the loss comes to, reads a number."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 5), 1.0

    def forward(self, x):
        return self.layer(x)

    @torch.no_grad()
    def factor(self):
        """Return the number."""
        return self.scale

    def __getitem__(self, name):
        return vars(self)[name]


def helper(model):
    """Return the number of a model."""
    return model.scale


HELPERS = {"helper": helper}


def of_model_alone(read):
    """A loss that comes to a number of the model."""
    return lambda model, rank: (
        TrainingStep(lambda model, x, y: plain(model, x, y) * read(model)),
        lambda value: setattr(model, "scale", value),
    )


def of_kept(kept, read, change):
    """A loss that reads something around it."""
    return lambda model, rank: _with(kept(rank), read, change)


def _with(kept, read, change):
    return TrainingStep(closing(kept, read)), functools.partial(change, kept)


def by_teacher(model, rank):
    """One with a model of its own."""
    teacher = Loss()
    teacher.model = nn.Linear(8, 5)

    def change(value):
        with torch.no_grad():
            teacher.model.weight.fill_(value)

    return TrainingStep(closing(teacher, lambda kept: kept.model.weight.detach().mean().exp())), change


def by_regularizer(model, rank):
    """One that reads the model by way of its own attribute."""
    trainer = Loss()
    trainer.model = model
    penalty = closing(trainer, lambda kept: 1 + sum(p.square().sum() for p in kept.model.parameters()))
    return TrainingStep(penalty), lambda value: None


def by_counting(model, rank):
    """One that changes what it refers to."""
    kept = {"calls": 0}

    def loss(model, x, y):
        kept["calls"] += 1
        return plain(model, x, y) * kept["calls"]

    return TrainingStep(loss), lambda value: None


def by_attribute_of_a_function(model, rank):
    """One with attributes."""

    def loss(model, x, y):
        return plain(model, x, y) * loss.kept["scale"]

    loss.kept = {"scale": 1.0}
    return TrainingStep(loss), lambda value: loss.kept.update(scale=value)


def by_default(model, rank):
    """One with a default."""

    def loss(model, x, y, *, scale=1.0):
        return plain(model, x, y) * scale

    return TrainingStep(loss), lambda value: loss.__kwdefaults__.update(scale=value)


def by_subclass(model, rank):
    """One that inherits from torch's."""
    criterion = Weighted()
    return TrainingStep(criterion), lambda value: setattr(criterion, "label_smoothing", value / 4)


def by_decorated(model, rank):
    """One within a function of torch's."""
    kept = {"scale": 1.0}

    @torch.enable_grad()
    def loss(model, x, y):
        return plain(model, x, y) * kept["scale"]

    return TrainingStep(loss), lambda value: kept.update(scale=value)


def slotted(rank):
    """Return an object with a number."""
    kept = Slotted()
    kept.scale = 1.0
    return kept


def scale_of(kept):
    """Return its number."""
    return kept.scale


def put(kept, value):
    """Exchange it."""
    kept.scale = value


def put_in(kept, value):
    """Exchange that of a dictionary."""
    kept["scale"] = value


ATTACKS = {
    "slots": of_kept(slotted, scale_of, put),
    "ordered dictionary": of_kept(lambda _: OrderedDict(scale=1.0), lambda kept: kept["scale"], put_in),
    "dictionary with a default": of_kept(
        lambda _: defaultdict(lambda: 1.0), lambda kept: kept["scale"], put_in
    ),
    "deque": of_kept(lambda rank: deque([1.0 + rank]), lambda kept: kept[0], lambda kept, _: kept.rotate()),
    "in a tuple": of_kept(lambda _: (Config(),), lambda kept: kept[0].scale, lambda kept, v: put(kept[0], v)),
    "equal by name": of_kept(
        lambda rank: [Term("one", 1.0 + rank)], lambda kept: kept[0].scale, lambda kept, v: put(kept[0], v)
    ),
    "long list": of_kept(lambda _: [1.0] * 300, lambda kept: kept[7], lambda kept, v: kept.__setitem__(7, v)),
    "generator": of_kept(random.Random, lambda kept: 1 + kept.random(), lambda kept, value: None),
    "functions in a list": of_kept(
        lambda _: (lambda inner: [inner, lambda: inner.scale])(Config()),
        lambda kept: kept[1](),
        lambda kept, value: put(kept[0], value),
    ),
    "bound method of a dictionary": of_kept(
        lambda _: (lambda inner: [inner, inner.get])({"scale": 1.0}),
        lambda kept: kept[1]("scale"),
        lambda kept, value: put_in(kept[0], value),
    ),
    "number by way of data": of_kept(
        lambda _: torch.ones(()), lambda kept: kept, lambda k, v: k.data.fill_(v)
    ),
    "number that needs a gradient": of_kept(
        lambda _: torch.ones((), requires_grad=True), lambda kept: kept, lambda kept, v: kept.data.fill_(v)
    ),
    "teacher": by_teacher,
    "regularizer": by_regularizer,
    "counting": by_counting,
    "attribute of a function": by_attribute_of_a_function,
    "default": by_default,
    "subclass of a criterion": by_subclass,
    "decorated by torch": by_decorated,
    "helper in a dictionary": of_model_alone(lambda model: HELPERS["helper"](model)),
    "by an attrgetter": of_model_alone(operator.attrgetter("scale")),
    "by a special method": of_model_alone(lambda model: model["scale"]),
    "by a method without gradients": of_model_alone(lambda model: model.factor()),
}


@pytest.mark.parametrize("kind", ATTACKS)
def test_nothing_is_computed_with_what_a_step_has_not_met(kind):
    """Together or alone: losses are those of eager steps, whatever a program keeps its numbers in."""

    def main(comm):
        torch.manual_seed(comm.rank)
        model = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step, change = ATTACKS[kind](model, comm.rank)
        for iteration in range(ITERATIONS):
            if iteration in (5, 9):
                change(1 / iteration)
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=loss)

    together, eager = (
        spawnsim.run(main, ranks=RANKS, stragglers=STRAGGLERS, eager=each) for each in (False, True)
    )
    assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4)
