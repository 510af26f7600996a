"""Vectors above the eager threshold, several dtypes, models with BatchNorm: a healthy network averages all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies.averaging.averagers import QUICK, averager_of, play

import spawnsim
from spawnsim.policies.averaging import Everyone
from spawnsim.policies.decentralized import DecentralizedAveragingPolicy


def tensors_of(rank: int, count: int, *, many: bool = False) -> list[torch.Tensor]:
    """Return a large float32 tensor and a small int64 one, as models with BatchNorm have; or more kinds."""
    tensors = [torch.full((count,), float(rank)), torch.full((3,), 6 * rank, dtype=torch.int64)]
    others = [
        torch.full((33,), float(rank)).bfloat16(), torch.tensor(float(rank)),
        torch.full((5,), rank, dtype=torch.float64),
    ]  # fmt: skip
    return tensors + others if many else tensors


@pytest.mark.parametrize(
    ("ranks", "count", "platform", "many"),
    [
        (2, 1_582_295, "ethernet-10g", True), (4, 300_000, "wan-volunteers", False), (5, 300_000, "laptop", True),
        (8, 1_000_000, "infiniband-hdr", False), (10, 100_000, None, True),
    ],
)  # fmt: skip
def test_a_step_averages_everything(ranks: int, count: int, platform: str | None, many: bool) -> None:
    """All ranks, in all elements, to the exact mean; and the result says so."""

    def main(comm: Any) -> Any:
        values = tensors_of(comm.rank, count, many=many)
        averager = averager_of(comm, values, target_group_size=ranks)
        result = averager.step()
        averager.serve(0.2)
        averager.shutdown()
        return result, values

    mean = (ranks - 1) / 2
    for result, values in play(main, ranks, platform=platform).values():
        assert sorted(result) == list(range(ranks))
        assert (result.complete, result.received, result.missing) == (True, 1.0, {})
        for tensor in values:
            wanted = 6 * mean if tensor.dtype == torch.int64 else mean
            assert torch.equal(tensor, torch.full_like(tensor, wanted))


@pytest.mark.parametrize(("asynchronous", "matchmaking"), [(False, None), (True, Everyone())])
def test_models_with_batch_norm(asynchronous: bool, matchmaking: Any) -> None:
    """Eight ranks, half a megabyte: each average is whole, nobody waits for a time-out."""
    seen: list[tuple[bool, bool, float, int]] = []

    def main(comm: Any) -> None:
        generator = torch.Generator().manual_seed(comm.rng.seed("model"))
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 2000), torch.nn.BatchNorm1d(2000), torch.nn.Linear(2000, 1)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model[1].num_batches_tracked += 8 * comm.rank
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = DecentralizedAveragingPolicy(
            20, asynchronous=asynchronous, matchmaking=matchmaking, target_group_size=8, **QUICK
        )
        for iteration in range(61):
            with comm.compute(0.05):
                pass
            model, optimizer, info = policy(iteration, model, optimizer, group=comm)
            if info["averaged_this_iteration"]:
                seen.append((info["complete"], info["received"] == 1, info["wait_s"], info["group_size"]))
        policy.averager.serve(0.5)
        policy.shutdown()

    spawnsim.run(main, ranks=8, platform="ethernet-10g", seed=0)
    assert len(seen) >= 16
    assert all(complete and whole for complete, whole, _, _ in seen)
    assert max(wait_s for _, _, wait_s, _ in seen) < 2.0


def test_an_average_that_takes_longer_than_any_deadline() -> None:
    """20 MB over home links take 20 s. `timeout` and the communicator's deadline bound waits, not the whole."""

    def main(comm: Any) -> tuple[float, bool]:
        values = torch.full((5_000_000,), float(comm.rank))
        averager = averager_of(comm, [values], target_group_size=3)
        result = averager.step(timeout=3.0)
        took_s = comm.clock.now()
        averager.serve(30.0)
        return took_s, result.complete and bool((values == 1).all())

    took = play(main, 3, platform="wan-volunteers", deadline_s=8.0)
    assert all(whole for _, whole in took.values())
    assert max(seconds for seconds, _ in took.values()) > 15
