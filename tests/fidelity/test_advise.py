"""Advice: goodputs follow closed forms, the measured clusters rank as they should, ties and bad input are named."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spawnsim import columnar
from spawnsim.cli import advise as advise_command
from spawnsim.cli import main
from spawnsim.errors import ParameterError
from spawnsim.fidelity import goodput
from spawnsim.fidelity.advising import Advice, Budget, Row, _accuracies, advise, by_time, converge, report
from spawnsim.fidelity.goodput import STEADY, WORSE, Case, Choice, Failures, other_costs, simulate
from spawnsim.models.collectives import Selection
from spawnsim.models.compute import Lognormal, Slow, SlowRank, Speed, parse_stragglers
from spawnsim.models.faults import rates
from spawnsim.models.network import BandwidthTrace, Changing, Hockney, LogGP, Nodes, Switch, Tcp
from spawnsim.models.network.changing import Constant
from spawnsim.models.platform import Platform, load_platform
from spawnsim.policies import AverageAllPolicy

STUDIES = Path(__file__).parents[2] / "studies"
RING = Selection(fixed=(("allreduce", "ring"),))
SLOW_LINK = Platform("slow", Switch(Hockney(1e-6, 1e8)), collectives=RING)
CASE = Case(SLOW_LINK, 12, 100_000_000, 0.1)


def test_averaging_follows_its_closed_form() -> None:
    """Of twelve ranks by a ring: bytes over bandwidth, and the failures' share."""
    exchange_s = 2 * 11 / 12 * 1e8 / 1e8
    for every in (1, 10, 100):
        found = simulate(CASE, Choice("average", every), 0)
        assert found.exchange_s == pytest.approx(exchange_s, rel=0.01)
        assert found.utilisation == pytest.approx(every * 0.1 / (every * 0.1 + exchange_s), rel=0.01)
        assert found.goodput == pytest.approx(found.utilisation)
        assert found.nbytes == pytest.approx(2 * 11 / 12 * 1e8 / every, rel=0.01)
    assert simulate(CASE, Choice("average", 10, 4.0), 0).exchange_s == pytest.approx(exchange_s / 4, rel=0.01)
    failing = replace(CASE, failures=Failures(mtbf_s=1e5, detection_s=20.0, restart_s=50.0))
    round_s = 1.0 + exchange_s
    expected = 1.0 / round_s / (1 + (round_s / 2 + 50 + 12 * 20) / 1e5)
    assert simulate(failing, Choice("average", 10), 0).goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("every", [1, 8, 32])
def test_fragments_follow_their_closed_form(every: int) -> None:
    """By a ring: each of 4 fragments' bytes over bandwidth, less the steps until it is used."""
    found = simulate(CASE, Choice("streaming", every), 0)
    ring_s = 2 * 11 / 12 * 1e8 / 1e8
    count, overlap = {1: (1, 0), 8: (4, 2), 32: (4, 5)}[every]
    assert found.exchange_s == pytest.approx(
        count * max(ring_s / count - overlap * 0.1, 0.0), rel=0.01, abs=1e-6
    )
    assert found.goodput == pytest.approx(every * 0.1 / (every * 0.1 + found.exchange_s))
    assert found.nbytes == pytest.approx(2 * 11 / 12 * 1e8 / every, rel=0.01)
    assert found.every == every
    assert [goodput.fragments(*each) for each in ((6, 9), (7, 9), (8, 2), (128, 1))] == [3, 1, 2, 1]


def test_neighbours_follow_their_closed_form() -> None:
    """A model to one rank and another from one, whatever their number: latency, and bytes over bandwidth."""
    for ranks, ratio in ((12, 1.0), (33, 4.0)):
        found = simulate(replace(CASE, ranks=ranks), Choice("gossip", 8, ratio), 0)
        assert found.exchange_s == pytest.approx(1.0 / ratio, rel=1e-4)
        assert found.nbytes == pytest.approx(1e8 / ratio / 8)
        assert found.every == 8


