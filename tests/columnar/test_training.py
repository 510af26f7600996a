"""Models that train over columns, held to those of ordinary ranks, and to plain torch and a policy's own parts."""

import copy
import gc
import itertools
import random
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from support.room import limit_rows
from torch import nn
from torch.nn.functional import cross_entropy

import spawnsim
from spawnsim import TrainingStep, columnar
from spawnsim.cli import main as command
from spawnsim.errors import ParameterError, ProgramError, UnsupportedError, UsageError
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    EDiTPolicy,
    OuterOptimizerPolicy,
    StateScope,
    StreamingDiLoCoPolicy,
)
from spawnsim.policies.exchange.replacement import Contribution, nonfinite_donors, normalized
from spawnsim.policies.state.layout import collect
from tests.columnar.test_columnar import EQUAL_S, STRAGGLERS, last_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # whatever is at hand
CENTRES = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
KINDS = torch.arange(4, device=DEVICE)
Selective = partial(AsyncSelectiveAveragingPolicy, None)


def built(rng, optimizer="momentum", spread=0.5):
    """Return a network from torch's own generator, and its optimizer, whose learning rate is the rank's own."""
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(DEVICE)
    lr = 0.1 * float(rng("rate").lognormal(0.0, spread))
    kinds = {
        "plain": lambda: torch.optim.SGD(model.parameters(), lr=lr),
        "momentum": lambda: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True),
        "adam": lambda: torch.optim.Adam(model.parameters(), lr=lr / 10),
        "groups": lambda: torch.optim.AdamW(
            [{"params": model[0].parameters(), "lr": lr / 5}, {"params": model[2].parameters()}], lr=lr / 10
        ),
    }
    return model, kinds[optimizer]()


