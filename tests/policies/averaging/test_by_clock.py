"""Averaging by the clock: contraction, warm-up, and abort and resume in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from policies.averaging.averagers import flat, play, rows

from spawnsim.bagua import AsyncModelAverageAlgorithm, with_bagua
from spawnsim.errors import ParameterError
from spawnsim.policies.asynchronous import AsyncModelAveragePolicy

MODES = ("all", "ring", "shift_one", "random")
every_mode = pytest.mark.parametrize("mode", MODES)


def model_of(comm: Any, *, same: bool = False) -> torch.nn.Module:
    """Return a small model with batch norm, in double precision, with this rank's (or everybody's) values."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    ).double()
    generator = torch.Generator().manual_seed(1 if same else comm.rng.seed("model"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def train(comm: Any, policy: Any, model: Any, steps: int, lr: float = 0.0) -> None:
    """Take steps of 20 ms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for iteration in range(steps):
        with comm.compute(0.02):
            pass
        policy(iteration, model, optimizer, group=comm)


@every_mode
@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_it_contracts_and_keeps_the_mean(mode: str, ranks: int) -> None:
    """Without learning, variance falls by orders of magnitude, and the mean over ranks stays, stragglers or not."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray]:
        model, policy = model_of(comm), AsyncModelAveragePolicy(mode, sync_interval_ms=50)
        before = flat(model)
        train(comm, policy, model, 200)
        policy.abort()
        after = flat(model)
        policy.shutdown()
        policy.shutdown()
        return before, after

    returned = play(main, ranks, stragglers="lognormal:0.2")
    before, after = rows(returned, 0), rows(returned, 1)
    assert np.abs(after.mean(axis=0) - before.mean(axis=0)).max() < 0.05
    if ranks > 1:
        assert after.var(axis=0).sum() < 1e-2 * before.var(axis=0).sum()


@every_mode
def test_equal_models_stay_bit_for_bit(mode: str) -> None:
    """Differences of equal weights are zero."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray]:
        model, policy = model_of(comm, same=True), AsyncModelAveragePolicy(mode, sync_interval_ms=50)
        before = flat(model)
        train(comm, policy, model, 50)
        assert policy.num_averagings > 0 or comm.size == 1
        return before, flat(model)

    assert all((before == after).all() for before, after in play(main, 6).values())


def test_random_pairs_contract_at_least_as_the_closed_form_says() -> None:
    """Independent random pairs shrink the variance by 1 − 1/(N − 1) each; here all take turns, which is quicker."""
    ratios, ranks = [], 8
    for seed in range(15):
        ticks: list[int] = []

        def main(comm: Any, ticks: list[int] = ticks) -> tuple[np.ndarray, np.ndarray]:
            model = torch.nn.Linear(20, 20).double()
            policy = AsyncModelAveragePolicy("random", sync_interval_ms=100)
            with torch.no_grad():
                model.weight.copy_(torch.from_numpy(comm.rng("values").normal(size=(20, 20))))
            before = flat(model)
            comm.clock.sleep(0.01 * comm.rank)
            train(comm, policy, model, 20)
            policy.abort()
            ticks.append(policy.num_averagings)
            return before, flat(model)

        returned = play(main, ranks, seed=seed)
        before, after = rows(returned, 0)[:, :400], rows(returned, 1)[:, :400]
        factor = (1 - 1 / (ranks - 1)) ** (sum(ticks) / 2)
        ratios.append(after.var(axis=0).sum() / before.var(axis=0).sum() / factor)
    assert 0.2 < np.mean(ratios) < 1.05


def test_local_steps_survive() -> None:
    """What a rank adds to its weights while an exchange is under way is still there afterwards: the delta rule."""

    def main(comm: Any) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        policy = AsyncModelAveragePolicy("all", sync_interval_ms=30)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.no_grad():
            model.weight.fill_(0.0)
        for iteration in range(100):
            with comm.compute(0.01 + 0.003 * comm.rank):
                model.weight.data += 1.0
            policy(iteration, model, optimizer, group=comm)
        policy.abort()
        return model.weight.item()

    returned = play(main, 4)
    assert sum(returned.values()) == pytest.approx(400.0)


@pytest.mark.parametrize("mode", MODES[1:])
def test_whole_numbers_keep_their_sum(mode: str) -> None:
    """Pairs used to round halves up on both sides: counters such as batch norm's rose above those of all ranks."""

    def main(comm: Any) -> int:
        model = torch.nn.BatchNorm1d(2)
        model.num_batches_tracked.fill_(7 * comm.rank % 5)
        policy = AsyncModelAveragePolicy(mode, sync_interval_ms=30)
        train(comm, policy, model, 100)
        policy.shutdown()
        return int(model.num_batches_tracked)

    found = play(main, 8, stragglers="lognormal:0.3")
    assert sum(found.values()) == sum(7 * rank % 5 for rank in range(8))
    assert max(found.values()) - min(found.values()) <= 2


@pytest.mark.parametrize("through", ["policy", "bagua"])
def test_warm_up_averages_gradients(through: str) -> None:
    """Adam on ranks with different data steps as one rank on all data would, until warm-up ends; then by the clock."""
    batches = torch.randn(6, 4, 8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    alone = torch.nn.Linear(3, 2).double()
    start = {name: value.clone() for name, value in alone.state_dict().items()}
    reference = torch.optim.Adam(alone.parameters(), lr=0.1)
    for step in range(5):
        reference.zero_grad()
        torch.stack([loss_of(alone, batches[step, rank]) for rank in range(4)]).mean().backward()
        reference.step()

    def main(comm: Any) -> np.ndarray:
        model = torch.nn.Linear(3, 2).double()
        model.load_state_dict(start)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if through == "bagua":
            with_bagua(
                model, [optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=1000, warmup_steps=5), comm
            )
            policy = model.bagua_algorithm.policy
        else:
            policy = AsyncModelAveragePolicy("all", sync_interval_ms=1000, warmup_steps=5)
            policy.attach(model, optimizer, comm)
        for step in range(6):
            with comm.compute(0.01):
                optimizer.zero_grad()
                loss_of(model, batches[step, comm.rank]).backward()
                optimizer.step()
            if through == "policy":
                model.eval()
                policy(step, model, optimizer, group=comm)  # evaluation counts no step
                model.train()
                assert policy.status == ("warming up" if step < 5 else "averaging")
                policy(step, model, optimizer, group=comm)
            if step == 4:
                after = flat(model)
        assert (flat(model) != after).any()  # the sixth step was the rank's own
        return after

    returned = play(main, 4)
    for after in returned.values():
        np.testing.assert_allclose(after, flat(alone), atol=1e-12)


def test_abort_and_resume_in_warm_up_count_later() -> None:
    """The last call holds when warm-up ends: averaging goes on after abort + resume, and stays off after abort."""

    def main(comm: Any) -> tuple[int, int, int]:
        policy, model = AsyncModelAveragePolicy("all", sync_interval_ms=40, warmup_steps=3), model_of(comm)
        train(comm, policy, model, 1)
        policy.abort()
        policy.resume()
        train(comm, policy, model, 30)
        on = policy.num_averagings
        policy.abort()
        policy.abort()
        train(comm, policy, model, 30)
        off = policy.num_averagings - on
        policy.resume()
        train(comm, policy, model, 30)
        return on, off, policy.num_averagings - on - off

    for on, off, again in play(main, 4).values():
        assert on >= 3
        assert off <= 1  # the round that counted on this rank
        assert again >= 3


def test_aborted_ranks_are_left_alone() -> None:
    """Their weights stay; the others agree without them, and do not wait for them, nor for those that have left."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray, float]:
        policy, model = AsyncModelAveragePolicy("all", sync_interval_ms=40), model_of(comm)
        train(comm, policy, model, 1)
        if comm.rank in (0, 3):
            policy.abort()
        if comm.rank == 5:
            policy.shutdown()
            return flat(model), flat(model), 0.0
        before = flat(model)
        train(comm, policy, model, 100)
        began_s = comm.clock.now()
        policy.shutdown()
        return before, flat(model), comm.clock.now() - began_s

    returned = play(main, 8)
    assert all((returned[rank][0] == returned[rank][1]).all() for rank in (0, 3))
    others = np.stack([returned[rank][1] for rank in (1, 2, 4, 6, 7)])
    assert others.var(axis=0).max() < 1e-12
    assert max(wait_s for _, _, wait_s in returned.values()) < 1.0


@every_mode
def test_a_storm_of_aborts_and_resumes(mode: str) -> None:
    """Random sequences on five ranks: never a hang, no wait beyond patience, and the last call counts everywhere."""

    def main(comm: Any) -> float:
        rng, longest = comm.rng("storm"), 0.0
        for sequence in range(20):
            warm = sequence % 3
            policy = AsyncModelAveragePolicy(
                mode, sync_interval_ms=20, warmup_steps=warm, patience_s=0.2, tag=7201 + sequence
            )
            model = torch.nn.Linear(2, 1)
            train(comm, policy, model, warm + 1)
            for call in rng.integers(0, 4, rng.integers(1, 9)):
                began_s = comm.clock.now()
                if call == 0:
                    policy.abort()
                elif call == 1:
                    policy.resume()
                else:
                    train(comm, policy, model, int(rng.integers(1, 4)))
                    continue
                longest = max(longest, comm.clock.now() - began_s)
                assert policy.status == ("stopped" if call == 0 else "averaging")
            last = rng.random() < 0.5
            policy.resume() if last else policy.abort()
            train(comm, policy, model, 1)
            assert (policy.status == "averaging") == last
            before, weights = policy.num_averagings, flat(model)
            train(comm, policy, model, 20)
            if not last:
                assert policy.num_averagings == before
                assert (flat(model) == weights).all()
            policy.shutdown()
        return longest

    assert max(play(main, 5, stragglers="lognormal:0.3").values()) < 0.25


def test_in_the_background() -> None:
    """Averaging goes on beside a loop that holds the weights only while it changes them."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray]:
        model = model_of(comm)
        policy = AsyncModelAveragePolicy("all", sync_interval_ms=40, background=True)
        before = flat(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy(0, model, optimizer, group=comm)
        for _ in range(10):
            with policy.weights(), comm.compute(0.02):
                pass
            comm.clock.sleep(0.05)
        policy.shutdown()
        return before, flat(model)

    returned = play(main, 5)
    before, after = rows(returned, 0), rows(returned, 1)
    assert after.var(axis=0).max() < 1e-3
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0), atol=1e-9)


@pytest.mark.parametrize(
    "bad", [{"peer_selection_mode": "some"}, {"sync_interval_ms": 0}, {"warmup_steps": -1}, {"patience_s": 0}]
)
def test_bad_parameters_are_refused(bad: dict[str, Any]) -> None:
    """By the constructor."""
    with pytest.raises(ParameterError):
        AsyncModelAveragePolicy(**bad)