@pytest.mark.parametrize("every", [1, 32, 200])
def test_a_server_follows_its_closed_form(every: int) -> None:
    """Its card takes in 11 models and sends out 11 in a round, unless steps take longer; rank 0 waits for none."""
    seen = goodput.timed(CASE, Choice("server", every), 0)
    found = goodput.judged(CASE, Choice("server", every), seen)
    message_s, steps_s = 1e8 / 1e8, every * 0.1
    assert found.exchange_s == pytest.approx(11 / 12 * max(11 * message_s - steps_s, 2 * message_s), rel=1e-3)
    assert found.nbytes == pytest.approx(2 * 11 / 12 * 1e8 / every, rel=1e-3)
    assert found.every == every
    # One death in twelve is the server's, which all stand still for.
    failing = replace(CASE, failures=Failures(mtbf_s=1e4, detection_s=20.0, restart_s=50.0))
    round_s = float(seen.ends_s.mean()) * every / seen.steps
    left = 1 / (1 + (round_s / 2 + 50 + 20 * (11 / 12 + 12 / 12)) / 1e4)
    assert goodput.judged(failing, Choice("server", every), seen).goodput == pytest.approx(
        found.goodput * left
    )


@pytest.mark.parametrize("every", [1, 8])
def test_a_slow_rank_sets_the_pace_of_those_that_wait_for_it(every: int) -> None:
    """On a fast link: of all by neighbours or in streams, as by a mean; under a server of itself alone."""
    fast = replace(SLOW_LINK, network=Switch(Hockney(1e-6, 1e13)))
    case = replace(CASE, platform=fast, stragglers=(SlowRank(5, 1.5),))
    found = {name: simulate(case, Choice(name, every), 0).goodput for name in STEADY}
    assert found.pop("server") == pytest.approx(12 / (11 + 1.5), rel=0.01)
    assert found == pytest.approx(dict.fromkeys(found, 1 / 1.5), rel=0.01)


def test_failures_agree_with_ranks_that_die() -> None:
    """Standing still while deaths are noticed, on 64 ranks that die at random: the closed form within a tenth."""
    mtbf_s, detection_s, iterations = 4_000.0, 5.0, 5_000
    ends: list[float] = []
    dead: list[int] = []

    def note(reported: columnar.Round) -> None:
        ends[:] = [float(reported.left_s.max())]
        dead.extend(reported.died.tolist())

    columnar.run(
        AverageAllPolicy(10),
        ranks=64,
        iterations=iterations,
        model_nbytes=4,
        platform=Platform("fast", Switch(Hockney(1e-9, 1e12))),
        compute=0.1,
        mtbf_s=mtbf_s,
        detection_s=detection_s,
        sample=0,
        on_round=note,
    )
    assert len(dead) > 1
    lost_s = ends[0] - (iterations - 9) * 0.1
    assert lost_s == pytest.approx(len(dead) * detection_s, rel=0.1)
    # By the closed form: so much of each rank's time, for as many deaths as there were.
    alone = Failures(mtbf_s=64 * ends[0] / len(dead), detection_s=detection_s, restart_s=0.0)
    share = alone.share(0.0, held=64)
    assert share == pytest.approx(1.0 - lost_s / ends[0], rel=0.01)


def test_the_measured_clusters_rank_by_cadence(tmp_path: Path) -> None:
    """At every link of the measured cluster the rarest exchange computes most; when 90 % are reached is told."""
    spec = importlib.util.spec_from_file_location("diloco_measured", STUDIES / "diloco_measured.py")
    assert spec is not None
    assert spec.loader is not None
    measured: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    fitted = measured.fit(measured.read_points(STUDIES / "data" / "diloco_measured.csv")[0])
    for link, rate in measured.LINKS_BPS.items():
        case = Case(fitted.platform(link, rate), 4, measured.NBYTES, fitted.step_s)
        found = advise(case, [Choice("average", every) for every in (8, 1, 128, 32)])
        assert [row.choice.every for row in found.rows] == [128, 32, 8, 1]
        assert not any(row.alike for row in found.rows)
        exchange_s = fitted.wire_s(rate) + fitted.overhead_s + 6 * 50e-6
        assert found.break_even["average"] == pytest.approx(9 * exchange_s / fitted.step_s, rel=0.01, abs=1)
        assert found.rows[0].worse["half the bandwidth"] < found.rows[0].goodput
        assert found.rows[0].worse["twice the failures"] == found.rows[0].goodput


