"""Columns against ordinary virtual ranks: the same clocks to 1e-9 s, the same decisions."""

from functools import partial

import numpy as np
import pytest
from support.lockstep import Ripple, train_in_lockstep, train_under

import spawnsim
from spawnsim import columnar, random
from spawnsim.cli import main as command
from spawnsim.columnar import durations, meetings, transfers
from spawnsim.errors import ParameterError, UnsupportedError, UsageError
from spawnsim.models.collectives import Selection, finish
from spawnsim.models.compute import ComputeModel, Fixed, parse_stragglers
from spawnsim.models.faults import FaultPlan
from spawnsim.models.network import Changing, Hockney, LogGP, Nodes, Switch
from spawnsim.models.network.changing import PoissonFlows
from spawnsim.models.platform import Platform
from spawnsim.plots import experiments
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    Every,
    ExchangeOptions,
    Neighbours,
    OuterOptimizerPolicy,
    StateScope,
    WorstRatio,
)
from spawnsim.policies.rules import donors as donor_rules

STRAGGLERS = "lognormal:0.3+slow:0.05,3+speed:0.2"
EQUAL_S = 1e-9
NODES = Platform(
    "nodes", Nodes(Hockney(1e-6, 1e10), Hockney(1e-5, 1.25e9), 8, gamma_s_per_B=1e-10), step=Fixed(0.01)
)
LOGGP = Platform("loggp", Switch(LogGP(5e-6, 2e-6, 3e-6, 1e-9)), step=Fixed(0.01))
UNSTEADY = Switch(Changing(Hockney(1e-5, 1.25e9), background=(PoissonFlows(90.0, 0.01),)))
CHANGING = Platform("changing", UNSTEADY, step=Fixed(0.01))
FREE = Platform("none", Switch(Hockney(1e-5, 1.25e9), contention="none"), step=Fixed(0.01))
OPENMPI = Platform(
    "openmpi", Switch(Hockney(1e-5, 1.25e9)), step=Fixed(0.01), collectives=Selection("openmpi")
)
Selective = partial(AsyncSelectiveAveragingPolicy, None)


def columns(policy, ranks, **how):
    """Run over columns; every rank is recorded."""
    return columnar.run(policy, ranks=ranks, sample=ranks, **how)


def decided(run, kind="replacement"):
    """Return what was decided: by round and rank, the donors and, apart, their weights."""
    events = [event for event in run.events if event["kind"] == kind]
    keys = [(event.get("round", event["iteration"]), event["rank"]) for event in events]
    assert len(set(keys)) == len(keys)
    who = {key: event["donors"] for key, event in zip(keys, events, strict=True)}
    return who, {key: event["weights"] for key, event in zip(keys, events, strict=True)}


def assert_decided_alike(own, other):
    """The same ranks in the same rounds, by the same donors, with the same weights but for rounding."""
    (who, weights), (wanted, wanted_weights) = own, other
    assert who == wanted
    for key, each in weights.items():
        assert each == pytest.approx(wanted_weights[key], abs=1e-12)


def last_of(run, name):
    """Return a column's last value, by rank."""
    rank = run.table["rank"]
    return run.table[name][np.r_[rank[1:] != rank[:-1], True]]


def assert_same(own, other, kind):
    """Clocks, decisions, traffic and models are equal."""
    assert np.abs(last_of(own, "time_s") - other.table["ended_s"]).max() <= EQUAL_S
    assert_decided_alike(decided(own), decided(other, kind))
    assert [own.totals[name] for name in ("messages", "bytes")] == [
        other.totals[name] for name in ("messages", "bytes")
    ]


