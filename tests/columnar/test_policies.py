"""More policies over columns, held to the policies themselves on ordinary ranks."""

from functools import partial

import numpy as np
import pytest
import torch
from support.lockstep import Ripple, train_under

import spawnsim
from spawnsim import columnar
from spawnsim.cli import main as command
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.network import Hockney, Switch
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EASGDPolicy,
    Every,
    GossipPolicy,
    LowBit,
    OuterOptimizerPolicy,
    Perturb,
    SPARTAPolicy,
    StateScope,
    StreamingDiLoCoPolicy,
    TopK,
    graphs,
)
from spawnsim.policies import PopulationBasedTrainingPolicy as Population
from tests.columnar.test_columnar import (
    FREE,
    LOGGP,
    NODES,
    STRAGGLERS,
    assert_same,
    columns,
    decided,
    last_of,
    replaced_in_lockstep,
)
from tests.columnar.test_training import (
    assert_as_on_ordinary_ranks,
    assert_replaced_as_by_torch,
    built,
    half_spoilt,
    of_bias,
    on_ordinary_ranks,
    partly,
    spread_of,
    training,
    vector,
)


class Kept(Ripple):
    """Keep the numbers of a run over columns."""

    def begin(self, ranks, seed):
        """Return them, to be changed in place."""
        self.values = super().begin(ranks, seed)
        return self.values


