"""Vmapped calls that are repeated from a record: the same bits, and only as long as the function is still the same."""

from __future__ import annotations

import functools
import gc
import linecache
import math
import sys
import weakref
from enum import Enum

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention

import spawnsim
from spawnsim import TrainingStep
from spawnsim.training import batches, tracing
from spawnsim.training.reading import Globals
from spawnsim.training.structure import Unequal
from spawnsim.training.tracing import Traced
from tests.training.test_steps import RANKS, batch, build, loss_of, run, sgd, weights

SCALE = 1.0
SHIFT = torch.zeros(())
SETTINGS = {"scale": 1.0}
criterion = nn.CrossEntropyLoss()


@pytest.fixture
def recorded(monkeypatch):
    """Record at the second call with a number of rows; the numbers of rows of all repeated and of all other calls."""
    repeated, others = [], []
    monkeypatch.setattr(tracing, "CALLS_BEFORE", 1)
    call = Traced.__call__

    def counted(self, *given):
        there = self.recorded and len(given[0]) in self._graphs
        outcome = call(self, *given)
        (repeated if there and self.recorded else others).append(len(given[0]))
        return outcome

    monkeypatch.setattr(Traced, "__call__", counted)
    return repeated, others


def train(loss, model_of=build, iterations=12, change=None, batch_of=batch, **how):
    """Train all ranks; return their weights, and the run. Rank 0 calls `change` in each iteration."""

    def main(comm):
        model = model_of(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss)
        for iteration in range(iterations):
            if change is not None and comm.rank == 0:
                change(iteration)
            with comm.compute(0.01):
                value = step(model, optimizer, *batch_of(comm.rank, iteration))
            comm.record(loss=float(value))
        return weights(model)

    return run(main, **({"stragglers": None} | how))


class Attention(nn.Module):
    """One block with all that transformers have."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.heads, self.out = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x):
        x = self.embed(x)
        q, k, v = (
            each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.heads(self.norm(x)).chunk(3, -1)
        )
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.out(nn.functional.gelu(x)).mean(1)


class Convolutions(nn.Module):
    """Convolutions and a pool."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.out = nn.Conv2d(1, 4, 3), nn.Linear(4 * 3 * 3, 5)

    def forward(self, x):
        return self.out(nn.functional.max_pool2d(self.first(x).relu(), 2).flatten(1))


class Recurrent(nn.Module):
    """A GRU."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.cell, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Normed(nn.Module):
    """Convolutions whose channels are normalised, and a scale: a parameter without dimensions."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.out, self.scale = nn.Linear(4 * 3 * 3, 5), nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.scale * self.out(nn.functional.max_pool2d(x, 2).flatten(1))


def tokens(rank, iteration):
    """Inputs and classes of a rank in an iteration."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randint(0, 11, (6, 7), generator=generator), torch.randint(0, 5, (6,), generator=generator)


def images(rank, iteration):
    """Likewise."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randn(6, 1, 8, 8, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def series(rank, iteration):
    """Likewise."""
    generator = torch.Generator().manual_seed(1000 * rank + iteration)
    return torch.randn(6, 5, 4, generator=generator), torch.randint(0, 5, (6,), generator=generator)


