"""bagua's names for averaging by the clock: a model is given an algorithm, and the training loop stays as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from policies.averaging.averagers import play, rows

from spawnsim.bagua import AsyncModelAverageAlgorithm, with_bagua
from spawnsim.errors import ParameterError, RankFailed, Revoked, Timeout, UsageError


class Model(torch.nn.Module):
    """Several dtypes, above the eager threshold, with batch norm's counter and a number without dimensions."""

    def __init__(self, value: float, width: int = 30_000) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), value))
        self.short = torch.nn.Parameter(torch.full((5,), value, dtype=torch.bfloat16))
        self.log_z = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
        self.norm = torch.nn.BatchNorm1d(3)


def train(comm: Any, model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take steps of 10 ms, towards this rank's number."""
    for _ in range(steps):
        with comm.compute(0.01):
            optimizer.zero_grad()
            ((model.log_z - comm.rank) ** 2).backward()
            optimizer.step()


def of(comm: Any, **more: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Return a model under the algorithm, and its optimizer."""
    model = Model(float(comm.rank + 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    algorithm = AsyncModelAverageAlgorithm(**({"sync_interval_ms": 40} | more))
    assert with_bagua(model, [optimizer], algorithm) is model
    return model, optimizer


def test_a_training_loop_stays_as_it_is() -> None:
    """All begin with rank 0's weights; what they learn apart is averaged while they go on."""

    def main(comm: Any) -> tuple[float, float, int]:
        model, optimizer = of(comm)
        begin = {float(x.detach()) for x in (*model.weight[[0, -1]], model.short[4], model.log_z)}
        assert begin == {1.0}
        train(comm, model, optimizer, 150)
        model.bagua_algorithm.abort(model)
        averagings = model.bagua_algorithm.policy.num_averagings
        return float(model.log_z.detach()), float(model.weight[0].detach()), averagings

    found = play(main, 4, stragglers="lognormal:0.3", seed=5)
    log_z, weight, averagings = (rows(found, i) for i in range(3))
    assert averagings.min() > 10
    assert np.ptp(log_z) < 1.0  # alone they end at 0, 1, 2, 3
    assert abs(log_z.mean() - 1.5) < 0.2
    assert set(weight) == {1.0}  # nobody had a gradient for it


@pytest.mark.parametrize("together", [True, False])
def test_abort_and_resume(together: bool) -> None:
    """As in bagua's own test: resume, train, abort, look, again and again. One rank may do so alone as well."""

    def main(comm: Any) -> list[int]:
        model, optimizer = of(comm, warmup_steps=3)
        counts = []
        for _ in range(3):
            model.bagua_algorithm.resume(model)
            train(comm, model, optimizer, 30)
            if together or comm.rank == 0:
                assert model.bagua_algorithm.abort(model)
                before = float(model.log_z.detach())
                comm.clock.sleep(0.2)
                assert float(model.log_z.detach()) == before
            counts.append(model.bagua_algorithm.policy.num_averagings)
        model.bagua_algorithm.shutdown()
        return counts

    found = play(main, 4)
    for counts in [found[rank] for rank in range(0 if together else 1, 4)]:  # alone, rank 0 rests for longer
        assert 3 <= counts[0] <= counts[1] - 3 <= counts[2] - 6


def test_parts_of_the_job_average_apart() -> None:
    """`process_group` is any communicator."""

    def main(comm: Any) -> float:
        model, part = Model(float(comm.rank)), comm.Split(comm.rank % 2, comm.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with_bagua(model, [optimizer], AsyncModelAverageAlgorithm(sync_interval_ms=40), process_group=part)
        train(comm, model, optimizer, 60)
        return float(model.weight[0].detach())

    assert play(main, 4) == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}


@pytest.mark.parametrize("warmup_steps", [0, 30])
def test_it_goes_on_with_the_survivors(warmup_steps: int) -> None:
    """After `recover()` the new communicator is the process group, in warm-up too."""

    def main(comm: Any) -> tuple[int, int, str]:
        model, optimizer = of(comm, warmup_steps=warmup_steps, patience_s=0.3)
        algorithm, step, before = model.bagua_algorithm, 0, 0
        while step < 80:
            try:
                train(comm, model, optimizer, 1)
                step += 1
                if step % 5 == 0:
                    algorithm.process_group.Barrier()
            except (RankFailed, Revoked, Timeout):
                found = algorithm.process_group.recover(step)
                algorithm.process_group, step = found.comm, found.step
                before = algorithm.policy.num_averagings
        return algorithm.process_group.size, algorithm.policy.num_averagings - before, algorithm.policy.status

    found = play(main, 4, faults="crash:0@0.155s")
    assert sorted(found) == [1, 2, 3]
    assert all(size == 3 and n >= 4 and status == "averaging" for size, n, status in found.values()), found


def test_misuse_is_refused() -> None:
    """Another model, a second algorithm, parameters that have no meaning."""

    def main(comm: Any) -> None:
        model, optimizer = of(comm)
        for call in (model.bagua_algorithm.abort, model.bagua_algorithm.resume):
            with pytest.raises(UsageError, match="another model"):
                call(Model(0.0, 3))
        with pytest.raises(UsageError, match="already"):
            with_bagua(model, [optimizer], AsyncModelAverageAlgorithm())
        with pytest.raises(UsageError, match="at least one optimizer"):
            with_bagua(Model(0.0, 3), [], AsyncModelAverageAlgorithm())

    play(main, 2)
    with pytest.raises(ParameterError):
        AsyncModelAverageAlgorithm("some")


def test_a_copy_of_the_model_is_a_plain_model() -> None:
    """It can be copied and pickled; a copy is not averaged."""

    def main(comm: Any) -> None:
        model, _ = of(comm)
        assert copy.deepcopy(model).bagua_algorithm is None
        assert pickle.loads(pickle.dumps(torch.nn.Sequential(model)))[0].bagua_algorithm is None

    play(main, 2)