def both(policy, ranks, *, numbers=300, iterations=9, alike=True, **how):
    """Run a policy on ordinary ranks, and over columns; hold clocks, traffic and models to each other."""
    how = {"ranks": ranks, "stragglers": STRAGGLERS, "seed": 5} | how
    main = lambda comm: train_under(policy, comm, Ripple(), iterations, numbers)  # noqa: E731
    ordinary, kept = spawnsim.run(main, **how), Kept()
    nbytes = -(-8 * numbers // 64) * 64  # as a message is laid out
    own = columns(policy(), iterations=iterations, model_nbytes=nbytes, quality=kept, **how)
    assert_same(own, ordinary, "none")
    if alike:
        np.testing.assert_allclose(kept.values, ordinary.table["quality"], atol=1e-9)
    return own


# --------------------------------------------------------------------------------------------------------------- gossip
def lopsided(size, round_, seed):
    """Return a graph that not all ranks take part in, with neighbours of unequal number."""
    near = [{(rank + step) % size for step in range(1, 1 + rank % 4)} for rank in range(size)]
    near = [
        {other for other in range(size) if other in near[rank] or rank in near[other]} - {rank}
        for rank in range(size)
    ]
    return graphs.metropolis(near)


GOSSIP = {
    "ring": (64, {}, {}),
    "ring, uneven": (37, {}, {}),
    "ring of two": (2, {}, {}),
    "alone": (1, {}, {}),
    "torus": (64, {"graph": graphs.torus}, {}),
    "torus, rendezvous": (36, {"graph": graphs.torus}, {"numbers": 20_000}),
    "exponential": (64, {"graph": graphs.exponential}, {}),
    "exponential, rendezvous": (37, {"graph": graphs.exponential}, {"numbers": 20_000}),
    "one peer": (64, {"graph": graphs.one_peer_exponential, "average_every": 2}, {}),
    "one peer, rendezvous": (37, {"graph": graphs.one_peer_exponential}, {"numbers": 20_000}),
    "SGP": (37, {"graph": graphs.one_peer_exponential, "push_sum": True}, {}),
    "pairs": (64, {"graph": graphs.random_pairs}, {"iterations": 20}),
    "pairs, uneven": (37, {"graph": graphs.random_pairs}, {"iterations": 20, "numbers": 8000}),
    "base": (37, {"graph": graphs.BaseGraph(2)}, {}),
    "complete": (37, {"graph": graphs.complete}, {}),
    "complete, rendezvous": (37, {"graph": graphs.complete}, {"numbers": 20_000}),
    "lopsided": (37, {"graph": lopsided}, {}),
    "PGA": (37, {"global_every": 3}, {"numbers": 304}),
    "PGA, power of two": (64, {"global_every": 2}, {"numbers": 20_000}),
    "nodes": (64, {}, {"platform": NODES, "numbers": 4000}),
    "nodes, rendezvous": (64, {"graph": graphs.torus}, {"platform": NODES, "numbers": 20_000}),
    "LogGP": (37, {"graph": graphs.exponential}, {"platform": LOGGP}),
    "LogGP, rendezvous": (37, {"graph": graphs.exponential}, {"platform": LOGGP, "numbers": 20_000}),
    "no contention": (37, {"graph": graphs.exponential}, {"platform": FREE, "numbers": 20_000}),
    "faults": (
        37, {"graph": graphs.torus}, {"faults": "pause:3@0.02s+0.1s; pause:20-25@0.06s+0.07s; slow:5-9@0s+1s,4"},
    ),
    "no time to compute": (37, {"graph": graphs.exponential}, {"compute": "2 us", "numbers": 8000, "iterations": 30}),
}  # fmt: skip


@pytest.mark.parametrize("name", GOSSIP)
def test_gossip_is_that_of_ordinary_ranks(name):
    """Clocks, messages, bytes and models."""
    ranks, given, how = GOSSIP[name]
    both(partial(GossipPolicy, **given), ranks, **how)


@pytest.mark.parametrize(
    ("given", "how", "ranks"),
    [
        ({"average_every": 4}, {}, 64),
        ({"average_every": 4, "graph": graphs.exponential}, {"optimizer": "adam"}, 37),
        ({"average_every": 2, "graph": graphs.one_peer_exponential, "push_sum": True}, {}, 12),
        ({"average_every": 3, "global_every": 2}, {"optimizer": "groups"}, 12),
    ],
    ids=["ring", "adam", "SGP", "PGA"],
)
def test_gossip_makes_the_models_of_ordinary_ranks(given, how, ranks):
    """Weights, losses, clocks and bytes."""
    assert_as_on_ordinary_ranks(training(**how), partial(GossipPolicy, **given), ranks)


def test_equal_models_stay_equal_under_gossip():
    """To the bit, as on ordinary ranks."""
    kept = Kept(step=0.0)
    kept.first = lambda rank: np.full(len(rank), 0.7)
    columns(GossipPolicy(), 37, iterations=5, model_nbytes=8, quality=kept)
    assert (kept.values == 0.7).all()


FIFO = Switch(Hockney(1e-5, 1e9), contention="fifo")


@pytest.mark.parametrize(
    ("policy", "how", "words"),
    [
        (GossipPolicy(push_sum=True, delay=1), {}, "with a delay"),
        (GossipPolicy(), {"platform": FIFO, "compute": 1}, "fifo"),
    ],
)
def test_gossip_without_a_form_over_columns_is_refused(policy, how, words):
    """By name."""
    with pytest.raises(UnsupportedError, match=words):
        columns(policy, 8, iterations=3, model_nbytes=8, **how)


# ------------------------------------------------------------------------------------------ population based training
@pytest.mark.parametrize("nbytes", [3000, 200_000])
@pytest.mark.parametrize(("ranks", "given"), [(64, {}), (37, {"quantile": 0.4, "mode": "min", "burn_in": 3})])
def test_a_population_in_lockstep_is_that_of_real_messages(ranks, given, nbytes):
    """Clocks, decisions, messages and bytes."""
    own, ordinary = replaced_in_lockstep(ranks, partial(Population, 2, **given), nbytes=nbytes, iterations=9)
    assert_same(own, ordinary, "taken")
    assert own.totals["replacements"] == len(decided(own)[0]) > 40


POPULATIONS = {
    "64 ranks": (64, {}, {}),
    "adam, uneven": (37, {"quantile": 0.4}, {"optimizer": "adam"}),
    "groups, drawn again": (
        37,
        {"explore": Perturb({"lr": lambda rng: 10 ** rng.uniform(-3, -1)}, resample=0.5), "burn_in": 5},
        {"optimizer": "groups"},
    ),
    "nothing explored": (20, {"explore": Perturb({}), "settings": ()}, {}),
    "not finite": (30, {}, {"data": half_spoilt, "score": of_bias, "optimizer": "adam"}),
}


@pytest.mark.parametrize("name", POPULATIONS)
def test_a_population_makes_the_models_of_plain_torch_and_the_policy_itself(name):
    """Weights, state and learning rates: each replaced rank trains on with its own."""
    ranks, given, how = POPULATIONS[name]
    policy = Population(4, **given)
    _, replaced = assert_replaced_as_by_torch(training(**{"score": spread_of} | how), policy, ranks, 23)
    assert replaced >= 20


def test_rows_contain_the_learning_rates_of_a_population():
    """In both directions, by the policy's factors."""
    how = training(build=partial(built, spread=0.0))
    rates = last_of(columns(Population(2), 30, iterations=9, training=how), "lr")
    assert {0.1} < {*rates.round(12).tolist()}
    assert rates.min() < 0.1 < rates.max()


@pytest.mark.parametrize("explore", [Perturb({"momentum": None}), lambda model, optimizer, rng: None])
def test_a_population_may_vary_learning_rates_alone(explore):
    """Other settings do not differ from row to row."""
    with pytest.raises(UnsupportedError, match="explore cannot run: give a Perturb of the learning rate"):
        columns(Population(2, explore=explore, settings=()), 8, iterations=3, training=training())


# ------------------------------------------------------------------------------------------------------ global weights
ELASTIC = {
    "EASGD": (64, partial(EASGDPolicy, 2), {}),
    "EASGD in every iteration": (37, partial(EASGDPolicy, 1, moving_rate=0.3), {"numbers": 20_000}),
    "EASGD on nodes": (37, partial(EASGDPolicy, 2), {"platform": NODES}),
    # None knows whether the weight that stands for all is among the averaged ones. The rest is 0.
    "SPARTA": (64, partial(SPARTAPolicy, 2, share=0.25), {"alike": False}),
    "SPARTA on nodes": (64, partial(SPARTAPolicy, 1, share=0.01), {"alike": False, "platform": NODES}),
}


@pytest.mark.parametrize("name", ELASTIC)
def test_elastic_and_sparse_averages_take_as_long_as_on_ordinary_ranks(name):
    """Clocks, messages, bytes; numbers."""
    ranks, policy, how = ELASTIC[name]
    both(policy, ranks, **{"numbers": 304} | how)


SHARED = {
    "EASGD": (64, partial(EASGDPolicy, 4), {}),
    "EASGD, adam": (37, partial(EASGDPolicy, 4, moving_rate=0.5), {"optimizer": "adam"}),
    "EASGD, not finite": (12, partial(EASGDPolicy, 4), {"data": half_spoilt, "optimizer": "adam"}),
    "EASGD, state begun anew": (
        12, partial(EASGDPolicy, 4, travels=StateScope(frozen=False, optimizer_state="reset")), {},
    ),
    "EASGD, compressed": (37, partial(EASGDPolicy, 4, compression="uniform8"), {"optimizer": "groups"}),
    "DiLoCo, compressed": (64, partial(OuterOptimizerPolicy, 4, compression="float16"), {}),
    "SparseLoCo": (
        37, partial(OuterOptimizerPolicy.sparseloco, 4, compression=TopK(32, 4, LowBit(2))), {"optimizer": "groups"},
    ),
    "DeMo": (12, partial(OuterOptimizerPolicy.demo, 0.01, chunk=16, keep=4), {"optimizer": "plain"}),
    "streaming": (64, partial(StreamingDiLoCoPolicy, 4, fragments=2), {}),
    "streaming, at once": (
        37,
        partial(StreamingDiLoCoPolicy, 4, fragments=2, overlap=0, blend=0.0, compression="none"),
        {"optimizer": "adam"},
    ),
    "streaming, several under way": (
        37, partial(StreamingDiLoCoPolicy, 4, fragments=2, overlap=3, compression="none"), {"optimizer": "groups"},
    ),
    "streaming of one fragment": (12, partial(StreamingDiLoCoPolicy, 3, fragments=1, overlap=2), {}),
    "SPARTA": (64, SPARTAPolicy, {}),
    "SPARTA, groups": (37, partial(SPARTAPolicy, 2, share=0.3), {"optimizer": "groups"}),
    "SPARTA, a frozen layer": (37, partial(SPARTAPolicy, 2, share=0.3), {"build": partly}),
    "SPARTA of all": (12, partial(SPARTAPolicy, 3, share=1.0), {}),
    "SPARTA, alone": (1, SPARTAPolicy, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_elastic_and_sparse_averages_make_the_models_of_ordinary_ranks(name):
    """Weights, losses, clocks and bytes."""
    ranks, policy, how = SHARED[name]
    assert_as_on_ordinary_ranks(training(**how), policy, ranks)


# ------------------------------------------------------------------------------------------------------------- in turn
class Both:
    """What an ordinary program does: it calls one policy after the other."""

    def __init__(self, *policies):
        self.policies = policies

    def __call__(self, iteration, model, optimizer, metric, comm):
        """Call them."""
        info = {}
        for policy in self.policies:
            model, optimizer, info = policy(iteration, model, optimizer, metric, comm)
        return model, optimizer, info

    def shutdown(self):
        """Shut them down."""
        for policy in self.policies:
            policy.shutdown()


@pytest.mark.parametrize("ranks", [37, 64])
def test_policies_in_turn_are_those_of_a_program_that_calls_each(ranks):
    """Weights, losses, clocks and bytes."""

    def policies():
        return GossipPolicy(2, graph=graphs.exponential), AverageAllPolicy(6), EASGDPolicy(4)

    how, world = training(), {"ranks": ranks, "stragglers": STRAGGLERS, "seed": 5}
    ordinary, models = on_ordinary_ranks(how, lambda: Both(*policies()), iterations=19, **world)
    own = columns(columnar.InTurn(*policies()), iterations=19, training=how, **world)
    assert_same(own, ordinary, "none")
    for rank, model in enumerate(models):
        torch.testing.assert_close(vector(how.model(rank)), model, rtol=1e-4, atol=1e-5)
    assert own.what["parameters"]["policy"] == "Gossip + AverageAll + EASGD"


def test_a_mean_follows_replacement():
    """In the same iteration; the decision is that of replacement alone, whose models are averaged."""
    alone, both, seen = training(), training(), []
    world = {"ranks": 37, "iterations": 5, "seed": 3, "stragglers": STRAGGLERS}
    select = partial(AsyncSelectiveAveragingPolicy, None, 4, donors=2)
    wanted = columns(select(), training=alone, **world)
    average = AverageAllPolicy(1, cadence=Every(4))
    own = columns(columnar.InTurn(select(), average), training=both, on_round=seen.append, **world)
    assert decided(own) == decided(wanted)
    assert [each.iteration for each in seen] == [4]
    for rank in range(37):
        torch.testing.assert_close(vector(both.model(rank)), vector(alone.model()), rtol=1e-4, atol=1e-5)
    # The mean: one comparison of layouts, one of digests, one sum of the model.
    assert own.totals["bytes"] > wanted.totals["bytes"]


def test_ranks_that_train_alone_exchange_nothing():
    """They report; clocks, models and losses are those of a program without a policy."""
    how, world, seen = training(), {"ranks": 37, "stragglers": STRAGGLERS, "seed": 5}, []
    own = columns(columnar.InTurn(report_every=5), iterations=19, training=how, on_round=seen.append, **world)
    ordinary, models = on_ordinary_ranks(how, Both, iterations=19, **world)
    assert_same(own, ordinary, "none")
    assert (own.totals["messages"], own.what["parameters"]["policy"]) == (0, "none")
    assert [each.iteration for each in seen] == [5, 10, 15]
    for rank, model in enumerate(models):
        torch.testing.assert_close(vector(how.model(rank)), model, rtol=1e-4, atol=1e-5)


def test_arguments_of_policies_in_turn():
    """Policies, at most one of which replaces."""
    with pytest.raises(ParameterError, match="give policies"):
        columnar.InTurn([GossipPolicy()])
    two = [AsyncSelectiveAveragingPolicy(None, 4), Population(4)]
    with pytest.raises(UnsupportedError, match="two policies that replace"):
        columns(columnar.InTurn(*two), 8, iterations=3, model_nbytes=8)


# --------------------------------------------------------------------------------------------------- the command line
@pytest.mark.parametrize(
    "words",
    [
        "gossip graph=torus",
        "gossip global_every=2",
        "population quantile=0.3",
        "easgd moving_rate=0.5",
        "sparta share=0.1",
    ],
)
def test_policies_from_the_command_line(words, tmp_path, capsys):
    """With their own parameters."""
    policy, setting = words.split()
    line = ["columnar", policy, "-n", "40", "--set", "iterations=5", "--model", "1 kB", "--set", setting]
    assert command([*line, "--out", str(tmp_path / "run"), "--quiet"]) == 0
    run = spawnsim.Run.load(tmp_path / "run")
    assert sum(event["kind"] == "round" for event in run.events) == 5
    name, _, value = setting.replace("average", "report" if policy == "none" else "average").partition("=")
    assert str(run.what["parameters"][name]) == value
    capsys.readouterr()
    assert command(["columnar", "gossip", "-n", "4", "--set", "graph=star"]) == 2
    assert "graph='star': choose one of ring, torus" in capsys.readouterr().err
