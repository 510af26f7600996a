"""Compute models: distributions against closed forms, streams by key, episodes in time, traces, text forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim import random
from spawnsim.errors import ParameterError, UsageError
from spawnsim.models.compute import (
    Bimodal,
    ComputeModel,
    Exponential,
    Fixed,
    Gamma,
    Lognormal,
    Markov,
    Noise,
    Pareto,
    Slow,
    Speed,
    StreamKey,
    Trace,
    parse_base,
    parse_stragglers,
    stragglers,
)  # fmt: skip
from spawnsim.models.compute.stragglers import Episodes

KINDS = [Lognormal(0.6), Exponential(0.5), Pareto(3.0), Gamma(0.4), Bimodal(0.01, 8.0)]


def _harmonic(ranks: int) -> float:
    return sum(1.0 / k for k in range(1, ranks + 1))


def _integral_of_max(cdf: Callable[[float], float], ranks: int, upper: float) -> float:
    x = np.linspace(0.0, upper, 10_001)
    below = np.array([cdf(value) for value in x]) ** ranks
    return float(np.trapezoid(1.0 - below, x))


def _pareto_worst(tail: float, ranks: int) -> float:
    log = math.lgamma(1 - 1 / tail) + math.lgamma(ranks + 1) - math.lgamma(ranks + 1 - 1 / tail)
    return (tail - 1) / tail * math.exp(log)


def _lognormal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-(math.log(max(x, 1e-300)) + 0.18) / 0.6 / math.sqrt(2))


def _erlang4_cdf(x: float) -> float:
    return 1.0 - math.exp(-4 * x) * sum((4 * x) ** k / math.factorial(k) for k in range(4))


WORST = {
    Exponential(0.5): lambda ranks: 0.5 + 0.5 * _harmonic(ranks),
    Pareto(3.0): lambda ranks: _pareto_worst(3.0, ranks),
    Lognormal(0.6): lambda ranks: _integral_of_max(_lognormal_cdf, ranks, 40.0),
    Gamma(0.5): lambda ranks: _integral_of_max(_erlang4_cdf, ranks, 12.0),
    Bimodal(0.01, 8.0): lambda ranks: 1.0 + 7.0 * (1.0 - 0.99**ranks),
}


@pytest.mark.parametrize("ranks", [1, 2, 8, 64, 1000])
@pytest.mark.parametrize("kind", WORST, ids=str)
def test_expected_slowest_rank_matches_the_formula_within_one_percent(kind: Noise, ranks: int) -> None:
    """E[max of P draws], the price of a synchronous step, over fixed seeds."""
    rows = 4_000_000 // ranks if ranks < 100 else 20_000
    stream = random.generator(11, ranks, str(kind))
    worst = np.concatenate(
        [kind.draw(stream, 500 * ranks).reshape(500, ranks).max(axis=1) for _ in range(rows // 500)]
    )
    assert worst.mean() == pytest.approx(WORST[kind](ranks), rel=0.01)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_sampler_is_the_stream_whatever_the_block_size(
    kind: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing in blocks is an economy and changes no factor."""
    model = ComputeModel(Fixed(2.0), (kind,))
    sample = model.open(seed=3, rank=5)
    blocks = [sample(None, 0.0) for _ in range(700)]
    monkeypatch.setattr(stragglers, "SMALLEST_BLOCK", 1)
    monkeypatch.setattr(stragglers, "LARGEST_BLOCK", 1)
    sample = model.open(seed=3, rank=5)
    assert blocks == [sample(None, 0.0) for _ in range(700)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_mean_factor_is_what_it_says(kind: Noise) -> None:
    """Continuous noise keeps the mean step time; the transient bimodal lengthens it."""
    factors = kind.draw(random.generator(1, 0, "mean"), 2_000_000)
    assert factors.mean() == pytest.approx(kind.mean, rel=0.005)


def test_streams_depend_on_seed_and_rank_alone() -> None:
    """Another seed or rank draws differently; a further straggler leaves the first one's draws alone."""
    alone, both = (
        ComputeModel(Fixed(1.0), parse_stragglers(t)) for t in ("gamma:0.5", "gamma:0.5+speed:0.2")
    )
    first = [alone.open(7, 3)(None, 0.0), alone.open(7, 4)(None, 0.0), alone.open(8, 3)(None, 0.0)]
    assert len(set(first)) == 3
    speed = ComputeModel(Fixed(1.0), parse_stragglers("speed:0.2")).open(7, 3)(None, 0.0)
    assert both.open(7, 3)(None, 0.0) == first[0] * speed


def test_one_kind_twice_draws_two_streams() -> None:
    """Lognormal + lognormal is not the square of one lognormal."""
    once, twice = (ComputeModel(Fixed(1.0), (Lognormal(0.3),) * n).open(0, 0)(None, 0.0) for n in (1, 2))
    assert twice != pytest.approx(once**2)


@pytest.mark.parametrize(
    ("share", "ranks"), [(0.05, 1000), (0.02, 50), (0.1, 640), (0.3, 10), (0.7, 1000), (1.0, 9)]
)
def test_slow_ranks_are_as_many_as_the_share_says(share: float, ranks: int) -> None:
    """Stratified: P · share ranks are slow, give or take one, and always."""
    samplers = [ComputeModel(Fixed(1.0), (Slow(share, 4.0),)).open(2, rank) for rank in range(ranks)]
    slow = [rank for rank, sample in enumerate(samplers) if sample(None, 0.0) == 4.0]
    assert abs(len(slow) - share * ranks) <= 1
    assert all(samplers[rank](None, 9.0) == 4.0 for rank in slow)


def test_speed_is_lognormal_over_ranks_and_constant_in_time() -> None:
    """Mean 1 over ranks, one factor per rank."""
    samplers = [ComputeModel(Fixed(1.0), (Speed(0.3),)).open(5, rank) for rank in range(4000)]
    factors = np.array([sample(None, 0.0) for sample in samplers])
    assert factors.mean() == pytest.approx(1.0, abs=0.02)
    assert np.log(factors).std() == pytest.approx(0.3, abs=0.01)
    assert samplers[17](None, 50.0) == factors[17]


def test_episodes_take_their_share_of_the_time() -> None:
    """A busy rank's slowdown in the long run is the model's mean."""
    model = Markov(fast_s=6.0, slow_s=2.0, slowdown=4.0)
    sample = ComputeModel(Fixed(0.05), (model,)).open(1, 0)
    now_s = 0.0
    for _ in range(200_000):
        now_s += sample(None, now_s)
    assert now_s / (200_000 * 0.05) == pytest.approx(model.mean, rel=0.03)


def test_episodes_are_a_function_of_rank_and_time() -> None:
    """Asked in any order and in any portions, work takes equally long."""
    model, key = Markov(1.0, 1.0, 3.0), StreamKey(4, 2, "episodes")
    whole = Episodes(model, key.generator()).stretch(20.0, 0.0)
    portions = Episodes(model, key.generator())
    late = portions.stretch(0.5, 30.0)
    now_s = 0.0
    for _ in range(200):
        now_s += portions.stretch(0.1, now_s)
    assert now_s == pytest.approx(whole, rel=1e-12)
    assert portions.stretch(0.5, 30.0) == late


def test_episodes_come_last_whatever_the_order_in_the_text() -> None:
    """The clock is followed by the final duration."""
    texts = ("markov:1s,1s,9+lognormal:0.5", "lognormal:0.5+markov:1s,1s,9")
    one, other = (ComputeModel(Fixed(0.7), parse_stragglers(text)).open(0, 1) for text in texts)
    assert [one(None, t) for t in (0.0, 1.0, 2.0)] == [other(None, t) for t in (0.0, 1.0, 2.0)]


def test_stated_duration_goes_before_the_models_own() -> None:
    """comm.compute(0.01) states; stragglers apply to it."""
    sample = ComputeModel(Fixed(1.0), parse_stragglers("constant:3")).open(0, 0)
    assert (sample(0.01, 0.0), sample(None, 0.0)) == (0.03, 3.0)


def test_neither_stated_nor_modelled_is_an_error() -> None:
    """Never a silent zero."""
    with pytest.raises(ParameterError, match=r"rank 4: comm.compute\(\) states no duration.*--compute 10ms"):
        ComputeModel(None, (Lognormal(0.3),)).open(0, 4)(None, 0.0)


@pytest.mark.parametrize("stated_s", [-1.0, math.nan, math.inf])
def test_a_bad_stated_duration_is_an_error(stated_s: float) -> None:
    """Negative and endless blocks are refused where they are stated."""
    with pytest.raises(ParameterError, match="rank 1"):
        ComputeModel().open(0, 1)(stated_s, 0.0)


def test_a_trace_replays_and_then_says_that_it_is_short() -> None:
    """Recorded times take the place of stated ones; running out is one clear error."""
    sample = ComputeModel(Trace([[0.1, 0.2], [0.3]])).open(0, 0)
    assert [sample(None, 0.0), sample(9.0, 0.0)] == [0.1, 0.2]
    with pytest.raises(ParameterError, match=r"2 compute blocks of rank 0.*cycle"):
        sample(None, 0.0)
    with pytest.raises(ParameterError, match=r"holds 2 ranks and the run has a rank 2.*resample"):
        ComputeModel(Trace([[0.1, 0.2], [0.3]])).open(0, 2)


def test_a_trace_goes_round_and_grows() -> None:
    """Cycle starts over; resample gives further ranks the row of a random rank, the same one each time."""
    trace = Trace([[1.0, 2.0], [3.0, 4.0, 5.0]], cycle=True, resample=True)
    sample = ComputeModel(trace).open(0, 0)
    assert [sample(None, 0.0) for _ in range(5)] == [1.0, 2.0, 1.0, 2.0, 1.0]
    further = [[ComputeModel(trace).open(6, rank)(None, 0.0) for rank in range(2, 60)] for _ in range(2)]
    assert further[0] == further[1]
    assert set(further[0]) == {1.0, 2.0, 3.0, 4.0, 5.0}


def _write_run(folder: Path) -> Path:
    folder.mkdir()
    columns = {"rank": np.array([0, 0, 1, 1, 2]), "compute_s": np.array([0.1, np.nan, 0.9, 0.8, 0.2])}
    np.savez(folder / "metrics.npz", **columns)
    return folder


def test_a_recorded_run_is_a_compute_model(tmp_path: Path) -> None:
    """Column compute_s, rank by rank; the slowest node can be left out."""
    run = _write_run(tmp_path / "a")
    trace = Trace.of_run(run)
    assert [row.tolist() for row in map(np.asarray, trace.rows)] == [[0.1], [0.9, 0.8], [0.2]]
    fewer = parse_base(f"{run},cycle,without-slowest:1")
    assert isinstance(fewer, Trace)
    assert [np.asarray(row).tolist() for row in fewer.rows] == [[0.1], [0.2]]
    assert fewer.cycle


def test_a_folder_without_compute_times_says_so(tmp_path: Path) -> None:
    """No metrics.npz, or no such column."""
    with pytest.raises(ParameterError, match="not a run folder"):
        parse_base(str(tmp_path))
    np.savez(tmp_path / "metrics.npz", rank=np.zeros(2))
    with pytest.raises(ParameterError, match="compute_s"):
        parse_base(str(tmp_path))


@pytest.mark.parametrize("rows", [[], [[]], [[0.1, -0.2]], [[math.nan]], [[[0.1]]]])
def test_a_bad_trace_is_refused(rows: list[object]) -> None:
    """Empty rows and impossible durations are named by rank and block."""
    with pytest.raises(ParameterError):
        Trace(rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["constant", "constant:2", "lognormal:0.3", "exponential:0.5", "pareto:2.5", "gamma:0.4", "bimodal:0.01,8",
     "speed:0.1", "slow:0.05,4", "rank:17,4", "markov:60s,5s,4", "lognormal:0.3+slow:0.02,5"],
)  # fmt: skip
def test_text_forms_round_trip(text: str) -> None:
    """What is written is what str() writes."""
    assert "+".join(map(str, parse_stragglers(text))) == text


@pytest.mark.parametrize(
    "text",
    ["lognormal", "lognormal:x", "lognormal:-1", "lognormal:0.3,4", "nosuch:1", "pareto:1", "slow:2,4", "bimodal:0.1",
     "markov:1s,2s", "markov:1x,2s,3", "lognormal:0.3+", "exponential:1.5", "rank:-1,4", "rank:0.5,4", "gamma:nan"],
)  # fmt: skip
def test_a_bad_text_is_one_clear_error(text: str) -> None:
    """The error names the part that is wrong."""
    with pytest.raises(ParameterError, match="straggler '"):
        parse_stragglers(text)


def test_an_unknown_form_lists_the_forms() -> None:
    """So that nobody has to look them up."""
    with pytest.raises(ParameterError, match=r"constant, .*markov:FAST,SLOW,SLOWDOWN"):
        parse_stragglers("nosuch:1")
    with pytest.raises(ParameterError, match=r"did you mean lognormal\? Forms"):
        parse_stragglers("lognorml:0.3")
    with pytest.raises(
        ParameterError, match=r"'slow:0.3' in 'constant\+slow:0.3': write slow:SHARE,SLOWDOWN$"
    ):
        parse_stragglers("constant+slow:0.3")


def test_a_compute_text_is_a_duration_or_a_run() -> None:
    """Anything else names both."""
    assert parse_base("50ms") == Fixed(0.05)
    assert parse_base(0.01) == Fixed(0.01)
    with pytest.raises(
        ParameterError,
        match=r"^compute '.*': write a number and one of ns, us.*such as '10 ms'; or a run folder",
    ):
        parse_base("fifty")


def test_computing_that_is_no_block_is_refused():
    """`comm.compute(0.01)` alone would take no time, without a word."""

    def main(comm):
        with comm.compute(0.01):
            comm.Barrier()
        block = comm.compute(0.02)
        with block:
            pass
        comm.compute(0.03)
        comm.compute(0.03)

    with pytest.raises(UsageError, match=r"rank 0 at 0.03\d* s: .* began no block.*write `with"):
        run(main, 3)