MODELS = {
    "network": (build, batch),
    "attention": (Attention, tokens),
    "convolutions": (Convolutions, images),
    "normed": (Normed, images),
    "recurrent": (Recurrent, series),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("stragglers", [None, "lognormal:0.3"])
def test_repeated_calls_give_the_same_bits(kind, stragglers, recorded, monkeypatch):
    """Weights and digests are those of a run in which nothing is repeated, to the bit."""
    model_of, batch_of = MODELS[kind]
    monkeypatch.setattr(
        batches, "FEW", 2
    )  # of others bits differ: those of one row at a time from those of a record
    how = {"model_of": model_of, "batch_of": batch_of, "stragglers": stragglers, "ranks": 17}
    some, result = train(loss_of, **how)
    repeated, _ = recorded
    assert len(repeated) >= 3
    monkeypatch.setattr(tracing, "CALLS_BEFORE", math.inf)
    before = len(repeated)
    plain, other = train(loss_of, **how)
    assert len(repeated) == before
    assert all(map(torch.equal, some, plain))
    assert result.totals["digest"] == other.totals["digest"]


def scaled(model, x, y):
    """A loss that reads a number."""
    return SCALE * cross_entropy(model(x), y)


def inner():
    """What it calls."""
    return SCALE


def scaled_within(model, x, y):
    """A loss whose helper does."""
    return (lambda: inner() * cross_entropy(model(x), y))()


def shifted(model, x, y):
    """A loss that reads a tensor."""
    return cross_entropy(model(x) * (1 + SHIFT), y)


def rescale(iteration):
    """Exchange a global number."""
    global SCALE
    SCALE = 0.1 if iteration >= 6 else 1.0


def reshift(iteration):
    """Change a global tensor where it is."""
    if iteration == 6:
        SHIFT.fill_(1.0)


def exchange_shift(iteration):
    """Exchange a global tensor."""
    global SHIFT
    SHIFT = torch.ones(()) if iteration >= 6 else SHIFT


@pytest.mark.parametrize(
    ("loss", "change"),
    [(scaled, rescale), (scaled_within, rescale), (shifted, reshift), (shifted, exchange_shift)],
)
def test_a_variable_that_changes_ends_the_repeating(loss, change, recorded, monkeypatch):
    """What a loss reads counts from the step on before which it was changed, as if nothing were repeated."""
    monkeypatch.setitem(globals(), "SHIFT", torch.zeros(()))
    some, _ = train(loss, change=change)
    repeated, _ = recorded
    assert repeated.count(RANKS) >= 3
    change(0)
    monkeypatch.setitem(globals(), "SHIFT", torch.zeros(()))
    monkeypatch.setattr(tracing, "CALLS_BEFORE", math.inf)
    plain, _ = train(loss, change=change)
    change(0)
    assert all(map(torch.equal, some, plain))


def wider(model, x, y):
    """A loss with an attribute, and two helpers: one with a default, one that is said to be torch's."""
    return (
        wider.scale
        * abs(cross_entropy(helped(model(x)), y))
        * Inner(DEFAULT).scale()
        * MODE.scale()
        * defaulted()
    )


wider.scale = 1.0
DEFAULT = 1.0


def defaulted(*, scale=1.0):
    """Its default may be exchanged."""
    return scale


@functools.wraps(torch.relu)
def helped(x):
    """Not torch's, whose name it has."""
    return x * SCALE


class Inner:
    """Made within the loss."""

    factor = 1.0

    def __init__(self, scale):
        self._scale = scale * SCALE

    def scale(self):
        return self._scale * self.factor


class Mode(Enum):
    """A member, of which a global is one."""

    PLAIN = 1

    def scale(self):
        return DEFAULT


MODE = Mode.PLAIN


def by_criterion(model, x, y):
    """A loss that is a module of torch, and a global teacher."""
    return criterion(model(x) + teacher(x).detach(), y)


teacher = build(7)


def activation(x):
    """Not the model's own, though the model has it."""
    return x.tanh() * SCALE


class Composed(nn.Module):
    """A model whose forward pass reads attributes of classes, and calls what its attributes are."""

    scale = 1.0

    def __init__(self, seed):
        super().__init__()
        self.inner, self.activations, self.settings = build(seed), [activation], Inner

    def halve(self, x):
        return x / 2

    def forward(self, x):
        return self.halve(self.activations[0](self.inner(x)) * self.scale * self.settings.factor)


HERE = sys.modules[__name__]
EXCHANGED = {
    "attribute of a function": (wider, build, wider, "scale", 3.0),
    "wrapped as a library's, and __init__": (wider, build, HERE, "SCALE", 3.0),
    "attribute of a class": (wider, build, Inner, "factor", 3.0),
    "method of an enumeration": (wider, build, HERE, "DEFAULT", 3.0),
    "default": (wider, build, defaulted, "__kwdefaults__", {"scale": 3.0}),
    "builtin": (wider, build, HERE, "abs", lambda x: 3 * x),
    "code": (wider, build, Mode.scale, "__code__", (lambda self: 3.0).__code__),
    "setting of a criterion": (by_criterion, build, criterion, "label_smoothing", 0.5),
    "method of a criterion": (
        by_criterion,
        build,
        criterion,
        "forward",
        lambda x, y: 3 * cross_entropy(x, y),
    ),
    "method of a teacher's layer": (by_criterion, build, teacher[1], "forward", torch.relu),
    "attribute of a model's class": (loss_of, Composed, Composed, "scale", 3.0),
    "method of a model's class": (loss_of, Composed, Composed, "halve", lambda self, x: x * 3),
    "method that comes": (loss_of, Composed, Composed, "__call__", lambda self, x: 3 * self.forward(x)),
    "function in an attribute": (loss_of, Composed, HERE, "SCALE", 3.0),
    "class in an attribute": (loss_of, Composed, Inner, "factor", 3.0),
}


@pytest.mark.parametrize("kind", EXCHANGED)
def test_what_is_exchanged_ends_the_repeating(kind, recorded, monkeypatch):
    """Whatever the loss or the model's classes reach: it counts from the next step on, as if nothing were repeated."""
    loss, model_of, owner, name, value = EXCHANGED[kind]

    def trained():
        with monkeypatch.context() as patch:
            return train(
                loss,
                model_of,
                change=lambda iteration: iteration == 6 and patch.setattr(owner, name, value, raising=False),
            )[0]

    some = trained()
    repeated, others = recorded
    # What a step was put off with is computed with, and another record made of the next; or none any more.
    assert repeated.count(RANKS) >= 3 and others.count(RANKS) >= 4
    monkeypatch.setattr(tracing, "CALLS_BEFORE", math.inf)
    assert all(map(torch.equal, some, trained()))


def test_the_default_dtype_ends_the_repeating(recorded, monkeypatch):
    """It decides of what dtype a constant is that a loss makes."""

    def loss(model, x, y):
        return cross_entropy(model(x), y) * (1 + 1 / torch.full((1,), 3.0).sum())

    def trained():
        try:
            return train(loss, change=lambda at: at == 6 and torch.set_default_dtype(torch.float64))[0]
        finally:
            torch.set_default_dtype(torch.float32)

    some = trained()
    assert recorded[0].count(RANKS) >= 3
    monkeypatch.setattr(tracing, "CALLS_BEFORE", math.inf)
    assert all(map(torch.equal, some, trained()))


def by_import(model, x, y):
    """One that imports what it reads."""
    from tests.training.test_steps import RANKS

    return RANKS * cross_entropy(model(x), y)


def as_number(model, x, y):
    """One that makes a number of a tensor."""
    return cross_entropy(model(x), y) * (1 + SHIFT.item())


class Reading(nn.Module):
    """A model whose forward pass reads what may change."""

    def __init__(self, seed):
        super().__init__()
        self.inner = build(seed)

    def forward(self, x):
        return self.inner(x) * SETTINGS["scale"]


def by_name(model, x, y):
    """One that finds it by its name."""
    return globals()["SCALE"] * cross_entropy(model(x), y)


def by_comparison(model, x, y):
    """One that compares tensors."""
    return cross_entropy(model(x), y) * (2.0 if torch.equal(SHIFT, torch.ones(())) else 1.0)


def by_list_of_tensor(model, x, y):
    """One that makes numbers of a tensor, of which torch tells nothing."""
    return cross_entropy(model(x), y) * (1 + SHIFT.tolist())


def by_place(model, x, y):
    """One that tells where in memory to read."""
    return cross_entropy(model(x), y) + x.as_strided((2,), (1,), x.storage_offset()).mean()


class OfClass(nn.Module):
    """A model whose class has a dictionary."""

    table = SETTINGS

    def __init__(self, seed):
        super().__init__()
        self.inner = build(seed)

    def forward(self, x):
        return self.inner(x) * self.table["scale"]


class Own:
    """Whose copies are itself."""

    scale = 1.0

    def __deepcopy__(self, memo):
        return self


class Sharing(nn.Module):
    """A model whose copies share something."""

    def __init__(self, seed):
        super().__init__()
        self.inner, self.shared = build(seed), Own()

    def forward(self, x):
        return self.inner(x) * self.shared.scale


@pytest.mark.parametrize(
    "loss",
    [
        by_import, as_number, by_name, by_comparison, by_list_of_tensor, by_place,
        Reading, OfClass, Sharing,
    ],
)  # fmt: skip
def test_what_reads_something_that_may_change_unnoticed_is_not_repeated(loss, recorded):
    """It is called each time."""
    model_of, loss = (loss, loss_of) if isinstance(loss, type) else (build, loss)
    train(loss, model_of=model_of, iterations=6)
    repeated, others = recorded
    assert not repeated and others.count(RANKS) == 6


def test_what_losses_usually_refer_to_is_known_to_stay():
    """Numbers, tensors, functions of libraries, modules of torch; but no list."""
    closed_over, weighting = 3, torch.ones(5)

    def loss(model, x, y, power=2.0):
        return criterion(model(x), y) + mse_loss(x, x) * closed_over + weighting.sum() ** power

    Globals(loss, build())
    Globals(functools.partial(loss, power=1.0), build())
    values = []
    with pytest.raises(Unequal, match="list"):
        Globals(lambda model, x, y: values and model(x), build())


def test_an_error_of_a_repeated_call_is_that_ranks(recorded):
    """An error in a repeated call is raised in the rank whose input caused it."""

    def main(comm):
        model = Attention(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(6):
            x, y = tokens(comm.rank, iteration)
            if comm.rank == 3 and iteration == 5:
                x = x + 100  # no such token
            with comm.compute(0.01):
                loss = step(model, optimizer, x, y)
            comm.record(loss=float(loss))

    with pytest.raises(spawnsim.errors.RankError, match="rank 3"):
        spawnsim.run(main, ranks=RANKS)
    assert recorded[0].count(RANKS) >= 3


def test_few_models_are_computed_one_by_one_until_a_record_pays(monkeypatch):
    """A vmapped call of two rows that is not repeated takes as long as four rows by themselves."""
    ranks, calls, call = 3, [], Traced.__call__
    monkeypatch.setattr(
        Traced, "__call__", lambda self, *given: calls.append(len(given[0])) or call(self, *given)
    )
    iterations = tracing.CALLS_BEFORE + 5
    train(loss_of, iterations=iterations, ranks=ranks)
    assert calls == [ranks] * 5


def test_nothing_is_left_of_records(recorded):
    """Neither rows nor text, of which torch keeps that of its own graphs."""
    graphs = weakref.WeakSet()
    record = tracing._Recording.finish

    def finish(self, outcomes):
        graph = record(self, outcomes)
        graphs.add(graph.func)
        return graph

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tracing._Recording, "finish", finish)
            train(loss_of)
        assert recorded[0] and not graphs
    finally:
        gc.enable()
    assert not [name for name in linecache.cache if "eval_with_key" in name]


def test_what_changes_what_it_was_given_is_called_once():
    """To try a record would change it once more."""
    given = torch.zeros(3, 2)
    traced = Traced(lambda x: [x.add_(1) * 2], Globals(loss_of, build()))
    for number in range(1, tracing.CALLS_BEFORE + 4):
        assert float(traced(given)[0][0, 0]) == 2 * number
    assert not traced.recorded


def test_a_place_in_memory_is_not_recorded():
    """Other rows lie elsewhere; what is made within lies where it lay."""
    numbers = torch.arange(20.0).view(10, 2)

    def elsewhere(x):
        return [x.as_strided((3,), (2,), x.storage_offset() + 1)]

    def within(x):
        return [(x * 2).as_strided((3,), (2,), 1)]

    for call in (elsewhere, within):
        traced = Traced(call, Globals(loss_of, build()))
        for number in range(tracing.CALLS_BEFORE + 4):
            given = numbers[number % 7 :][:3]
            assert torch.equal(traced(given)[0], call(given)[0])
        assert traced.recorded == (call is within)


def test_what_was_made_within_may_be_changed():
    """Changes in place, through views too, are repeated as they were."""

    def call(x):
        y = x * 2
        y.t()[0] += 1
        return [y.relu_(), y.t().t()]

    traced = Traced(call, Globals(loss_of, build()))
    for number in range(tracing.CALLS_BEFORE + 4):
        given = torch.full((3, 2), float(number))
        assert all(map(torch.equal, traced(given), call(given)))
    assert traced.recorded


def numbers(x):
    """Operations of tensors and numbers, of places, of several outcomes, without end, with defaults of two kinds."""
    low, high = (x * 0.1 + 3).split(1, -1)
    kept = torch.where(x > 0.3, x, -math.inf).amax(-1, keepdim=True).clamp(min=-1.0)
    top, _ = (1 - x / 3 - 2).sort(-1)
    whole = (x > 0).long() * 0.3 + (x < 0.5)
    some = torch.tensor([2, 0, 2])
    places = x[some, :1] + x[:, some // 2][:3] + x[torch.arange(3), some // 2]
    spread = x.std(0) + x.var() + torch.var(x, 0, correction=0)
    return [
        low - high, kept, top, whole, torch.nn.functional.gelu(x, approximate="tanh"), x.double() * 0.1, places, spread,
    ]  # fmt: skip


@pytest.mark.parametrize("model_of", ["numbers", *MODELS])
def test_records_call_the_same_operations_in_both_languages(model_of, monkeypatch):
    """TorchScript and Python, to the bit, where TorchScript has to choose among operations of one name."""
    if model_of == "numbers":
        given = [torch.randn(5, 2)]
        with tracing._Recording(given) as recording:
            outcomes = numbers(*given)
        graphs = [(recording.graph, given, outcomes)]
        recording.finish(outcomes)
        given[:0] = recording._constants
    else:
        graphs, finish = [], tracing._Recording.finish
        monkeypatch.setattr(tracing, "CALLS_BEFORE", 1)
        monkeypatch.setattr(
            tracing._Recording,
            "finish",
            lambda self, outcomes: graphs.append((self.graph, None, None)) or finish(self, outcomes),
        )
        kind, batch_of = MODELS[model_of]
        train(loss_of, model_of=kind, batch_of=batch_of, ranks=5, iterations=4)
    for graph, given, outcomes in graphs:
        compiled = tracing._compiled(graph)
        assert compiled is not None
        if given is not None:
            with tracing.as_recorded():
                found = compiled(*given)
            python = tracing._interpreted(graph)(*given)
            for each, other, first in zip(found, python, outcomes, strict=True):
                assert each.dtype == other.dtype == first.dtype
                assert torch.equal(each, first)
                assert torch.equal(other, first)


def test_without_torchscript_records_are_repeated_by_python(recorded, monkeypatch):
    """As on a torch that has left it out: the same bits."""
    some, result = train(loss_of)
    compiled = len(recorded[0])

    def gone(text):
        raise RuntimeError("no TorchScript")

    monkeypatch.setattr(torch.jit, "CompilationUnit", gone)
    plain, other = train(loss_of)
    assert len(recorded[0]) == 2 * compiled > 0
    assert all(map(torch.equal, some, plain))
    assert result.totals["digest"] == other.totals["digest"]


def test_a_record_that_would_call_another_operation_is_left_to_python():
    """A number where a tensor is expected, of an operation whose namesake for numbers is another one."""
    given = torch.randn(3, 2)
    with tracing._Recording([given]) as recording:
        outcome = torch.ops.aten.pow.Tensor_Tensor(given, given.abs())
    recording.graph.output([recording._of(outcome)])
    node = next(each for each in recording.graph.nodes if each.target is torch.ops.aten.pow.Tensor_Tensor)
    node.args = (node.args[0], 2)
    assert tracing._compiled(recording.graph) is None


def test_programs_keep_their_own_torchscript_as_it_was():
    """Records are repeated without rewriting; what else runs in the process is not touched."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(3):
            with comm.compute(0.01):
                loss = step(model, optimizer, *batch(comm.rank, iteration))
            float(loss)
            assert torch._C._get_graph_executor_optimize()

    run(main)
    assert torch._C._get_graph_executor_optimize()