def batches(rng, rank, size):
    """Yield batches of which each rank sees two kinds more often than the others."""
    draw = rng("data")
    while True:
        kinds = (draw.integers(0, 4, 16) // (1 + rank % 2)).astype(np.int64)
        noise = torch.from_numpy(draw.normal(size=(16, 6)).astype(np.float32))
        yield CENTRES[kinds] + noise.to(DEVICE), torch.from_numpy(kinds).to(DEVICE)


def loss_of(model, x, y):
    """Return the mean cross-entropy."""
    return cross_entropy(model(x), y)


def spread_of(model):
    """Stand for an accuracy: some function of the model alone."""
    return model(CENTRES).softmax(1).diagonal().mean()


def training(**how):
    """Return how models train here."""
    optimizer = how.pop("optimizer", "momentum")
    return columnar.Training(
        **{"build": partial(built, optimizer=optimizer), "loss": loss_of, "data": batches} | how
    )


def alike(rng):
    """Return a network that all begin with, which does not learn at first, while its optimizer gathers momentum."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(DEVICE)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def late(rng, rank, size):
    """Yield batches of which the first five give no gradient."""
    for number, (x, y) in enumerate(batches(rng, rank, size)):
        yield (x if number >= 5 else x * 0), (y if number >= 5 else y * 0)


def partly(rng):
    """Return a network whose first layer is frozen, and differs from rank to rank."""
    model, _ = built(rng)
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)


def vector(model):
    """Return all weights of a model."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def on_ordinary_ranks(how, policy_of, ranks, iterations, **world):
    """Train as a program on virtual ranks does."""
    kept = [None] * ranks

    def main(comm):
        model, optimizer = how.build(comm.rng)
        own, step = (
            iter(how.data(comm.rng, comm.rank, comm.size)),
            TrainingStep(how.loss, max_norm=how.max_norm),
        )
        lrs = [group["lr"] for group in optimizer.param_groups]
        policy = policy_of()
        for iteration in range(iterations):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * (how.schedule(iteration) if how.schedule else 1)
            with comm.compute():
                loss = step(model, optimizer, *next(own))
            model, optimizer, _ = policy(iteration, model, optimizer, -loss, comm)
        comm.record(ended_s=comm.clock.now(), loss=loss)
        policy.shutdown()
        kept[comm.rank] = vector(model)

    return spawnsim.run(main, ranks=ranks, **world), kept


AVERAGING = {
    "momentum": {},
    "40 ranks, which is more than a chunk": {"ranks": 40},
    "adam, state averaged": {"optimizer": "adam", "travels": StateScope(optimizer_state="average")},
    "adam, state begun anew": {"optimizer": "adam", "travels": StateScope(optimizer_state="reset")},
    "groups, clipped, a schedule": {"optimizer": "groups", "max_norm": 0.5, "schedule": lambda i: 0.9**i},
    "half of the own": {"momentum": 0.5},
    "alone, state begun anew": {"ranks": 1, "travels": StateScope(optimizer_state="reset")},
    "equal, state begun anew": {"build": alike, "data": late, "travels": StateScope(optimizer_state="reset")},
    "equal, state averaged": {"build": alike, "data": late, "travels": StateScope(optimizer_state="average")},
    "frozen, which does not travel": {"build": partly, "travels": StateScope(frozen=False)},
}


# To the bit: on a GPU the models of ranks that are computed with more or fewer others differ in their last bits.
@pytest.mark.parametrize(
    "name", [each for each in AVERAGING if DEVICE == "cpu" or not each.startswith("equal")]
)
def test_averaged_models_are_those_of_ordinary_ranks(name):
    """Weights, losses, clocks and bytes; the last iterations come after the last averaging."""
    given = dict(AVERAGING[name])
    ranks, policy = given.pop("ranks", 12), {"travels": given.pop("travels", None)}
    policy |= {"momentum": given.pop("momentum", 0.0)}
    models = assert_as_on_ordinary_ranks(training(**given), partial(AverageAllPolicy, 4, **policy), ranks)
    assert ranks == 1 or not torch.allclose(models[0], models[1], atol=1e-3)


def assert_as_on_ordinary_ranks(how, policy, ranks):
    """Run a policy over columns and on ordinary ranks; return the models of these."""
    world = {"ranks": ranks, "stragglers": STRAGGLERS, "seed": 5}
    own = columnar.run(policy(), iterations=19, training=how, sample=ranks, **world)
    ordinary, models = on_ordinary_ranks(how, policy, iterations=19, **world)
    assert np.abs(last_of(own, "time_s") - ordinary.table["ended_s"]).max() <= EQUAL_S
    np.testing.assert_allclose(last_of(own, "loss"), ordinary.table["loss"], rtol=1e-4)
    assert [own.totals[each] for each in ("messages", "bytes")] == [
        ordinary.totals[each] for each in ("messages", "bytes")
    ]
    for rank, model in enumerate(models):
        torch.testing.assert_close(vector(how.model(rank)), model, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(vector(how.model()), torch.stack(models).mean(0), rtol=1e-4, atol=1e-5)
    return models


OUTER = {
    "DiLoCo": (OuterOptimizerPolicy, {}, {"optimizer": "adam"}),
    "40 ranks": (OuterOptimizerPolicy, {}, {"ranks": 40}),
    "alone": (OuterOptimizerPolicy, {}, {"ranks": 1}),
    "FedAvg, state begun anew": (
        OuterOptimizerPolicy.fedavg, {"travels": StateScope(frozen=False, optimizer_state="reset")}, {},
    ),
    "SlowMo": (OuterOptimizerPolicy.slowmo, {}, {"build": alike, "schedule": lambda i: 0.9**i}),
    "sign": (OuterOptimizerPolicy, {"sign": True, "lr": 0.01}, {}),
    "a frozen layer": (OuterOptimizerPolicy, {}, {"build": partly}),
    "a frozen layer that travels": (OuterOptimizerPolicy, {"travels": StateScope()}, {"build": partly}),
    "in every iteration": (OuterOptimizerPolicy, {"average_every": 1}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", OUTER)
def test_outer_optimizers_make_the_models_of_ordinary_ranks(name):
    """Weights, losses, clocks and bytes."""
    kind, given, other = OUTER[name]
    ranks, policy = other.get("ranks", 12), partial(kind, **{"average_every": 4} | given)
    how = training(**{key: value for key, value in other.items() if key != "ranks"})
    assert_as_on_ordinary_ranks(how, policy, ranks)


def test_an_outer_step_leaves_out_what_is_not_finite():
    """As if it had not moved; the state that is not finite is forgotten."""
    assert_as_on_ordinary_ranks(
        training(data=half_spoilt, optimizer="adam"), partial(OuterOptimizerPolicy, 4), 12
    )


def test_ranks_die_and_the_others_make_outer_steps():
    """They meet anew, with the global weights that they have."""
    how = training()
    world = {"ranks": 20, "iterations": 15, "faults": "crash:0@0.05s; crash:17@0.08s", "compute": "10 ms"}
    run = columnar.run(OuterOptimizerPolicy(2), training=how, **world)
    alive = [vector(how.model(rank)) for rank in range(1, 20) if rank != 17]
    assert all(torch.equal(each, alive[0]) for each in alive)
    assert [event["alive"] for event in run.events if event["kind"] == "round"][-1] == 18


def test_numbers_stand_for_models_of_an_outer_optimizer():
    """Plain gradient descent on the mean movement, with momentum."""

    class Even:
        def begin(self, ranks, seed):
            return np.arange(ranks, dtype=float)

        def train(self, quality, first, count):
            quality += count * (1.0 + np.arange(len(quality)) % 2)

        def metric(self, quality, iteration):
            return quality

    seen = []
    policy = OuterOptimizerPolicy(2, lr=0.5, momentum=0.5, nesterov=False)
    columnar.run(
        policy, ranks=4, iterations=6, model_nbytes=8, quality=Even(),
        on_round=lambda reported: seen.append(reported.metrics.tolist()),
    )  # fmt: skip
    # From 1.0 on, two iterations each: the mean moves by 3, then momentum takes half of it along.
    begun = 1.0
    assert seen[0] == [1.0, 3.0, 3.0, 5.0]
    assert seen[1] == [begun + 2, begun + 4] * 2
    assert seen[2] == [begun + 1.5 + 2, begun + 1.5 + 4] * 2


def test_an_outer_optimizer_without_a_form_over_columns_is_refused():
    """By name."""
    with pytest.raises(UnsupportedError, match="EDiTPolicy has no form"):
        columnar.run(EDiTPolicy(4), ranks=10, iterations=9, training=training())
    with pytest.raises(UnsupportedError, match="numbers have no fragments"):
        columnar.run(StreamingDiLoCoPolicy(4), ranks=10, iterations=9, model_nbytes=800)


def test_learning_rates_that_differ_cannot_scale_one_outer_step():
    """Each rank would have global weights of its own."""
    with pytest.raises(UsageError, match="learning rates differ"):
        columnar.run(OuterOptimizerPolicy.slowmo(4), ranks=10, iterations=9, training=training())


def by_plain_torch(how, ranks, iterations, seed, policy, decisions):
    """Train each rank by torch alone, and replace models by the policy's own parts, as was decided."""
    streams = [spawnsim.random.Streams(seed, rank) for rank in range(ranks)]
    made, own = [], []
    for rank, rng in enumerate(streams):
        torch.manual_seed(rng.seed(spawnsim.random.TORCH))
        made.append(how.build(rng))
        own.append(iter(how.data(rng, rank, ranks)))
    for iteration in range(iterations):
        for (model, optimizer), data in zip(made, own, strict=True):
            optimizer.zero_grad()
            how.loss(model, *next(data)).backward()
            optimizer.step()
        decision = decisions.get(iteration)
        if decision is None:
            continue
        given = [
            {name: tensor.clone() for name, tensor in collect(*each, policy.replacement.travels).items()}
            for each in made
        ]
        for index, begin in enumerate(decision.begins.tolist()):
            edges = slice(begin, begin + int(decision.counts[index]))
            pairs = zip(decision.donors[edges].tolist(), decision.weights[edges].tolist(), strict=True)
            contributions = [Contribution(donor, iteration, weight, given[donor]) for donor, weight in pairs]
            rank = int(decision.replaced[index])
            out = nonfinite_donors(contributions, partial(given.__getitem__, rank))
            contributions = normalized([each for each in contributions if each.donor not in out])
            if not contributions:
                continue
            found = policy.replacement(*made[rank], contributions, reference={}, rng=streams[rank]("explore"))
            made[rank] = found.model, found.optimizer
    return [vector(model) for model, _ in made]


def assert_replaced_as_by_torch(how, policy, ranks, iterations, **world):
    """Run over columns, and hold all models to those that plain torch and the policy's parts make; return reports."""
    decisions, reports = {}, []

    def reported(round_):
        decisions[round_.iteration] = round_.decision
        reports.append(round_.metrics)

    columnar.run(policy, ranks=ranks, iterations=iterations, training=how, seed=3, on_round=reported, **world)
    wanted = by_plain_torch(how, ranks, iterations, 3, policy, decisions)
    for rank, model in enumerate(wanted):
        torch.testing.assert_close(vector(how.model(rank)), model, rtol=1e-3, atol=1e-4, equal_nan=True)
    return reports, sum(len(each.replaced) for each in decisions.values())


@pytest.mark.parametrize("strategy", ["mean", "weighted_mean", "best_only"])
@pytest.mark.parametrize("state", ["reset", "keep", "copy", "average"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_replaced_models_are_those_that_the_policy_makes(strategy, state, optimizer):
    """Weights and state of replaced ranks, against plain torch and `Replacement` itself."""
    policy = Selective(
        5, replacement_ratio=0.3, averaging_strategy=strategy, momentum=0.25, donors=3,
        travels=StateScope(optimizer_state=state),
    )  # fmt: skip
    how = training(optimizer=optimizer, score=spread_of)
    reports, replaced = assert_replaced_as_by_torch(how, policy, 37, 23, stragglers=STRAGGLERS)
    assert replaced >= 40
    assert all(((each > 0) & (each < 1)).all() for each in reports)


def test_what_is_reported_is_the_loss_or_a_score():
    """Also in the rows, with a column of its own."""
    seen = []
    how = training()
    run = columnar.run(
        Selective(5),
        ranks=20,
        iterations=11,
        training=how,
        on_round=lambda reported: seen.append(reported.metrics),
    )
    due = run.table.where(np.isfinite(run.table["local_metric"]))
    np.testing.assert_array_equal(due["local_metric"], -due["loss"])
    np.testing.assert_array_equal(seen[0], due["local_metric"][due["iteration"] == due["iteration"].min()])
    scored = training(score=spread_of)
    run = columnar.run(AverageAllPolicy(5), ranks=20, iterations=11, training=scored)
    last = run.table.where(run.table["iteration"] == 10)
    np.testing.assert_array_equal(last["local_metric"], last["spread_of"])
    with torch.no_grad():
        assert (last["local_metric"] != 0).all()
    assert len(set(last["local_metric"].tolist())) == 20  # before the mean was taken


def test_models_learn_and_averages_are_better_than_each():
    """The mean of all models names all kinds of which each rank has seen some."""
    how, found = training(), []
    policy = AverageAllPolicy(10)
    columnar.run(
        policy, ranks=64, iterations=101, training=how,
        on_round=lambda reported: found.append(loss_of(how.model(), CENTRES, KINDS).item()),
    )  # fmt: skip
    assert found[-1] < 0.5 < 1.2 < found[0]


def test_the_same_seed_gives_the_same_run_and_leaves_generators_alone():
    """Also where batches are drawn from the global generator."""

    def run(seed=0, data=batches):
        return columnar.run(
            Selective(4), ranks=40, iterations=9, training=training(data=data), seed=seed
        ).totals["digest"]

    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = run()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert run() == one != run(seed=1)

    seen = []

    def from_global_generators(rng, rank, size):
        while True:
            x = torch.randn(16, 6) + float(np.random.normal()) + random.random()
            seen.append(float(x.sum()))
            yield x.to(DEVICE), torch.randint(0, 4, (16,)).to(DEVICE)

    digest = run(data=from_global_generators)
    assert len(set(seen)) == len(seen) == 40 * 9
    np.random.seed(3)
    assert run(data=from_global_generators) == digest


def test_ranks_die_and_the_others_average():
    """The dead keep what they had at the last turn, and are asked for no more batches."""
    asked = {}

    def counted(rng, rank, size):
        for number, batch in enumerate(batches(rng, rank, size)):
            if rank in (3, 17):
                asked.setdefault(rank, []).append(number)
            yield batch

    how = training(data=counted)
    world = {"ranks": 20, "iterations": 15, "faults": "crash:3@0.05s; crash:17@0.08s", "compute": "10 ms"}
    run = columnar.run(AverageAllPolicy(2), training=how, detection_s=0.1, **world)
    assert [event["died"] for event in run.events if event["kind"] == "round"].count(1) == 2
    alive = [vector(how.model(rank)) for rank in range(20) if rank not in (3, 17)]
    assert all(torch.equal(each, alive[0]) for each in alive)
    torch.testing.assert_close(vector(how.model()), alive[0])
    assert len(asked) == 2 and max(asked[3]) < 8 and max(asked[17]) < 11
    assert not torch.equal(vector(how.model(3)), alive[0])


@pytest.mark.parametrize("guard", [True, False])
def test_a_model_that_is_not_finite_is_healed_by_the_mean(guard):
    """With its state; without the guard all are lost."""

    def spoilt(rng, rank, size):
        for number, (x, y) in enumerate(batches(rng, rank, size)):
            yield (x * torch.nan if (rank, number) == (5, 6) else x), y

    how = training(data=spoilt, optimizer="adam")
    columnar.run(AverageAllPolicy(4, guard=guard), ranks=12, iterations=17, training=how)
    finite = [bool(vector(how.model(rank)).isfinite().all()) for rank in range(12)]
    assert all(finite) if guard else not any(finite)


def test_donors_that_are_not_finite_give_nothing():
    """Their metric is fine: a score that does not look at what is spoilt."""

    def spoilt(rng, rank, size):
        for number, (x, y) in enumerate(batches(rng, rank, size)):
            yield (x * torch.nan if (rank % 2, number) == (1, 2) else x), y

    def score(model):
        return model[0].bias.nan_to_num(3.0).mean()

    how, seen = training(data=spoilt, score=score), []
    columnar.run(
        Selective(4, donors=2, replacement_ratio=0.2), ranks=30, iterations=5, training=how,
        on_round=lambda reported: seen.append(reported.decision),
    )  # fmt: skip
    [decision] = seen
    for rank, begin, count in zip(decision.replaced, decision.begins, decision.counts, strict=True):
        donors = decision.donors[begin : begin + count]
        healthy = [donor for donor in donors.tolist() if donor % 2 == 0]
        if healthy:
            mean = torch.stack([vector(how.model(donor)) for donor in healthy]).mean(0)
            torch.testing.assert_close(vector(how.model(int(rank))), mean)
    assert any((decision.donors % 2).tolist())


def test_a_rank_that_is_not_finite_is_replaced_with_momentum():
    """Of its own weights nothing is kept."""

    def spoilt(rng, rank, size):
        for number, (x, y) in enumerate(batches(rng, rank, size)):
            yield (x * torch.nan if (rank in (4, 9), number) == (True, 2) else x), y

    how = training(data=spoilt)
    columnar.run(Selective(4, momentum=0.25, donors=3), ranks=20, iterations=5, training=how)
    assert all(vector(how.model(rank)).isfinite().all() for rank in range(20))
    quality = columnar.run(
        Selective(4, momentum=0.25), ranks=20, iterations=5, model_nbytes=8, quality=Lost()
    )
    assert np.isfinite(quality.table["local_metric"][quality.table["iteration"] == 4]).sum() == 19


class Lost(columnar.RandomWalk):
    """A walk in which a rank is lost."""

    def train(self, quality, first, count):
        """Lose it in the first iterations."""
        super().train(quality, first, count)
        if not first:
            quality[3] = np.nan


@pytest.mark.parametrize("state", ["copy", "average", "reset"])
def test_where_donors_are_lost_with_their_state_the_policy_decides(state):
    """All that a donor gives counts for nothing where part of it is not finite; a rank that gets nothing stays."""
    how = training(optimizer="adam", data=half_spoilt, score=of_bias)
    policy = Selective(4, donors=2, replacement_ratio=0.3, travels=StateScope(optimizer_state=state))
    assert_replaced_as_by_torch(how, policy, 30, 7)


def half_spoilt(rng, rank, size):
    """Yield batches, of which one spoils every other rank."""
    for number, (x, y) in enumerate(batches(rng, rank, size)):
        yield (x * torch.nan if (rank % 2, number) == (1, 2) else x), y


def of_bias(model):
    """Judge what is not spoilt."""
    return model[0].bias.nan_to_num(3.0).mean()


def masked(rng):
    """Return a network with a frozen mask of infinities, which is meant."""
    model, optimizer = built(rng)
    model.mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, -torch.inf], device=DEVICE), requires_grad=False)
    return model, optimizer


def test_infinities_that_all_have_are_no_fault():
    """Models with a mask are exchanged as others are."""
    how = training(build=masked, loss=lambda model, x, y: loss_of(model, x, y % 3) + 0 * model.mask[0])
    assert_replaced_as_by_torch(how, Selective(4, donors=3, replacement_ratio=0.3), 12, 7)
    other = training(build=masked)
    columnar.run(AverageAllPolicy(4), ranks=12, iterations=5, training=other)
    assert torch.equal(vector(other.model(0)), vector(other.model(11)))


def test_a_run_leaves_no_memory_behind_and_copies_are_fresh():
    """Without Python's collector. A nested run, or one that is refused, leaves the models of the other alone."""
    how = training()
    columnar.run(AverageAllPolicy(2), ranks=10, iterations=5, training=how)
    arena = weakref.ref(how._trained._rows)
    with pytest.raises(UsageError, match="no run has begun"):
        copy.deepcopy(how).model()
    kept = vector(how.model(3))
    with pytest.raises(UnsupportedError):
        columnar.run(DecentralizedAveragingPolicy(4), ranks=10, iterations=9, training=how)
    assert torch.equal(vector(how.model(3)), kept)
    gc.collect()
    gc.disable()
    try:
        del how
        assert arena() is None
    finally:
        gc.enable()

    def nested(reported):
        columnar.run(AverageAllPolicy(2), ranks=3, iterations=1, training=outer)

    outer = training()
    columnar.run(AverageAllPolicy(2), ranks=10, iterations=6, training=outer, on_round=nested)
    outer.model(9)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_of_the_caller_change_nothing(mode):
    """As a notebook's cell may be in one."""
    wanted = columnar.run(AverageAllPolicy(2), ranks=10, iterations=5, training=training())
    with mode():
        found = columnar.run(AverageAllPolicy(2), ranks=10, iterations=5, training=training())
    assert found.totals["digest"] == wanted.totals["digest"]
    with torch.autocast("cpu"), pytest.raises(UnsupportedError, match="autocast"):
        columnar.run(AverageAllPolicy(2), ranks=10, iterations=5, training=training())


# ------------------------------------------------------------------------------------------------ what is refused
class Noisy(nn.Linear):
    """Draws a random number in each pass."""

    def forward(self, x):
        return super().forward(x) + torch.randn(())


def one(module, optimizer=torch.optim.SGD, **how):
    """Return what builds one module."""
    return lambda rng: ((model := module().to(DEVICE)), optimizer(model.parameters(), lr=0.1, **how))


def scheduled(made):
    """Return a model and optimizer, with a scheduler."""
    torch.optim.lr_scheduler.StepLR(made[1], 3)
    return made


def writing(model):
    """Change what it judges."""
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0)
    return spread_of(model)


REFUSED = {
    "statistics": ({"build": one(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))}, "changes buffers"),
    "random numbers": ({"build": one(lambda: Noisy(6, 4))}, "random"),
    "dropout": ({"build": one(lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5)))}, "random"),
    "another optimizer": ({"build": one(lambda: nn.Linear(6, 4), torch.optim.Adagrad)}, "Adagrad"),
    "models that differ": (
        {"build": lambda rng: one(lambda: nn.Linear(6, 4, bias=rng.key[1] != 7))(rng)}, "rank 7 differs",
    ),
    "a loss of other weights": ({"loss": lambda model, x, y: model[0](x).mean()}, "does not depend on 2.weight"),
    "scheduler": ({"build": lambda rng: scheduled(built(rng))}, "schedule="),
    "a score that writes": ({"score": writing}, "changes weights"),
    "a score that draws": ({"score": lambda model: spread_of(model) + torch.rand(())}, "random"),
    "numbers of a tensor": ({"loss": lambda model, x, y: model(x).sum() * model(x).sum().item()}, "virtual ranks"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_over_columns_is_refused_by_name(name):
    """Before anything is trained."""
    given, words = REFUSED[name]
    with pytest.raises(UnsupportedError, match=words):
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=training(**given))


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (AsyncSelectiveAveragingPolicy(lambda: built(None), 4), "model_builder"),
        (
            Selective(4, travels=StateScope(optimizer_state="copy", settings=("momentum",))),
            "setting 'momentum'",
        ),
        (DecentralizedAveragingPolicy(4), "no form"),
    ],
)
def test_policies_that_would_do_otherwise_are_refused(policy, words):
    """By name, with the reason."""
    with pytest.raises(UnsupportedError, match=words):
        columnar.run(policy, ranks=10, iterations=9, training=training())