def test_stragglers_make_intervals_and_ties() -> None:
    """Compression that a fast link does not need cannot be told apart from none; slow ranks leave no break-even."""
    case = replace(
        CASE, platform=replace(SLOW_LINK, network=Switch(Hockney(1e-6, 1e12))), stragglers=(Speed(0.1),)
    )
    choices = [Choice("average", 10), Choice("average", 10, 4.0), Choice("average", 100)]
    found = advise(case, choices, seeds=range(4))
    assert found.rows[0].low < found.rows[0].goodput < found.rows[0].high
    assert [row.alike for row in found.rows] == [(2, 3), (1, 3), (1, 2)]
    assert found.models == ("as given", "other costs")
    assert found.seeds == 4
    assert found.break_even == {"average": None}
    text = report(found)
    assert "indistinguishable: 1, 2, 3" in text
    assert "at no cadence" in text
    worse = found.rows[0].worse
    assert (
        worse["twice the stragglers"]
        < found.rows[0].goodput
        == pytest.approx(worse["half the bandwidth"], rel=0.1)
    )


def test_a_ranking_that_turns_is_reported() -> None:
    """A pair that changes places under a worse setting is named; one within the error is not."""

    def row(every: int, goodput: float, worse: float) -> Row:
        choice = Choice("average", every)
        return Row(choice, goodput, goodput, goodput, 0.5, 0.1, 1.0, every, (), {"twice the failures": worse})

    found = advise(CASE, [Choice("average", 1)])
    turned = replace(found, rows=(row(8, 0.9, 0.5), row(1, 0.8, 0.7), row(2, 0.7, 0.502)))
    pairs = turned.changes("twice the failures")
    assert pairs == [(Choice("average", 1), Choice("average", 8))]
    assert turned.ranking("twice the failures") == [1, 2, 0]
    assert turned.ranking() == [0, 1, 2]


def test_ranks_that_need_not_wait_do_not(tmp_path: Path) -> None:
    """Selective replacement computes more than averaging on a slow link; columns beyond 128 ranks."""
    case = replace(CASE, model_nbytes=10_000_000)
    waits, none = simulate(case, Choice("average", 5), 0), simulate(case, Choice("selective", 5), 0)
    assert none.utilisation > 0.85 > waits.utilisation
    many = replace(case, ranks=200, model_nbytes=1_000_000)
    assert 0 < simulate(many, Choice("selective", 5), 0).utilisation <= 1
    with pytest.raises(ParameterError, match="at most 128 ranks"):
        simulate(many, Choice("groups", 5), 0)


@pytest.mark.parametrize("policy", ["clock", "pairs", "selective"])
def test_ranks_that_do_not_wait_exchange_as_often_as_the_link_allows(policy: str) -> None:
    """A fast link: as often as asked, computing all the time. A slow one: more rarely, which costs at a death."""
    fast = replace(CASE, platform=replace(SLOW_LINK, network=Switch(Hockney(1e-6, 1e12))))
    found = simulate(fast, Choice(policy, 4), 0)
    assert found.every == pytest.approx(4, rel=0.4)
    assert found.goodput > 0.97
    # A model takes two steps on the wire, and each exchange two messages.
    slow, often = replace(CASE, model_nbytes=20_000_000, rounds=3), Choice(policy, 1)
    seen = goodput.timed(slow, often, 0)
    asked = goodput.judged(slow, often, seen)
    assert asked.every > 1.5
    assert 40 <= simulate(slow, Choice(policy, 40), 0).every < 60
    # A death loses what was computed since the last exchange that took place, not since the last that was asked for.
    failing = replace(slow, failures=Failures(mtbf_s=1e2, restart_s=0.0, detection_s=0.0))
    between_s = asked.every * float(seen.ends_s.mean()) / seen.steps
    left = goodput.judged(failing, often, seen).goodput
    assert left == pytest.approx(asked.goodput / (1 + between_s / 2 / 1e2))


def test_a_rank_that_fetches_by_windows_waits_for_its_donors() -> None:
    """A donor serves its window when its step is over; so a rank waits on a fast link, and longer on a slow one."""
    fast = replace(CASE, platform=replace(SLOW_LINK, network=Switch(Hockney(1e-6, 1e12))))
    soon, late = (simulate(case, Choice("windows", 4), 0) for case in (fast, replace(CASE, rounds=2)))
    assert soon.every == pytest.approx(4, rel=0.4)
    assert 1.0 > soon.utilisation > 0.6 > late.utilisation


def _row(policy: str, asked: int, every: float, goodput: float, utilisation: float) -> Row:
    worse, often = dict.fromkeys(WORSE, goodput), dict.fromkeys(WORSE, every)
    return Row(
        Choice(policy, asked), goodput, goodput, goodput, utilisation, 0.1, 1.0, every, (), worse, often
    )


