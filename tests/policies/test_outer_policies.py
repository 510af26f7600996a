"""Outer optimizers, streamed, late, in pairs, on springs, by the clock: against the authors' recursions, to 1e-12."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.policy_ranks import Line
from support.walks import WIDTH, drift, model_of, move, recursion, start, vector, walk

import spawnsim
from spawnsim import TrainingStep
from spawnsim.errors import MismatchError, ParameterError, RankFailed, Revoked, Timeout, UsageError
from spawnsim.models.network import Hockney, Switch
from spawnsim.policies import (
    DecoupledDiLoCoPolicy,
    EASGDPolicy,
    EDiTPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OuterOptimizerPolicy,
    OutlierFilter,
    SPARTAPolicy,
    StateScope,
    StreamingDiLoCoPolicy,
    TopK,
    decoupled,
)
from spawnsim.policies.exchange import outer_group
from spawnsim.policies.noloco import partner_of
from spawnsim.policies.state.difference_codecs import LowBit, RandomMask
from spawnsim.policies.state.outer import FlatFloats, radial_directional_mean
from spawnsim.random import WORLD, generator

Weights = NDArray[np.float64]
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
LAYERS = (slice(0, 6), slice(6, 9))  # the two layers in the vector


def by_torch(every: int, lr: float, momentum: float, nesterov: bool) -> Weights:
    """Return the weights under torch's own SGD on pseudo-gradients."""
    outer = torch.nn.Parameter(torch.from_numpy(start()))
    optimizer = torch.optim.SGD([outer], lr=lr, momentum=momentum, nesterov=nesterov)

    def round_of(number: int, weights: Weights) -> Weights:
        outer.grad = outer.detach() - torch.from_numpy(weights.mean(axis=0))
        optimizer.step()
        return np.tile(outer.detach().numpy(), (4, 1))

    return recursion(round_of, every)


# ---------------------------------------------------------------------------------------------------- outer optimizer
def test_the_rule_that_the_docs_write_is_diloco_with_clipped_differences() -> None:
    """The block of docs/policies.md as it stands: DiLoCo where nothing is clipped, and never further than that."""
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    (block,) = (each.partition("```")[0] for each in page.split("```python\n") if "ClippedDiLoCo" in each)
    names: dict[str, Any] = {}
    exec(block, names)
    free, bound = (walk(lambda _, m=most: names["ClippedDiLoCoPolicy"](3, m)) for most in (math.inf, 1e-3))
    np.testing.assert_array_equal(free.last, walk(lambda _: OuterOptimizerPolicy.diloco(3)).last)
    assert (
        0
        < np.abs(bound.last[0] - start()).max()
        < 4 * 1e-3 / (1 - 0.9)
        < np.abs(free.last[0] - start()).max()
    )


@pytest.mark.parametrize(
    ("preset", "constants"),
    [("diloco", (0.7, 0.9, True)), ("muloco", (0.9, 0.8, True)), ("bmuf", (1.0, 0.9, False))],
)
def test_presets_are_torchs_sgd_on_pseudo_gradients(
    preset: str, constants: tuple[float, float, bool]
) -> None:
    """Four rounds of three steps, four ranks: the published constants."""
    found = walk(lambda _: getattr(OuterOptimizerPolicy, preset)(3))
    np.testing.assert_allclose(found.last, by_torch(3, *constants), **CLOSE)
    assert [step for step in range(12) if found.infos[2, step]["averaged_this_iteration"]] == [2, 5, 8, 11]
    assert found.infos[2, 5]["bytes"] == 8 * WIDTH
    assert found.infos[2, 5]["donors"] == 3


def test_fedavg_is_the_mean_and_bmuf_the_authors_recursion() -> None:
    """Δ_t = η·Δ_(t−1) + ζ·(mean − Θ) by Chen and Huo, with η .75 for four workers."""
    mean = recursion(lambda number, weights: np.tile(weights.mean(axis=0), (4, 1)), 3)
    np.testing.assert_allclose(walk(lambda _: OuterOptimizerPolicy.fedavg(3)).last, mean, **CLOSE)
    theta, update = start(), np.zeros(WIDTH)

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, update
        update = 0.75 * update + 0.9 * (weights.mean(axis=0) - theta)
        theta = theta + update
        return np.tile(theta, (4, 1))

    found = walk(lambda _: OuterOptimizerPolicy.bmuf(3, momentum=0.75, lr=0.9))
    np.testing.assert_allclose(found.last, recursion(round_of, 3), **CLOSE)