def test_batches_that_end_or_differ_are_reported():
    """With the rank and the iteration."""
    short = training(data=lambda rng, rank, size: itertools.islice(batches(rng, rank, size), 5 + (rank != 8)))
    with pytest.raises(UsageError, match="batches of rank 8 ended before iteration 5"):
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=short)
    unequal = training(data=lambda rng, rank, size: itertools.repeat((torch.zeros(3 + rank, 6),)))
    with pytest.raises(UsageError, match=r"ranks 0 to 9 in iteration 0 .* shapes"):
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=unequal)
    numbers = training(data=lambda rng, rank, size: itertools.repeat((1.0, 2.0)))
    with pytest.raises(
        UsageError, match="rank 0 in iteration 0 is a tuple: yield a tensor, or a tuple of tensors"
    ):
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=numbers)


def test_arguments_without_a_meaning_are_reported():
    """Before anything runs."""
    with pytest.raises(ParameterError, match="quality and training"):
        columnar.run(
            AverageAllPolicy(4), ranks=4, iterations=4, training=training(), quality=columnar.RandomWalk()
        )
    with pytest.raises(ParameterError, match="model_nbytes"):
        columnar.run(AverageAllPolicy(4), ranks=4, iterations=4)
    for given in ({"loss": 3}, {"score": 3}, {"max_norm": 0}, {"schedule": 0.1}):
        with pytest.raises(ParameterError):
            training(**given)
    with pytest.raises(UsageError, match="return \\(model, optimizer\\)"):
        columnar.run(
            AverageAllPolicy(4), ranks=4, iterations=4, training=training(build=lambda rng: nn.Linear(6, 4))
        )
    with pytest.raises(UsageError, match="no run has begun"):
        training().model()
    how = training()
    columnar.run(AverageAllPolicy(4), ranks=4, iterations=4, training=how)
    with pytest.raises(ParameterError, match="there are 4"):
        how.model(4)