# ------------------------------------------------------------------------------------------------ averaging in step
def averaged(ranks, numbers=300, iterations=7, step=0.3, **how):
    """Run the library's own policy on ordinary ranks, and over columns."""
    ripple, policy = (
        Ripple(step),
        partial(AverageAllPolicy, how.pop("every", 2), momentum=how.pop("momentum", 0.0)),
    )
    how = {"ranks": ranks, "stragglers": STRAGGLERS, "seed": 5} | how
    main = lambda comm: train_under(policy, comm, ripple, iterations, numbers)  # noqa: E731
    ordinary = spawnsim.run(main, **how)
    return columns(policy(), iterations=iterations, model_nbytes=8 * numbers, quality=ripple, **how), ordinary


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (1000, {"iterations": 5}),
        (37, {"numbers": 20_000, "momentum": 0.4}),
        (37, {"step": 0.0, "every": 1}),  # equal models from the first averaging on: compared, and not summed
        (64, {"platform": NODES}),
        (37, {"platform": LOGGP, "faults": "pause:3@0.02s+0.1s; slow:5@0s+1s,4"}),
        (37, {"platform": OPENMPI, "numbers": 4000}),
        (12, {"stragglers": "markov:20ms,10ms,3+bimodal:0.1,4", "iterations": 30}),
        (37, {"platform": CHANGING, "numbers": 4000}),
    ],
    ids=["1000", "momentum", "equal models", "nodes", "LogGP and faults", "Open MPI", "episodes", "changing"],
)
def test_averaging_takes_as_long_as_on_ordinary_ranks(ranks, how):
    """The clocks of `AverageAllPolicy` itself, first agreement and comparisons included."""
    own, ordinary = averaged(ranks, **how)
    assert_same(own, ordinary, "none")
    due = own.table["local_metric"][own.table["rank"] == 0]
    assert len(due) >= 3  # it did meet


def test_averaging_without_its_comparison_would_be_noticed(monkeypatch):
    """The comparison of 37 ranks takes some microseconds; 1e-9 s tells."""
    monkeypatch.setattr(meetings, "DIGEST_NBYTES", 4096)
    own, ordinary = averaged(37)
    with pytest.raises(AssertionError):
        assert_same(own, ordinary, "none")


# ------------------------------------------------------------------------------------ selective replacement, lockstep
def replaced_in_lockstep(ranks, policy, nbytes=5000, iterations=7, nan_at=(), step=0.3, **how):
    """Run the policy's rules in rounds of real messages on ordinary ranks, and over columns."""
    ripple = Ripple(step, nan_at=nan_at)
    how = {"ranks": ranks, "stragglers": STRAGGLERS, "seed": 5} | how
    main = lambda comm: train_in_lockstep(policy(), comm, ripple, iterations=iterations, nbytes=nbytes)  # noqa: E731
    ordinary = spawnsim.run(main, **how)
    return columns(policy(), iterations=iterations, model_nbytes=nbytes, quality=ripple, **how), ordinary