def test_slowmo_counts_in_units_of_the_inner_learning_rate() -> None:
    """U ← βu + (Θ − mean)/γ, Θ ← Θ − αγu, while γ falls: not the same as heavy ball on Δ."""
    lr = lambda step: 0.1 * 0.8**step  # noqa: E731
    theta, slow = start(), np.zeros(WIDTH)

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, slow
        rate = lr(3 * number + 2)
        slow = 0.5 * slow + (theta - weights.mean(axis=0)) / rate
        theta = theta - 0.9 * rate * slow
        return np.tile(theta, (4, 1))

    wanted = recursion(round_of, 3)
    found = walk(lambda _: OuterOptimizerPolicy.slowmo(3, lr=0.9), lr=lr)
    np.testing.assert_allclose(found.last, wanted, **CLOSE)
    plain = walk(lambda _: OuterOptimizerPolicy.slowmo(3, lr=0.9, inner_lr=False), lr=lr)
    assert abs(plain.last - wanted).max() > 0.01


# Made by torchft 0.2.0, `torchft.local_sgd.DiLoCo` on two replicas that walk as `support.walks` has it, with
# torch.optim.SGD(lr=.7, momentum=.9, nesterov=True) outside: sync_every=3, 9 steps; and sync_every=6, two fragments,
# fragment_sync_delay=1, fragment_update_alpha=.5, 20 steps.
TORCHFT = [
    [-0.14698580219546062, -0.25839916404641433, 0.038252494647964756, 0.47497929402257877, 1.0661958981043451,
     -0.02635083303640766, -0.39303727322724497, -0.1545421745102132, -0.493644211278476],
] * 2  # fmt: skip
TORCHFT_STREAMING = [
    [-0.5942451274181586, -1.221324761828098, 0.07096131241631502, 0.2708661396628223, 0.3268679480655015,
     0.25769144464634247, -0.4901504448021271, 0.2355707706498989, -1.1018765335165703],
    [-0.4032219930063649, -0.7570721337085162, -0.21667274137131665, 0.4995138159790346, 1.6691893710991434,
     0.6050788732518829, -0.42019422986436306, -0.30924978026775907, -0.6425746266818005],
]  # fmt: skip


def test_torchfts_diloco_gives_the_same_numbers() -> None:
    """As a whole; and streamed.

    What torchft sends `fragment_sync_delay` steps before the turn is sent at the turn here, and used later: the same
    schedule has its iterations counted from 2.
    """
    found = walk(lambda _: OuterOptimizerPolicy.diloco(3), ranks=2, steps=9)
    np.testing.assert_allclose(found.last, TORCHFT, **CLOSE)

    def streamed(comm: Any) -> StreamingDiLoCoPolicy:
        return StreamingDiLoCoPolicy(6, fragments=2, overlap=1, blend=0.5, compression=None)

    np.testing.assert_allclose(walk(streamed, ranks=2, steps=20, first=2).last, TORCHFT_STREAMING, **CLOSE)