# --------------------------------------------------------------------------------------------- errors of the program
def raising(*_):
    """Stand for a slip of the program."""
    raise IndexError("a slip")


def slipping(rng, rank, size):
    """Yield batches, of one rank a few."""
    for number, batch in enumerate(batches(rng, rank, size)):
        if (rank, number) == (3, 2):
            raising()
        yield batch


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"build": raising}, "raising raised IndexError for rank 0: a slip"),
        ({"data": slipping}, "slipping raised IndexError for rank 3 in iteration 2: a slip"),
        ({"loss": raising}, "raising raised IndexError for rank 0: a slip"),
        ({"score": raising}, "raising raised IndexError for rank 0: a slip"),
        ({"schedule": raising}, "raising raised IndexError for rank 0 in iteration 0: a slip"),
    ],
)
def test_errors_of_the_program_name_the_rank(given, words):
    """With what was raised as their cause."""
    with pytest.raises(ProgramError, match=words) as error:
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=training(**given))
    assert type(error.value.__cause__) is IndexError


PROGRAM = """
import torch
from torch.nn.functional import mse_loss

TRUTH = torch.linspace(-1, 1, 8)
max_norm = 1.0

def build(rng):
    model = torch.nn.Linear(8, 1, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def data(rng, rank, size):
    while True:
        yield torch.tensor(rng("data").normal(size=(32, 8)), dtype=torch.float32)

def loss(model, x):
    return ((model(x)[:, 0] - x @ TRUTH) ** 2).mean()

def error(model):
    return (model.weight[0] - TRUTH).abs().max()
"""