def test_exchanges_that_are_left_out_are_reported() -> None:
    """Who skips does not win by it: the careful choice is by exchanges that took place, and others are told."""
    rows = (
        _row("clock", 1, 61.0, 0.98, 0.99),
        _row("average", 128, 128.0, 0.97, 0.98),
        _row("clock", 128, 128.0, 0.97, 0.98),
        _row("average", 32, 32.0, 0.94, 0.95),
        _row("average", 8, 8.0, 0.7, 0.71),
        _row("pairs", 8, 8.0, 0.6, 0.61),
    )
    rows[1].worse_every["half the bandwidth"] = 256.0
    found = Advice(rows, {"average": 20}, 0.9, ("as given",), 1)
    assert found.careful() == [0, 3]
    text = report(found)
    assert (
        "clock: ranks do not wait for models; requests to exchange more often than every 61 steps are left out"
        in text
    )
    assert "average: computes 90% of the time every 20 steps or less often" in text
    assert "pairs: ranks do not wait for models, and exchange as often as asked" in text
    assert (
        "most frequent exchanges that leave 90% for computing: clock, every 1 (in effect every 61); average, every 32"
        in text
    )
    assert "least to largest of 1 seed × 1 network model" in text
    assert "97.0%, every 256" in text
    assert [row["every"] for row in advise_command.document(found)["ranking"]][:2] == [1, 128]  # type: ignore[index,attr-defined]


def test_large_models_have_no_exponents() -> None:
    """Bytes of a step are read by people, at 12 MB as at 3,750."""
    rows = [replace(_row("average", 8, 8.0, 0.9, 0.9), nbytes=n) for n in (12.34e6, 999.7e6, 3.75e9)]
    text = report(Advice(tuple(rows), {}, 0.9, ("as given",), 1))
    assert [size in text for size in (" 12.3 MB ", " 1,000 MB ", " 3,750 MB ", "e+")] == [
        True,
        True,
        True,
        False,
    ]


def test_the_other_model_has_the_same_wire() -> None:
    """Hockney and LogGP turn into each other; a message takes as long, through every kind of link."""
    network = Nodes(Hockney(3e-6, 1e10), LogGP(L=1e-5, o=2e-6, g=1e-6, G=1e-9), ranks_per_node=4)
    found = other_costs(network)
    assert isinstance(found, Nodes)
    assert isinstance(found.intra, LogGP)
    assert isinstance(found.inter, Hockney)
    assert (found.inter.latency_s, found.inter.bandwidth_Bps) == pytest.approx((1.4e-5, 1e9))
    cost = found.cost(0, 1, 1 << 20)
    assert cost.flight_s + cost.receive_s == pytest.approx(3e-6 + (1 << 20) / 1e10, rel=0.01)
    assert other_costs(load_platform("wan-volunteers").network) is None
    assert other_costs(load_platform("wan-aws").network) is not None


def test_links_that_change_are_halved_as_they_are() -> None:
    """Half of a trace, traffic that stays; a TCP connection keeps its model: the other two have no windows."""
    link = Changing(
        Hockney(1e-3, 1e8), BandwidthTrace(((0.0, 1e8, 1e-3), (9.0, 5e7, 2e-3))), (Constant(0.1),)
    )
    case = Case(Platform("t", Nodes(Tcp(1e-3, 1e8), link, 2)), 4, 1 << 20, 0.1)
    slower = goodput._slower_links(case).platform.network
    assert isinstance(slower, Nodes)
    assert slower.intra == Tcp(1e-3, 5e7)
    assert slower.inter == link.farther(0.0, 0.5)
    assert slower.inter.trace.rows == ((0.0, 5e7, 1e-3), (9.0, 2.5e7, 2e-3))  # type: ignore[attr-defined]
    assert other_costs(case.platform.network) is None


def test_a_budget_pays_steps() -> None:
    """100 node-hours on three nodes of four: 33 h 20 min, of steps of 0.1 s at 80 % goodput; or 250 at 2.50 an hour."""
    hours = Budget(100.0, 4)
    assert hours.hours(12) == pytest.approx(100 / 3)
    assert hours.steps(CASE, 0.8) == pytest.approx(100 / 3 * 3600 / 0.1 * 0.8)
    assert Budget(250.0, 4, price=2.5).steps(CASE, 0.8) == hours.steps(CASE, 0.8)
    assert hours.hours(9) == hours.hours(12)
    for wrong in ((0.0, 4, None), (1.0, 0, None), (1.0, 4, 0.0), (math.inf, 1, None)):
        with pytest.raises(ParameterError, match="above 0"):
            Budget(*wrong)