# ----------------------------------------------------------------------------------------------- streamed, or late
@pytest.mark.parametrize("overlap", [0, 1, 4])
def test_streaming_follows_its_recursion(overlap: int) -> None:
    """Two fragments, each every six steps, sent at steps 3 and 6 of the six: also where two are under way at once."""
    ranks, steps, alpha = 3, 24, 0.25
    weights = np.tile(start(), (ranks, 1))
    theta, buffer = start(), np.zeros(WIDTH)
    sent: dict[int, tuple[slice, Weights]] = {}
    for step in range(1, steps + 1):
        weights = weights + np.stack([drift(rank, step - 1) for rank in range(ranks)])
        if step % 3 == 0:
            part = LAYERS[(step // 3 - 1) % 2]
            sent[step + overlap] = part, (theta - weights.mean(axis=0))[part]
        if step in sent:
            part, delta = sent[step]
            buffer[part] = 0.9 * buffer[part] + delta
            theta[part] -= 0.7 * (delta + 0.9 * buffer[part])
            weights[:, part] = alpha * weights[:, part] + (1 - alpha) * theta[part]

    def streamed(comm: Any) -> StreamingDiLoCoPolicy:
        return StreamingDiLoCoPolicy(6, fragments=2, overlap=overlap, blend=alpha, compression=None)

    found = walk(streamed, ranks=ranks, steps=steps)
    np.testing.assert_allclose(found.last, weights, **CLOSE)
    assert found.infos[0, 2 + overlap]["staleness"] == overlap


def test_streaming_hides_its_messages_and_diloco_does_not() -> None:
    """On a wire where a fragment takes 25 ms and steps 10 ms: five steps later nobody waits, at once all do."""
    wire: dict[str, Any] = {"platform": Switch(Hockney(25e-3, 1e9)), "steps": 24, "ranks": 2}
    waited = {}
    for overlap in (0, 5):
        found = walk(
            lambda _, overlap=overlap: StreamingDiLoCoPolicy(
                12, fragments=2, overlap=overlap, compression=None
            ),
            **wire,
        )
        waited[overlap] = sum(info["wait_s"] for (rank, _), info in found.infos.items() if rank == 0)
    assert waited[0] > 0.05
    assert waited[5] < 0.01 * waited[0]


def test_four_bits_are_what_travels_and_what_counts() -> None:
    """The same recursion with each rank's difference rounded to 0 and ± powers of two of its largest number."""
    codec, theta, buffer = LowBit(4), start(), np.zeros(WIDTH)

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, buffer
        sent = [codec.decode(codec.encode(theta - each), WIDTH).astype(np.float64) for each in weights]
        delta = sum(sent) / 4
        buffer = 0.9 * buffer + delta
        theta = theta - 0.7 * (delta + 0.9 * buffer)
        return np.tile(theta, (4, 1))

    found = walk(lambda _: StreamingDiLoCoPolicy(3, fragments=1, overlap=0, blend=0.0))
    np.testing.assert_allclose(found.last, recursion(round_of, 3), **CLOSE)
    assert found.infos[0, 2]["bytes"] == 4 * (4 + -(-4 * WIDTH // 8))


@pytest.mark.parametrize("fresh", [True, False])
def test_one_round_late_follows_its_recursion(fresh: bool) -> None:
    """Eager: the others' part is a round old, each rank's own is new. CO2: all is a round old, and momentum clipped."""
    theta, buffer = np.tile(start(), (4, 1)), np.zeros((4, WIDTH))
    before = np.zeros((4, WIDTH))

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, buffer, before
        delta = theta - weights
        gradient = np.tile(before.mean(axis=0), (4, 1)) + fresh * (delta - before) / 4
        before = delta
        if fresh:
            buffer = 0.9 * buffer + gradient
            theta = theta - 0.7 * (gradient + 0.9 * buffer)
        else:
            buffer = np.clip(0.5 * buffer + gradient / 1.25, -0.1, 0.1)
            theta = theta - buffer
        return theta

    def policy(comm: Any) -> OneRoundLatePolicy:
        return OneRoundLatePolicy.eager(3) if fresh else OneRoundLatePolicy.co2(3, penalty=1.25, clip=0.1)

    found = walk(policy)
    np.testing.assert_allclose(found.last, recursion(round_of, 3), **CLOSE)
    assert [found.infos[1, step]["staleness"] for step in (2, 5, 8)] == [0, 3, 3]


# ---------------------------------------------------------------------------------------------- pairs, springs, blocks
@pytest.mark.parametrize("ranks", [4, 11])
def test_noloco_follows_its_recursion(ranks: int) -> None:
    """Each rank with slow weights and momentum of its own; of eleven, one is alone in each round."""
    slow, momentum = np.tile(start(), (ranks, 1)), np.zeros((ranks, WIDTH))

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal slow, momentum
        order = generator(7, WORLD, f"pairs {3 * number + 3}").permutation(ranks).tolist()
        partner = np.arange(ranks)
        for one, other in zip(order[::2], order[1::2], strict=False):
            partner[one], partner[other] = other, one
        moved = weights - slow
        momentum = 0.5 * momentum + 0.7 * (moved + moved[partner]) / 2
        momentum += 0.3 * ((slow + slow[partner]) / 2 - slow)
        slow = slow + momentum
        return slow

    found = walk(lambda _: NoLoCoPolicy(3, pull=0.3), ranks=ranks)
    np.testing.assert_allclose(found.last, recursion(round_of, 3, ranks=ranks), **CLOSE)
    alone = [rank for rank in range(ranks) if found.infos[rank, 2]["donors"] == 0]
    assert alone == [rank for rank in range(ranks) if partner_of(rank, ranks, 7, 3) == rank]
    assert len(alone) == ranks % 2


def test_easgd_follows_its_recursion() -> None:
    """Ranks and the centre move towards each other; α = β/4."""
    centre = start()

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal centre
        pulled = weights - 0.2 * (weights - centre)
        centre = centre + 0.2 * (weights - centre).sum(axis=0)
        return pulled

    found = walk(lambda _: EASGDPolicy(3, moving_rate=0.8))
    np.testing.assert_allclose(found.last, recursion(round_of, 3), **CLOSE)


def test_edit_weighs_blocks_by_their_norms_and_clips() -> None:
    """Block by block: softmax of minus the norm, clip of what is merged, Nesterov."""
    theta, buffer = start(), np.zeros(WIDTH)

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, buffer
        delta = np.zeros(WIDTH)
        for part in LAYERS:
            moved = (theta - weights)[:, part]
            share = np.exp(-np.linalg.norm(moved, axis=1))
            merged = (share / share.sum()) @ moved
            delta[part] = merged * min(1, 0.2 / np.linalg.norm(merged))
        buffer = 0.8 * buffer + delta
        theta = theta - 0.7 * (delta + 0.8 * buffer)
        return np.tile(theta, (4, 1))

    found = walk(lambda _: EDiTPolicy(3, clip=0.2))
    np.testing.assert_allclose(found.last, recursion(round_of, 3), **CLOSE)


def test_edit_leaves_out_who_is_far_off() -> None:
    """A rank that jumps in one round counts for nothing there; if all do, the block goes back."""

    def jumping(ranks: set[int]) -> Any:
        class Jumping(EDiTPolicy):
            def turn(self, iteration: int, model: Any, *rest: Any) -> int:
                if iteration == 18 and self.outer.comm.Get_rank() in ranks:  # type: ignore[union-attr]
                    with torch.no_grad():
                        model[0].weight += 100.0
                return super().turn(iteration, model, *rest)

        return lambda _: Jumping(3, momentum=0.0, outliers=lambda: OutlierFilter(0.3, 3.0, 5))

    one = walk(jumping({2}), steps=18)
    assert abs(one.last - start()).max() < 5
    assert [(event["rank"], event["block"]) for event in one.run.events if event["kind"] == "outlier"] == [
        (2, 0)
    ]
    every = walk(jumping({0, 1, 2, 3}), steps=18)
    before = every.weights[0][14]  # what was agreed on in the round before
    np.testing.assert_array_equal(every.last[:, :6], np.tile(before[:6], (4, 1)))
    assert (every.last[0, 6:] != before[6:]).all()


def test_edit_by_the_clock_lets_fast_ranks_take_more_steps() -> None:
    """A rank twelve times slower: rounds every 50 ms, whoever is where, and all end with the same global weights."""
    found = walk(
        lambda _: EDiTPolicy(every_s=0.05), steps=40, pace=lambda rank: 0.12 if rank == 3 else 0.01, ranks=12
    )
    rounds = {
        rank: [step for step in range(40) if found.infos[rank, step]["averaged_this_iteration"]]
        for rank in (0, 3)
    }
    assert len(rounds[3]) == 39 or len(rounds[3]) == 40  # in each of its steps
    assert rounds[0][:3] == [4, 16, 28] or np.diff(rounds[0])[0] > 3
    assert all(info["wait_s"] < 0.13 for info in found.infos.values())


def test_sparta_averages_the_same_few_weights_everywhere() -> None:
    """A third of them in each step; the others stay apart."""
    mask = lambda iteration: RandomMask(1 / 3, 7, iteration).places(WIDTH)  # noqa: E731

    def round_of(number: int, weights: Weights) -> Weights:
        weights = weights.copy()
        weights[:, mask(number + 1)] = weights[:, mask(number + 1)].mean(axis=0)
        return weights

    found = walk(lambda _: SPARTAPolicy(share=1 / 3))
    np.testing.assert_allclose(found.last, recursion(round_of, 1), **CLOSE)
    assert found.infos[0, 5]["bytes"] == 3 * 8
    assert len({tuple(mask(iteration)) for iteration in range(12)}) > 6


# --------------------------------------------------------------------------------------------------------- compressed
def top(values: Weights, keep: int) -> Weights:
    """Return the largest magnitudes, all else 0."""
    found = np.zeros_like(values)
    places = np.argsort(-np.abs(values), kind="stable")[:keep]
    found[places] = values[places].astype(np.float32)
    return found


def test_sparseloco_remembers_what_it_leaves_out() -> None:
    """E ← .95e + Δ, the three largest of nine are sent and subtracted; plain outer SGD."""
    theta, errors = start(), np.zeros((4, WIDTH))

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, errors
        errors = 0.95 * errors + (theta - weights)
        sent = np.stack([top(each, 3) for each in errors])
        errors = errors - sent
        theta = theta - 0.4 * sent.mean(axis=0)
        return np.tile(theta, (4, 1))

    found = walk(lambda _: OuterOptimizerPolicy.sparseloco(3, compression=TopK(9, 3)))
    np.testing.assert_allclose(found.last, recursion(round_of, 3), **CLOSE)


@pytest.mark.parametrize("compression", [TopK(9, 3), LowBit(4)])
def test_ranks_of_one_process_decode_what_all_decode_once(compression: Any, monkeypatch: Any) -> None:
    """Codes of 20 ranks are decoded 20 times a round, not 400; models are what they were, to the last bit."""
    decoded: list[int] = []
    decode = type(compression).decode
    monkeypatch.setattr(
        type(compression),
        "decode",
        lambda codec, *codes: decoded.append(len(codes[0])) or decode(codec, *codes),
    )
    ends = []
    for kept in (outer_group.LONGEST_KEPT_NBYTES, -1):
        decoded.clear()
        monkeypatch.setattr(outer_group, "LONGEST_KEPT_NBYTES", kept)
        found = walk(lambda _: OuterOptimizerPolicy.sparseloco(3, compression=compression), ranks=20, steps=9)
        ends.append(found.last)
        # Each rank decodes its own once more, for what it leaves out.
        assert len(decoded) == 3 * (20 + (20 if kept > 0 else 400))
    assert (ends[0] == ends[1]).all()
    assert len(np.unique(ends[0], axis=0)) == 1


def test_demo_sends_cosine_coefficients_and_steps_by_signs() -> None:
    """M ← .9m + g; the two largest coefficients of three are sent and subtracted; Θ ← Θ − .01·sign(mean)."""
    at = np.arange(3)
    basis = np.sqrt(2 / 3) * np.cos(np.pi / 3 * np.outer(at, at + 0.5))
    basis[0] /= np.sqrt(2)
    theta, momentum = start(), np.zeros((4, WIDTH))

    def sent(values: Weights) -> Weights:
        kept = [top((basis @ chunk).astype(np.float32).astype(float), 2) for chunk in values.reshape(3, 3)]
        return np.concatenate([(chunk @ basis).astype(np.float32) for chunk in kept]).astype(float)

    def round_of(number: int, weights: Weights) -> Weights:
        nonlocal theta, momentum
        momentum = 0.9 * momentum + (theta - weights)
        parts = np.stack([sent(each) for each in momentum])
        momentum = momentum - parts
        theta = theta - 0.01 * np.sign(parts.mean(axis=0))
        return np.tile(theta, (4, 1))

    found = walk(lambda _: OuterOptimizerPolicy.demo(0.01, chunk=3, keep=2, decay=0.9))
    np.testing.assert_allclose(found.last, recursion(round_of, 1), **CLOSE)


# ---------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "make",
    [
        lambda: OuterOptimizerPolicy(0),
        lambda: OuterOptimizerPolicy(3, lr=-1),
        lambda: OuterOptimizerPolicy(3, momentum=1.0),
        lambda: OuterOptimizerPolicy(3, compression="gzip"),
        lambda: OuterOptimizerPolicy(3, feedback=2.0, compression="float16"),
        lambda: OuterOptimizerPolicy(3, fragmenter="random"),
        lambda: OuterOptimizerPolicy(4, fragments=2),
        lambda: StreamingDiLoCoPolicy(10, fragments=4),
        lambda: StreamingDiLoCoPolicy(12, overlap=12),
        lambda: StreamingDiLoCoPolicy(12, blend=1.5),
        lambda: OneRoundLatePolicy(5, penalty=0),
        lambda: OneRoundLatePolicy(5, clip=0.0),
        lambda: NoLoCoPolicy(5, compression="float16"),
        lambda: DecoupledDiLoCoPolicy(quorum=0),
        lambda: DecoupledDiLoCoPolicy(24, fragments=5),
        lambda: DecoupledDiLoCoPolicy(compression="float16"),
        lambda: EASGDPolicy(5, moving_rate=1.5),
        lambda: EDiTPolicy(5, clip=0),
        lambda: EDiTPolicy(every_s=-1.0),
        lambda: SPARTAPolicy(share=0.0),
        lambda: OutlierFilter(warm_up=1),
    ],
)
def test_bad_arguments_are_refused(make: Any) -> None:
    """At once, by name."""
    with pytest.raises(ParameterError):
        make()


def test_ranks_with_other_arguments_are_one_clear_error() -> None:
    """Both settings are named."""
    with pytest.raises(MismatchError, match=r"lr=0.7.*lr=0.5"):
        walk(lambda comm: OuterOptimizerPolicy.diloco(3, lr=0.5 if comm.Get_rank() == 2 else 0.7))


def test_more_fragments_than_blocks_are_refused() -> None:
    """With the number of blocks."""
    with pytest.raises(ParameterError, match="give 1 to 2"):
        walk(lambda _: StreamingDiLoCoPolicy(12, fragments=3))


@pytest.mark.parametrize("travels", [None, StateScope()])
def test_layers_that_are_unfrozen_later(travels: StateScope | None) -> None:
    """Without global weights they would stay each rank's own: one clear error; with them from the start, all is one."""

    def main(comm: Any) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
        model[0].requires_grad_(False)
        optimizer, policy = (
            torch.optim.SGD(model.parameters(), lr=0.1),
            OuterOptimizerPolicy.diloco(3, travels=travels),
        )
        for iteration in range(10):
            if iteration == 5:
                model[0].requires_grad_(True)
            with comm.compute(0.01):
                optimizer.zero_grad()
                model(torch.tensor(comm.rng("x").normal(size=(4, 4)), dtype=torch.float32)).sum().backward()
                optimizer.step()
            model, optimizer, _ = policy(iteration, model, optimizer, group=comm)
        sums = comm.allgather(sum(float(p.detach().sum()) for p in model.parameters()))
        assert len(set(sums)) == 1

    if travels is None:
        with pytest.raises(UsageError, match=r"2 tensors were frozen or unfrozen.*travels"):
            spawnsim.run(main, ranks=10)
    else:
        spawnsim.run(main, ranks=10)


def test_a_number_that_is_not_finite_is_the_others() -> None:
    """A rank with a NaN has not moved there; the others' mean heals it, and an event tells."""

    class Broken(OuterOptimizerPolicy):
        def turn(self, iteration: int, model: Any, *rest: Any) -> int:
            if iteration == 6 and self.outer.comm.Get_rank() == 1:  # type: ignore[union-attr]
                with torch.no_grad():
                    model[1].bias.fill_(math.nan)
            return super().turn(iteration, model, *rest)

    found = walk(lambda _: Broken(3))
    assert np.isfinite(found.last).all()
    assert [event["numbers"] for event in found.run.events if event["kind"] == "healed"] == [1]


# ---------------------------------------------------------------------------------------------------------- decoupled
def radial(parts: Weights, weights: list[float]) -> Weights:
    """Return the weighted mean of norms, in the weighted mean direction."""
    norms, shares = np.linalg.norm(parts, axis=1), np.array(weights)
    towards = (shares / norms) @ parts
    return (shares @ norms) / shares.sum() * towards / np.linalg.norm(towards)


def test_decoupled_learners_follow_their_recursion() -> None:
    """All push in the same steps: tensors merged radially, weights tokens²/steps, back in the next step."""
    tokens = [1.0, 2.0, 3.0, 1.0]
    theta, buffer = start(), np.zeros(WIDTH)
    weights = np.tile(theta, (4, 1))
    tensors = np.split(np.arange(WIDTH), [4, 6, 8])
    for step in range(1, 14):
        weights = weights + np.stack([drift(rank, step - 1) for rank in range(4)])
        if step % 3 == 1 and step > 1:
            weights = np.tile(theta, (4, 1))
        if step % 3 == 0:
            delta = np.zeros(WIDTH)
            for places in tensors:
                delta[places] = radial((theta - weights)[:, places], [(3 * each) ** 2 / 3 for each in tokens])
            buffer = 0.9 * buffer + delta
            theta = theta - 0.7 * (delta + 0.9 * buffer)

    def policy(comm: Any) -> DecoupledDiLoCoPolicy:
        return DecoupledDiLoCoPolicy(3, fragments=1, quorum=4, tokens=tokens[comm.Get_rank()])

    found = walk(policy, steps=13)
    np.testing.assert_allclose(found.last, weights, **CLOSE)
    assert found.infos[2, 3]["donors"] == 4
    assert found.infos[2, 3]["staleness"] == 1
    assert [event["learners"] for event in found.run.events if event["kind"] == "merge"] == [[0, 1, 2, 3]] * 4


def test_a_quorum_and_its_grace_window_say_who_is_merged() -> None:
    """Steps of 10 ms: a rank that is 5 ms late is waited for within a grace of two steps, and not without one."""
    for grace, learners in ((0.0, [0, 1]), (1.0, [0, 1, 2])):
        found = walk(
            lambda _, grace=grace: DecoupledDiLoCoPolicy(4, fragments=1, quorum=2, grace=grace),
            ranks=3, steps=5, pace=lambda rank: 0.0112 if rank == 2 else 0.01,
        )  # fmt: skip
        merges = [event["learners"] for event in found.run.events if event["kind"] == "merge"]
        assert merges[0] == learners, grace


@pytest.mark.parametrize("faults", ["crash:5@0.115s", "crash:0@0.115s; crash:1@0.3s", "pause:0@0.1s+0.2s"])
def test_nobody_waits_for_a_learner_that_is_gone(faults: str) -> None:
    """No recovery is called for: the others train and merge on, also without the rank that merged."""
    found = walk(
        lambda _: DecoupledDiLoCoPolicy(4, fragments=2, quorum=3),
        ranks=11,
        steps=60,
        faults=faults,
        deadline_s=5,
    )
    gone = {int(each.split(":")[1].split("@")[0]) for each in faults.split(";") if "crash" in each}
    merges = [event for event in found.run.events if event["kind"] == "merge"]
    late = [event for event in merges if 0.45 < event["time_s"] < 0.58]  # then ranks begin to leave
    assert {event["rank"] for event in late} == {min(set(range(11)) - gone)}
    assert len(late) > 4
    assert all(not gone & set(event["learners"]) for event in late)
    assert all(len(found.weights[rank]) == 60 for rank in set(range(11)) - gone)
    assert all(info["wait_s"] < 5e-3 for info in found.infos.values())
    assert abs(np.stack([found.weights[rank][-1] for rank in set(range(11)) - gone])).max() < 20


def leaving(comm: Any) -> None:
    """Train until it is this rank's time to leave."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = DecoupledDiLoCoPolicy(4, fragments=2, quorum=12)
    for iteration in range({1: 10, 0: 20, 2: 30}.get(comm.Get_rank(), 60)):
        with comm.compute(0.01):
            pass
        policy(iteration, model, optimizer, local_metric=0.0, group=comm)
    policy.shutdown()


def test_few_ranks_are_notified_of_a_leave_and_the_next_to_merge_notifies_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 leaves, then those that merge: the others follow, and wait for none that has gone."""
    monkeypatch.setattr(decoupled, "HEIRS", 2)
    run = spawnsim.run(leaving, ranks=15)
    merges = [event for event in run.events if event["kind"] == "merge"]
    for begin_s, rank, learners in ((0.12, 0, 14), (0.24, 2, 13), (0.34, 3, 12)):
        found = [event for event in merges if begin_s < event["time_s"] < begin_s + 0.07]
        assert len(found) >= 3
        assert {(event["rank"], len(event["learners"])) for event in found} == {(rank, learners)}


def test_the_radial_mean_keeps_its_length_whatever_the_number_of_learners() -> None:
    """The plain mean of M random directions shrinks by √M; norms are weighted, equal vectors stay, opposite ones go."""
    rng = np.random.default_rng(3)

    def flat(values: Weights) -> FlatFloats:
        return FlatFloats.of({"a": torch.from_numpy(values[:500]), "b": torch.from_numpy(values[500:])})

    for learners in (2, 8, 32):
        parts = [rng.normal(size=10_500) for _ in range(learners)]
        merged = radial_directional_mean([flat(part) for part in parts], [1.0] * learners)
        mean = float(np.mean([np.linalg.norm(part) for part in parts]))
        assert merged.norm() == pytest.approx(mean, rel=0.01)
        assert np.linalg.norm(np.mean(parts, axis=0)) == pytest.approx(mean / math.sqrt(learners), rel=0.05)
        plain = radial_directional_mean([flat(part) for part in parts], [2.0] * learners, lambda name: True)
        np.testing.assert_allclose(plain.tensors()["b"], np.mean(parts, axis=0)[500:], **CLOSE)
    one = flat(parts[0])
    np.testing.assert_allclose(
        radial_directional_mean([one, one], [1.0, 5.0]).tensors()["b"], parts[0][500:], **CLOSE
    )
    assert radial_directional_mean([flat(parts[0]), flat(-parts[0])], [1.0, 1.0]).norm() == 0


# ----------------------------------------------------------------------------------------------- deaths and newcomers
POLICIES: dict[str, Any] = {
    "diloco": lambda: OuterOptimizerPolicy.diloco(3),
    "sparseloco": lambda: OuterOptimizerPolicy.sparseloco(3, compression=TopK(4, 1)),
    "streaming": lambda: StreamingDiLoCoPolicy(6, fragments=2, overlap=2, blend=0.0),
    "decoupled": lambda: DecoupledDiLoCoPolicy(4, fragments=2, quorum=3),
    "co2": lambda: OneRoundLatePolicy.co2(3),
    "eager": lambda: OneRoundLatePolicy.eager(3),
    "noloco": lambda: NoLoCoPolicy(3),
    "easgd": lambda: EASGDPolicy(3),
    "edit": lambda: EDiTPolicy(3, clip=math.inf),
    "edit by the clock": lambda: EDiTPolicy(every_s=0.03),
    "sparta": lambda: SPARTAPolicy(3),
}
SAME = ("diloco", "sparseloco", "streaming", "co2", "easgd", "edit", "edit by the clock")
STAGES = (
    "crash:5@0.0001s",
    "crash:0@0.12s; crash:7@0.1202s",
    "crash:5@0.12s; restart:5@0.2s",
)


@pytest.mark.parametrize("faults", STAGES, ids=["first meeting", "two in a round", "restart"])
@pytest.mark.parametrize("name", POLICIES)
def test_deaths_and_newcomers_leave_one_state(name: str, faults: str) -> None:
    """Whenever ranks of eleven die, the others go on; global weights and momentum are again the same bits on all.

    Who is back has everything from the others, though it was built anew. (Late and pairwise policies have weights of
    each rank's own.)
    """
    ends: dict[int, tuple[Any, ...]] = {}

    def main(comm: Any) -> None:
        policy, model = POLICIES[name](), model_of(start() + comm.rank)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        group, step, rank = comm, 0, comm.rank
        while step < 36:
            try:
                with comm.compute(0.01):
                    move(model, torch.from_numpy(drift(rank, step)))
                model, optimizer, _ = policy(step, model, optimizer, None, group)
                step += 1
            except (RankFailed, Revoked, Timeout):
                found = group.recover(step)
                group, step = found.comm, found.step
        policy.shutdown()
        fragments = policy.outer.fragments
        state = tuple(
            each.numpy().tobytes() for f in fragments for each in (f.weights.memory, f.momentum.memory)
        )
        ends[rank] = state, policy.num_rounds, group.size, float(vector(model).abs().max())

    spawnsim.run(main, ranks=11, faults=faults, deadline_s=5.0)
    dead = {event for event in (0, 7) if "crash:0" in faults} or ({5} if "restart" not in faults else set())
    assert set(ends) == set(range(11)) - dead
    if name != "decoupled":  # which goes on without recovery, unless somebody joins
        assert {size for _, _, size, _ in ends.values()} == {11 - len(dead)}
    assert min(rounds for _, rounds, _, _ in ends.values()) >= 5
    assert max(largest for *_, largest in ends.values()) < 10
    if name in SAME:
        assert len({state for state, *_ in ends.values()}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("name", ["diloco", "streaming", "decoupled", "noloco", "easgd", "edit", "sparta"])
def test_every_dtype_and_a_large_model(name: str, dtype: torch.dtype) -> None:
    """In groups of a world, above the eager threshold: float tensors move as in float64, whole numbers stay."""
    ends: dict[int, torch.nn.Module] = {}

    def main(comm: Any) -> None:
        group = comm.Split(comm.rank % 2, 0)
        model: Any = Line(0.0, 40_000, dtype)
        model.register_buffer("count", torch.tensor(comm.rank))
        policy = POLICIES[name]()
        policy.attach(model, group)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 13):
            with torch.no_grad():
                model.weight += 1.0
                model.logZ += 1.0
            model, optimizer, _ = policy(step, model, optimizer, None, group)
            model.count += 1
        policy.shutdown()
        ends[comm.rank] = model

    spawnsim.run(main, ranks=5)
    for rank, model in ends.items():
        values = set(model.weight.detach().to(torch.complex128).tolist())
        assert len(values) == 1
        assert 4 < abs(values.pop()) < 100, "all ranks move alike, so each ends where its rule takes one rank"
        assert model.weight.dtype == dtype
        assert (
            int(model.count) == 12 + rank % 2
        )  # the lowest rank's at the beginning, and its own from then on


def test_a_round_reads_weights_after_batched_steps() -> None:
    """With `TrainingStep`, the weights that policies read are those of eager steps."""
    ends: dict[bool, list[float]] = {}

    def main(comm: Any) -> None:
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(8, 1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
        step, policy = TrainingStep(lambda model, x: model(x).square().mean()), OuterOptimizerPolicy.diloco(2)
        for iteration in range(9):
            with comm.compute(0.01):
                x = torch.from_numpy(comm.rng("data").normal(size=(16, 8))).float()
                step(model, optimizer, x)
            model, optimizer, _ = policy(iteration, model, optimizer, None, comm)
        policy.shutdown()
        comm.record(weight=model.weight.double().sum().item())

    for eager in (False, True):
        ends[eager] = spawnsim.run(main, ranks=6, eager=eager).table["weight"].tolist()
    np.testing.assert_allclose(ends[False], ends[True], rtol=1e-5)
    assert len(set(ends[True])) == 1