def test_models_of_a_file_train_from_the_command_line(tmp_path, capsys):
    """The bytes of one are the model's own, unless others are given."""
    path = tmp_path / "learn.py"
    path.write_text(PROGRAM + "score = error\n")
    line = ["columnar", "average", "-n", "40", "--set", "iterations=31", "--train", str(path)]
    line += ["--out", str(tmp_path / "run")]
    assert command([*line, "--set", "average_every=5", "--json"]) == 0
    run = spawnsim.Run.load(tmp_path / "run")
    assert (run.what["model_nbytes"], run.what["training"]["max_norm"]) == (32, 1.0)
    last = run.table.where(run.table["iteration"] == 30)
    assert last["loss"].max() < 0.02
    assert last["error"].max() < 0.2
    path.write_text(PROGRAM.replace("def data", "def batches"))
    assert command([*line, "--overwrite"]) == 2
    reported = "has no data: columns need build(rng), loss(model, *batch), data(rng, rank, size)"
    assert reported in capsys.readouterr().err
    assert command([*line, "--set", "drift=0.1"]) == 2
    assert "AverageAllPolicy takes no drift; its parameters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"loss": lambda model, x, y: model(x)},
            r"returned a tensor of shape \(16, 4\): return a tensor without",
        ),
        (
            {"loss": lambda model, x, y: 1.5},
            "returned a float: return a tensor without dimensions that depends",
        ),
        ({"loss": lambda model, x, y: torch.tensor(1.0)}, "which depends on no weight"),
        ({"score": lambda model: model(CENTRES)}, r"returned a tensor of shape \(4, 4\)"),
        ({"score": lambda model: (spread_of(model), spread_of(model))}, "returned several values"),
        ({"score": lambda model: 0.5}, "returned a float"),
        ({"data": lambda rng, rank, size: itertools.repeat(1.5)}, "rank 0 in iteration 0 is a float"),
        ({"data": lambda rng, rank, size: itertools.repeat(None)}, "rank 0 in iteration 0 is a NoneType"),
    ],
)
def test_what_functions_return_is_looked_at(given, words):
    """And told in words of theirs, before anything is trained."""
    with pytest.raises(UsageError, match=words):
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=training(**given))