def test_a_small_training_tells_what_a_cadence_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """On skewed shards rare averages need more steps; time is steps over goodput; a fast link lets the frequent win."""
    choices = [Choice("average", 1), Choice("average", 40, 4.0), Choice("average", 40)]
    advice = advise(CASE, choices, seeds=(0,))
    needs = converge(CASE, advice, steps=80, seeds=(0,))
    assert needs[choices[1]] == needs[choices[2]]  # compression is not applied
    assert needs[choices[0]].steps < needs[choices[1]].steps == 80
    for choice, seconds, least, most in by_time(advice, needs, CASE.step_s):
        row = next(row for row in advice.rows if row.choice == choice)
        assert seconds == pytest.approx(0.1 * needs[choice].steps / row.goodput)
        assert least <= seconds <= most
    command = ["advise", "-n", "8", "--model", "1MB", "--compute", "100ms", "--every", "1,40"]
    command += ["--seeds", "1", "--train", "80"]
    assert main([*command, "--set", "budget=16", "--set", "price=2", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [each["choice"] for each in reported["live"]] == ["average, every 1", "average, every 40"]
    assert reported["budget"]["hours"] == 8.0
    said = "\n".join(advise_command._detail_lines(reported))
    assert "the budget pays 8 h: " in said
    assert "reaches the worst final quality" in said
    for wrong, said in (
        ([*command, "--set", "price=2"], "add --set budget="),
        ([*command[:-1], "30"], "--train 30: give at least 25 steps, and as many as the rarest exchange, 40"),
    ):
        assert main(wrong) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["streaming", "gossip", "server"])
def test_policies_of_all_kinds_train(policy: str) -> None:
    """Whose weights are global, neighbours' or a server's: digits are learnt, far better than one in ten."""
    assert _accuracies(replace(CASE, ranks=4), Choice(policy, 4), 40, 0)[-1] > 0.3


def test_published_rates() -> None:
    """Rates give the published times between failures; plans take whole nodes, and draw as often as they should."""
    hours = 3600.0
    rsc = rates.FAILURES["rsc-1"]
    assert rsc.node_mtbf_s / 128 == pytest.approx(28.8 * hours, rel=0.01)
    assert 1 / (128 / rsc.node_mtbf_s + 1 / rsc.job_mtbf_s) == pytest.approx(7.9 * hours, rel=0.01)
    llama = rates.FAILURES["llama3"]
    assert llama.node_mtbf_s / 2048 == pytest.approx(3.1 * hours, rel=0.01)
    assert llama.rank_mtbf_s(8) / 16384 == pytest.approx(50_700 * hours / 16384, rel=0.03)
    plan = llama.plan(2048 * 8 - 3, horizon_s=54 * 86400, seed=3)
    nodes = {fault.rank // 8 for fault in plan.faults}
    assert len(nodes) == pytest.approx(2048 * -math.expm1(-54 * 86400 / llama.node_mtbf_s), rel=0.1)
    assert len(plan.faults) in (8 * len(nodes), 8 * len(nodes) - 3)
    assert llama.plan(800, horizon_s=1e6, seed=3).faults == tuple(
        f for f in llama.plan(1600, horizon_s=1e6, seed=3).faults if f.rank < 800
    )
    with pytest.raises(ParameterError, match="at least 1"):
        rsc.rank_mtbf_s(0)
    with pytest.raises(ParameterError, match="above 0"):
        rsc.plan(8, horizon_s=math.inf)
    (speed,) = parse_stragglers(rates.PERSISTENT)
    assert isinstance(speed, Speed)
    drawn = np.random.default_rng(1).lognormal(-0.5 * speed.sigma**2, speed.sigma, (2000, 128)).max(axis=1)
    assert 1 - 1 / drawn.mean() == pytest.approx(0.104, abs=0.01)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table, JSON and a picture; names of rates; each wrong option is named."""
    words = (
        "advise -n 12 --platform gigabit --model 10MB --compute 20ms --every 1,4 --failures rsc-1 --seeds 2 "
        "--set rounds=2"
    )
    picture = tmp_path / "advice.png"
    assert main([*words.split(), "--straggler", "speed:0.04", "--picture", str(picture)]) == 0
    assert "average, every 4" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000
    assert main([*words.split(), "--json", "--compression", "1,4", "--policy", "gossip, average,gossip"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranking"][0]["every"] == 4
    assert len(found["ranking"]) == 8
    assert list(found["break_even"]) == ["gossip", "average"]
    assert advise_command._policies(["clock", "all"])[:2] == ["clock", "average"]
    assert sorted(advise_command._policies(["all"])) == sorted(goodput.POLICIES)
    for wrong, said in (
        (["--every", "1,x"], "--every '1,x'"),
        (["--every", "0"], "every 1 or more"),
        (["--failures", "rsc-3"], "rsc-1, rsc-2, llama3"),
        (["--set", "target=1.5"], "a share between 0 and 1"),
        (["--seeds", "0"], "--seeds 0"),
        (["--set", "rounds=1"], "2 rounds"),
        (["--policy", "none"], "average"),
        (["--picture", "advice.gif"], "--picture: advice.gif: figures are written as .png, .pdf or .svg"),
        (["--policy", "average,gosip"], "did you mean gossip?"),
        (["--set", "detection=-5s"], "at least 0 s"),
        (["-n", "1"], "at least 2 ranks"),
        (["--seeds", "100000"], "at most 10,000"),
        (["--model", "1e300GB"], "'1e300GB' is not a size"),
        (["--model", "2"], "'2' is not a size: write a number and one of B, kB, MB"),
        (["--model", "1e290GB"], "a model of 1e+299 bytes: give at most 1e+18"),
        (["--train", "100000000"], "would take about 178 h of a core"),
    ):
        assert main([*words.split(), *wrong]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "policy", "every"),
    [
        ({"ranks": 128}, "streaming", 10**7),
        ({"model_nbytes": 10**15}, "server", 8),
        ({"model_nbytes": 10**13}, "groups", 8),
        ({"rounds": 10**8}, "gossip", 8),
        ({"ranks": 10**6}, "average", 10**8),
    ],
)
def test_what_would_take_hours_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], policy: str, every: int
) -> None:
    """One line says what it would take, of the choice that takes longest, and what to do."""
    monkeypatch.setattr(goodput, "run", None)
    monkeypatch.setattr(goodput.columnar, "run", None)
    choices = [Choice("average", 1), Choice(policy, every)]
    with pytest.raises(
        ParameterError, match=f"^{policy}, every {every}: .* h of a core, .* ask for fewer steps"
    ):
        advise(replace(CASE, **change), choices)


def test_columns_that_no_memory_holds_are_refused() -> None:
    """Before the system ends the process."""
    with pytest.raises(
        ParameterError, match=r"columns take about 500 bytes a rank, 50,000 GB, and .* GB are available"
    ):
        columnar.run(AverageAllPolicy(1), ranks=10**11, iterations=1, model_nbytes=8)


def test_worse_stragglers_are_worse() -> None:
    """Every straggler that a run can have is turned into one that spreads further."""
    kinds = parse_stragglers("lognormal:0.3+slow:0.02,5+gamma:0.2+pareto:3+bimodal:0.1,2+exponential:0.5")
    worse = WORSE["twice the stragglers"](replace(CASE, stragglers=tuple(kinds))).stragglers
    assert worse[:2] == (Lognormal(0.6), Slow(0.02, 9.0))
    assert all(now != before for now, before in zip(worse, kinds, strict=True))


def test_what_takes_minutes_is_reported_before_it_runs():
    """Which policies' runs take it, and what to leave out; what is quick says nothing."""

    def stops(choices):
        raise InterruptedError

    said = []
    choices = [Choice(policy, every) for policy in ("average", "groups", "server") for every in (1, 8)]
    case = Case(SLOW_LINK, 64, 100_000_000, 0.1)
    with pytest.raises(InterruptedError):
        advise(case, choices, noted=stops, say=said.append)
    (only,) = said
    assert re.match(
        r"about \d+ min of a core: (groups|server) \d+%, (groups|server) \d+%; --seeds 1, or fewer", only
    )
    with pytest.raises(InterruptedError):
        advise(case, choices[:2], noted=stops, say=said.append)
    assert len(said) == 1
