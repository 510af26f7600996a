"""The mean model over time is the mean of what all ranks held, whoever was slow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.policies import Consensus


class Mixed(torch.nn.Module):
    """Parameters of 80 kB, which go by rendezvous, a float64 one, a buffer, and a counter that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.zeros(20_000))
        self.exact = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.register_buffer("running", torch.zeros(2, dtype=torch.float16))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_means_are_of_what_each_rank_held_then() -> None:
    """12 ranks of which some are four times slower; a rank holds k after its k-th step, at every other one anew."""
    ends_s: dict[int, list[float]] = {}

    def main(comm: Any) -> None:
        model = Mixed()
        consensus = Consensus(comm, model, every_s=0.0233)
        ends_s[comm.rank] = []
        for step in range(1, 11):
            with comm.compute(0.01):
                pass
            ends_s[comm.rank].append(comm.clock.now())
            if step % 2:
                model.load_state_dict({name: each + 1 for name, each in model.state_dict().items()})
            else:  # a replaced rank may get another model
                old, model = model, Mixed()
                model.load_state_dict({name: each + 1 for name, each in old.state_dict().items()})
            consensus.passed(model)
        for at_s, mean in consensus.means():
            for value in (mean.wide[0], mean.wide[-1], mean.exact[2], mean.running[1]):
                comm.record.event("mean", at_s=at_s, value=value.item(), places=str(value.dtype))

    run = spawnsim.run(main, ranks=12, stragglers="slow:0.3,4", deadline_s=0.1, seed=1)
    lasted = {ends[-1] for ends in ends_s.values()}
    assert max(lasted) > 3 * min(lasted)
    assert {event["rank"] for event in run.events} == {0}
    times = sorted({event["at_s"] for event in run.events})
    assert np.allclose(times, 0.0233 * np.arange(len(times)))
    assert times[-1] <= max(lasted) < times[-1] + 0.0233
    for event in run.events:
        held = [sum(end <= event["at_s"] for end in ends) for ends in ends_s.values()]
        exact = {"torch.float16": 5e-3}.get(event["places"], 1e-6)
        assert event["value"] == pytest.approx(np.mean(held), rel=exact)


def test_a_period_is_above_zero() -> None:
    """Said where the object is made."""
    with pytest.raises(ParameterError, match="every_s=0: give seconds above 0"):
        Consensus(None, torch.nn.Linear(1, 1), every_s=0)  # type: ignore[arg-type]