CASES = {
    "1000, eager": (1000, {"replacement_ratio": 0.1}, {"nbytes": 3000, "iterations": 5}),
    "1000, rendezvous": (1000, {"replacement_ratio": 0.05}, {"nbytes": 70_000, "iterations": 5}),
    "1000, one donor for all": (
        1000,
        {"averaging_strategy": "best_only", "replacement_ratio": 0.5},
        {"iterations": 5},
    ),
    "weights, momentum": (37, {"averaging_strategy": "weighted_mean", "donors": 3, "momentum": 0.3}, {}),
    "best of three": (37, {"averaging_strategy": "best_only", "donors": 3}, {"nbytes": 200_000}),
    "all donors": (37, {"donors": 1.0, "mode": "min"}, {"nbytes": 200_000}),
    "threshold": (37, {"replacement_mode": "threshold", "threshold": -1.0}, {"nan_at": (4, 30)}),
    "ratio behind a threshold": (37, {"threshold": -2.9, "cooldown": 3}, {"iterations": 14}),
    "age": (37, {"replacement_mode": "age", "age_range": (5, 9)}, {"iterations": 40}),
    "NaN left out": (37, {"nan_policy": "exclude"}, {"nan_at": (4, 30)}),
    "coordinator": (37, {"wiring": ExchangeOptions(coordinator=11)}, {"nbytes": 200_000}),
    "nodes": (100, {}, {"platform": NODES, "nbytes": 5000}),
    "nodes, rendezvous": (100, {}, {"platform": NODES, "nbytes": 200_000}),
    "LogGP": (37, {}, {"platform": LOGGP}),
    "LogGP, rendezvous": (37, {}, {"platform": LOGGP, "nbytes": 200_000}),
    "no contention": (37, {"averaging_strategy": "best_only"}, {"platform": FREE, "nbytes": 200_000}),
    "faults": (37, {}, {"faults": "pause:3@0.02s+0.1s; pause:20-25@0.06s+0.07s; slow:5-9@0s+1s,4"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rounds_in_lockstep_are_those_of_real_messages(case):
    """Clocks, decisions, weights, messages and bytes of the same rounds in real messages."""
    ranks, parameters, how = case
    own, ordinary = replaced_in_lockstep(ranks, partial(Selective, 2, **parameters), **how)
    assert_same(own, ordinary, "taken")
    assert own.totals["replacements"] == len(decided(own)[0]) > 0


@pytest.mark.parametrize(
    ("where", "name", "changed"),
    [
        (transfers.__name__, "admitted", lambda arrived, drain_s, booked: arrived),
        (transfers.__name__, "HEADER_NBYTES", 128),
        (durations.__name__, "_times", lambda factors: lambda seconds, begins_s: seconds),
    ],
    ids=["NIC", "length of an ask", "persistent stragglers"],
)
def test_a_changed_rule_is_noticed(where, name, changed, monkeypatch):
    """What the comparison is worth: each change of a rule fails it."""
    monkeypatch.setattr(f"{where}.{name}", changed)
    own, ordinary = replaced_in_lockstep(37, partial(Selective, 2), nbytes=200_000, step=0.0)  # with ties
    with pytest.raises(AssertionError):
        assert_same(own, ordinary, "taken")


# --------------------------------------------------------------------------------- decisions, against the policy itself
@pytest.mark.parametrize(
    ("ranks", "parameters"),
    [
        (300, {"replacement_ratio": 0.05}),
        (37, {"averaging_strategy": "weighted_mean", "donors": 4}),
        (37, {"averaging_strategy": "best_only", "momentum": 0.2}),
        (37, {"replacement_mode": "threshold", "threshold": 1.4}),
    ],
    ids=["300", "weights", "best", "threshold"],
)
def test_the_asynchronous_policy_decides_alike_on_the_same_reports(ranks, parameters):
    """Real models on ordinary ranks, no lockstep: who, by whom, in which round, how much.

    What is reported is equal in both modes here: rounds are far enough apart for all to be through with the last one,
    and what the metric moves by is in no model, so that it does not matter when one is taken over.
    """
    policy, ripple, iterations = partial(Selective, 10, **parameters), Ripple(0.0, swing=0.6), 29
    how = {"ranks": ranks, "stragglers": "lognormal:0.05", "seed": 8}
    main = lambda comm: train_under(policy, comm, ripple, iterations, 1)  # noqa: E731
    ordinary = spawnsim.run(main, **how)
    rounds: dict[int, list[int]] = {}

    def reported(each):
        rounds[each.iteration] = each.decision.replaced.tolist()

    own = columns(policy(), iterations=iterations, model_nbytes=8, quality=ripple, on_round=reported, **how)
    wanted = {event["round"]: event["replaced"] for event in ordinary.events if event["kind"] == "decision"}
    assert rounds == wanted
    assert list(wanted) == [10, 20]
    assert wanted[10]
    assert_decided_alike(decided(own), decided(ordinary))


# --------------------------------------------------------------------------------------------------- rules over columns
class AnyOne(donor_rules.DonorRule):
    """A rule of the program's own, which says nothing of how many donors it chooses."""

    def __call__(self, rank, candidates, rng):
        """Choose any."""
        return [candidates[int(rng.integers(len(candidates)))].rank]

    def columns(self, metrics, replaced, rng):
        """Return one place for each replaced rank."""
        return rng.integers(0, len(metrics), (replaced, 1))


def test_a_donor_rule_of_ones_own(monkeypatch):
    """It needs a method `columns` alone; too many donors are told of, whoever chooses them."""
    run = columnar.run(Selective(2, donors=AnyOne()), ranks=100_000, iterations=5, model_nbytes=99)
    assert run.totals["replacements"] == 40_000
    assert run.what["parameters"]["donors"] == "AnyOne"
    every = AnyOne()
    every.columns = lambda metrics, replaced, rng: np.tile(np.arange(len(metrics)), (replaced, 1))
    monkeypatch.setattr(donor_rules, "MOST_EDGES", 1_000)
    with pytest.raises(UsageError, match=r"20 replaced ranks with 80 donors each .* give a number of donors"):
        columnar.run(Selective(2, donors=every), ranks=100, iterations=5, model_nbytes=99)


def test_random_subsets_are_equally_likely():
    """Each of the ten pairs left out comes as often as any other."""
    drawn = donor_rules.subsets(np.random.default_rng(1), 5, 3, 60_000)
    assert (np.diff(drawn, axis=1) > 0).all()
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 10
    assert np.abs(counts / 6000 - 1).max() < 0.06


# --------------------------------------------------------------------------------------------------- draws, and deaths
@pytest.mark.parametrize("seed", [0, 5, 2**32 + 7, 2**70 + 3, 2**127])
@pytest.mark.parametrize("purpose", ["compute.lognormal.0", "age"])
def test_streams_made_for_many_ranks_are_those_of_each(seed, purpose, monkeypatch):
    """Numpy's own seed sequence and generator, also across what is made at once."""
    monkeypatch.setattr(random, "_AT_ONCE", 16)
    for rank, stream in enumerate(random.generators(seed, 40, purpose)):
        own = random.generator(seed, rank, purpose)
        assert stream.bit_generator.state == own.bit_generator.state
        assert stream.integers(1 << 31, size=3).tolist() == own.integers(1 << 31, size=3).tolist()
    assert rank == 39


@pytest.mark.parametrize("share", [0.05, 0.3, 1 / 3, 0.7, 1.0, 0.0])
def test_persistent_stragglers_are_those_of_ordinary_ranks(share):
    """Also where a share is no whole number of neighbours."""
    model = ComputeModel(Fixed(1.0), parse_stragglers(f"slow:{share},4"))
    for ranks in (1, 7, 200):
        found = durations.Durations(model, FaultPlan(), ranks, blocks=1, seed=4, streams="ranks").ends(
            np.zeros(ranks)
        )
        assert found.tolist() == [model.open(4, rank)(None, 0.0) for rank in range(ranks)]


@pytest.mark.parametrize(
    "text", ["lognormal:0.3", "exponential:0.5", "gamma:0.4", "slow:0.07,5", "speed:0.3", "rank:7,3"]
)
def test_bulk_draws_have_the_same_distribution(text):
    """Mean and quantiles of both ways to draw."""
    model, ranks = ComputeModel(Fixed(1.0), parse_stragglers(text)), 4000

    def drawn(streams):
        found = durations.Durations(model, FaultPlan(), ranks, blocks=4, seed=2, streams=streams)
        return np.concatenate([found.ends(np.zeros(ranks)) for _ in range(4)])

    own, bulk = drawn("ranks"), drawn("bulk")
    assert own.mean() == pytest.approx(bulk.mean(), rel=0.02)
    quantiles = [0.01, 0.1, 0.5, 0.9]
    assert np.quantile(own, quantiles) == pytest.approx(np.quantile(bulk, quantiles), rel=0.05)
    assert own.max() == pytest.approx(bulk.max(), rel=0.4)


def test_the_dead_leave_the_group_and_the_others_wait_until_it_is_noticed():
    """The smaller group agrees anew, and meets among its own."""
    rounds, ranks, dead = [], 50, [3, 17]
    policy = AverageAllPolicy(1, cadence=None)
    run = columnar.run(
        policy, ranks=ranks, iterations=3, model_nbytes=1000, compute=1.0, seed=1, detection_s=0.25, sample=ranks,
        faults="crash:3@1.5s; crash:17@1.5s", platform=NODES, on_round=rounds.append,
    )  # fmt: skip
    assert [len(each.members) for each in rounds] == [50, 48, 48]
    assert [each.died.tolist() for each in rounds] == [[], dead, []]
    members = rounds[1].members
    assert set(members.tolist()) == set(range(ranks)) - set(dead)
    times = rounds[0].left_s[members] + 1.0
    times = np.full(48, times.max() + 0.25)
    for operation, nbytes in (("allgather", 16), ("allreduce", 16), ("allreduce", 1000)):
        times = finish(operation, times, nbytes, network=NODES.network, ranks=members).times
    # The third round's arrivals are those that the second left, and a second more.
    assert rounds[2].entered_s == pytest.approx(times + 1.0, abs=EQUAL_S)
    assert [(event["rank"], event["time_s"]) for event in run.events if event["kind"] == "crash"] == [
        (3, 1.5),
        (17, 1.5),
    ]


def test_failures_come_as_often_as_their_mean_time_says():
    """After half the mean time, exp(-1/2) are alive."""
    alive = []
    columnar.run(
        Selective(10), ranks=20_000, iterations=101, model_nbytes=1000, compute=0.1, mtbf_s=20.0, streams="bulk",
        on_round=lambda reported: alive.append(len(reported.members)),
    )  # fmt: skip
    assert alive[-1] / 20_000 == pytest.approx(np.exp(-0.5), abs=0.02)
    assert alive == sorted(alive, reverse=True)


def test_a_coordinator_that_dies_is_followed_by_the_last_rank():
    """As in the policy, where a group has become smaller."""
    rounds = []
    run = columns(
        Selective(1),
        20,
        iterations=4,
        model_nbytes=100,
        compute=1.0,
        faults="crash:0-18@2.5s",
        on_round=rounds.append,
    )
    assert run.totals["deaths"] == 19
    assert [len(each.decision.replaced) for each in rounds] == [4, 4, 0, 0]
    assert rounds[-1].members.tolist() == [19]


# -------------------------------------------------------------------------------------------- refused, and written
BY_DTYPE = Switch(Hockney(1e-5, 1e9), gamma_s_per_B=1e-10, gamma_of=(("bfloat16", 2e-10),))


class _Own(AverageAllPolicy):
    def act(self, *args):
        return super().act(*args)


@pytest.mark.parametrize(
    ("policy", "how", "word"),
    [
        (DecentralizedAveragingPolicy(10), {}, "DecentralizedAveragingPolicy has no form"),
        (_Own(1), {}, "_Own has no form"),
        (Selective(1, donors=Neighbours({})), {}, "donors=Neighbours"),
        (Selective(1, mixing=len), {}, "mixing=len"),
        (Selective(1, explore=print), {}, "explore"),
        (Selective(1, compression="float16"), {}, "model_nbytes as they travel"),
        (Selective(1, wiring=ExchangeOptions(quorum=0.5)), {}, "a quorum"),
        (Selective(1), {"platform": Switch(Hockney(1e-5, 1e9), contention="fifo"), "compute": 1}, "fifo"),
        (Selective(1), {"platform": CHANGING}, "change with time"),
        (AverageAllPolicy(1), {"platform": BY_DTYPE, "compute": 1}, "a speed for each dtype"),
        (Selective(1), {"faults": "drop:0>1@1s"}, "'drop'"),
        (Selective(1), {"stragglers": "markov:1s,1s,2", "streams": "bulk"}, "--set streams=ranks"),
        (Selective(1), {"platform": NODES.network}, "states no duration"),
        (
            AverageAllPolicy(1),
            {"ranks": 40_000, "platform": OPENMPI, "model_nbytes": 10**6},
            'allreduce = "raben',
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_form_over_columns_is_refused_by_name(policy, how, word):
    """One line: what it is, and what to do."""
    with pytest.raises(UnsupportedError, match=word.replace("(", r"\(")):
        columnar.run(policy, **{"ranks": 10, "iterations": 2, "model_nbytes": 100} | how)


def test_too_many_factors_are_refused_before_they_are_drawn():
    """Instead of 8 GB."""
    with pytest.raises(ParameterError, match="streams=bulk"):
        columnar.run(Selective(1), ranks=10**6, iterations=1000, model_nbytes=8, stragglers="lognormal:1")


def test_a_run_folder_can_be_read_and_drawn(tmp_path, capsys):
    """The command writes what `spawnsim plot` opens."""
    out = tmp_path / "run"
    given = ["columnar", "selective", "--ranks", "3000", "--model", "1 MB", "--straggler", "lognormal:0.2"]
    for setting in ("average_every=5", "iterations=30", "streams=bulk", "sample=40", "mtbf=20s"):
        given += ["--set", setting]
    given += ["--out", str(out)]
    assert command(given) == 0
    printed = capsys.readouterr().out
    assert "replacements" in printed
    run = spawnsim.Run.load(out)
    assert run.totals["ranks"] == 3000
    assert np.unique(run.table["rank"]).size == 40
    assert run.what["columnar"]
    found = [event for event in run.events if event["kind"] == "sampled_replacement"]
    assert 0 < len(found) < run.totals["replacements"]
    assert sum(event["kind"] == "round" for event in run.events) == 5
    assert command(["plot", str(out), "--out", str(tmp_path / "figures")]) == 0
    # A sample's replacements are not drawn as if they were all; where all ranks are recorded they are.
    assert {path.stem.split("-")[0] for path in (tmp_path / "figures").iterdir()} == {
        "convergence",
        "diversity",
        "time",
    }
    whole = columns(Selective(1), 60, iterations=4, model_nbytes=99)
    assert len(decided(whole)[0]) == whole.totals["replacements"] > 0
    assert command(given) == 2  # the folder is not lost by accident


def test_a_run_says_what_its_policy_was_made_of():
    """Neither counters nor addresses: equal runs say the same. Figures name the policy, not all that it has."""
    policies = Selective(2), AverageAllPolicy(2), Selective(2)
    circumstances = {"ranks": 60, "iterations": 4, "model_nbytes": 99, "sample": 20}
    *runs, again = [columnar.run(policy, **circumstances) for policy in policies]
    assert {**runs[0].what, "made": 0} == {**again.what, "made": 0}
    assert runs[0].what["quality"] == {"type": "RandomWalk", "spread": 1.0, "gain": 0.01, "drift": 0.05}
    assert runs[1].what["parameters"] == {
        "policy": "AverageAll",
        "average_every": 2,
        "momentum": 0.0,
        "travels": None,
        "cadence": None,
        "guard": True,
    }
    found = experiments.grouped(runs)
    assert [group.label for group in found] == ["AsyncSelectiveAveraging", "AverageAll"]
    assert (found.by, found.caption().split("\n")[0]) == (
        " by policy", "columnar · 60 virtual ranks · rows of 20 of them · seed 0"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policies", "labels"),
    [
        (lambda: [Selective(2, donors=count) for count in (1, 3)], ["donors Uniform 1", "donors Uniform 3"]),
        (lambda: [OuterOptimizerPolicy(2, lr=lr) for lr in (0.3, 1.0)], ["lr 0.3", "lr 1"]),
        (lambda: [Selective(2, rule=rule) for rule in ("replace", "delta")], ["rule replace", "rule delta"]),
        (
            lambda: [Selective(2, selection=WorstRatio(ratio)) for ratio in (0.1, 0.5)],
            ["selection WorstRatio 0.1 max None", "selection WorstRatio 0.5 max None"],
        ),
        (
            lambda: [AverageAllPolicy(2, cadence=each) for each in (None, Every(2, start=1), Every(2))],
            ["cadence None", "cadence Every 2 1 False", "cadence Every 2 0 False"],
        ),
        (
            lambda: [AverageAllPolicy(2, travels=StateScope(buffers=each)) for each in (True, False)],
            ["travels None", "travels StateScope True False keep …"],
        ),
    ],
)
def test_figures_tell_policies_apart_by_all_they_were_made_of(policies, labels):
    """Runs whose policies differ in anything are not taken for seeds of one."""
    runs = [columnar.run(each, ranks=30, iterations=4, model_nbytes=99) for each in policies()]
    assert [group.label for group in experiments.grouped(runs)] == labels


def test_equal_seeds_give_equal_runs():
    """By digest; other draws are another run."""

    def digest(seed, **how):
        found = columnar.run(
            Selective(2), ranks=500, iterations=9, model_nbytes=99, seed=seed, stragglers=STRAGGLERS, **how
        )
        return found.totals["digest"]

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)
    assert digest(1, streams="bulk") == digest(1, streams="bulk") != digest(1)