def test_more_models_than_there_is_memory_for_are_refused():
    """Before they are built: rows that nobody has touched take none, so it would be noticed too late."""
    made = []

    def large(rng):
        made.append(nn.Linear(1000, 2000).to(DEVICE))
        return made[-1], torch.optim.Adam(made[-1].parameters())

    with pytest.raises(
        ParameterError,
        match=r"ranks=1,000,000: weights .* take 24,0\d\d GB; this (machine|GPU) has",
    ):
        columnar.run(AverageAllPolicy(4), ranks=10**6, iterations=9, training=training(build=large))
    assert len(made) == 1


def test_where_memory_is_too_small_fewer_are_computed_at_a_time(monkeypatch):
    """Steps and scores; each step counts once."""
    wanted = training(score=spread_of)
    columnar.run(AverageAllPolicy(4), ranks=20, iterations=7, training=wanted)
    sizes = limit_rows(monkeypatch, 3)
    found = training(score=spread_of)
    columnar.run(AverageAllPolicy(4), ranks=20, iterations=7, training=found)
    for rank in range(20):
        torch.testing.assert_close(
            vector(found.model(rank)), vector(wanted.model(rank)), rtol=1e-4, atol=1e-5
        )
    assert sizes[:6] == [1, 1, 20, 10, 5, 3] and set(sizes[6:]) <= {1, 2, 3}  # two rows are tried first
    limit_rows(monkeypatch, 0)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        columnar.run(AverageAllPolicy(4), ranks=20, iterations=7, training=training())


def test_a_buffer_that_ranks_share_is_refused():
    """Each rank of a chunk would train on the last one's batch."""
    buffer = torch.empty(16, 6)

    def sharing(rng, rank, size):
        for x, y in batches(rng, rank, size):
            yield buffer.copy_(x), y

    with pytest.raises(UsageError, match="batch of rank 0 in iteration 0 was overwritten"):
        columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=training(data=sharing))


def test_a_score_has_a_column_of_its_own():
    """Whatever its name is."""

    def rank(model):
        return spread_of(model)

    for score in (rank, lambda model: spread_of(model)):
        run = columnar.run(AverageAllPolicy(4), ranks=10, iterations=9, training=training(score=score))
        assert run.table["score"].shape == run.table["rank"].shape
        assert run.table["rank"].max() == 9
