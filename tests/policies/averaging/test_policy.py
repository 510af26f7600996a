"""The policy form, and a thousand ranks of which some leave and return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies.averaging.averagers import flat, play, rows

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.plots import groups as figures
from spawnsim.policies.averaging import Exponential, Grid
from spawnsim.policies.base import blank_info
from spawnsim.policies.decentralized import DecentralizedAveragingPolicy
from spawnsim.policies.state.layout import Travels

STUDY = Path(__file__).parents[3] / "studies" / "groups.py"


def parts(comm: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return this rank's own model and optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    generator = torch.Generator().manual_seed(comm.rng.seed("model"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_models_agree(asynchronous: bool) -> None:
    """Eight ranks that average along an exponential graph agree after three rounds; info has all keys."""

    def main(comm: Any) -> tuple[np.ndarray, int]:
        model, optimizer = parts(comm)
        before = flat(model)
        every = 12 if asynchronous else 2  # what takes a few calls must not be due again before it is over
        how = {"matchmaking": Exponential(), "asynchronous": asynchronous}
        with DecentralizedAveragingPolicy(every, **how) as policy:
            averaged = 0
            for iteration in range(4 * every):
                with comm.compute(0.01):
                    pass
                model, optimizer, info = policy(iteration, model, optimizer, local_metric=1.0, group=comm)
                assert set(blank_info("none", every)) <= set(info)
                averaged += info["averaged_this_iteration"]
                assert info["group_size"] == 2 * info["averaged_this_iteration"]
            policy.averager.serve(0.1)
            assert policy.state_dict()["num_averagings"] == policy.num_averagings == averaged
        return before, flat(model), averaged

    returned = play(main, 8, stragglers="lognormal:0.3")
    before, after = rows(returned, 0), rows(returned, 1)
    np.testing.assert_allclose(after, np.broadcast_to(before.mean(axis=0), after.shape), atol=1e-9)
    assert min(averaged for _, _, averaged in returned.values()) >= 3


def test_asynchronous_steps_keep_what_training_adds() -> None:
    """The average comes as a delta: the sum over ranks of all that was added is still there."""

    def main(comm: Any) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy = DecentralizedAveragingPolicy(
            3, asynchronous=True, target_group_size=4, min_matchmaking_time=0.2, request_timeout=0.1
        )
        for iteration in range(60):
            with comm.compute(0.01 + 0.001 * comm.rank):
                model.weight.data += 1.0
            policy(iteration, model, optimizer, group=comm)
        policy.averager.serve(2.0)
        assert policy.num_averagings > 0
        return model.weight.item()

    assert sum(play(main, 4).values()) == pytest.approx(240.0)


def test_a_newcomer_takes_over_model_and_optimizer() -> None:
    """A rank that joins late has a donor's weights and Adam's moments before its first average."""

    def main(comm: Any) -> Any:
        model, optimizer = parts(comm)
        late = comm.rank == 3
        policy = DecentralizedAveragingPolicy(1000, load_state=True, matchmaking=Grid())
        for iteration in range(5 if late else 0, 10):
            if late:
                comm.clock.sleep(0.5)
            else:
                model(torch.from_numpy(comm.rng("data").normal(size=(4, 3)))).exp().sum().backward()
                optimizer.step()
                comm.clock.sleep(0.1)
            model, optimizer, info = policy(iteration, model, optimizer, group=comm)
            policy.averager.serve(0.1)
            if late:
                assert info["loaded_from_peer"]
                state = optimizer.state[model[0].weight]
                return flat(model), state["exp_avg"].numpy(), float(state["step"])
        policy.averager.serve(3.0)
        return None

    weights, moments, steps = play(main, 4)[3]
    assert np.isfinite(weights).all()
    assert np.abs(moments).max() > 0
    assert steps >= 1


def test_who_is_alone_searches_for_nobody() -> None:
    """The last survivor of a job took its whole `step_timeout` at each step, for a group that cannot be."""

    def main(comm: Any) -> float:
        model, optimizer = parts(comm)
        own = comm.Split(comm.rank)
        times = {"min_matchmaking_time": 0.3, "request_timeout": 0.1, "step_timeout": 1.0}
        with DecentralizedAveragingPolicy(1, target_group_size=2, **times) as policy:
            for iteration in range(10):
                policy(iteration, model, optimizer, group=own)
            return float(comm.clock.now())

    assert max(play(main, 12).values()) < 1.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_left_over_comes_to_the_checkpoint_before_the_others_give_up(asynchronous: bool) -> None:
    """Ten ranks in groups of three: one is late, and searches in vain while all others wait for it."""

    def main(comm: Any) -> float:
        model, optimizer = parts(comm)
        policy = DecentralizedAveragingPolicy(
            4, target_group_size=3, min_group_size=3, asynchronous=asynchronous
        )
        for iteration in range(4, 6):
            comm.clock.sleep(0.1 if comm.rank else 0.2)
            model, optimizer, _ = policy(iteration, model, optimizer, group=comm)
        comm.checkpoint(iteration=5, model=model, optimizer=optimizer, policy=policy)
        return float(comm.clock.now())

    ended_s = play(main, 10, deadline_s=20.0)
    assert len(ended_s) == 10
    assert max(ended_s.values()) < 12.0


def test_bad_parameters_are_refused() -> None:
    """By the constructor."""
    with pytest.raises(ParameterError, match="keeps or averages"):
        DecentralizedAveragingPolicy(1, travels=Travels(optimizer_state="reset"))


@pytest.mark.slow
def test_hundreds_of_ranks_of_which_some_leave_and_return() -> None:
    """256 ranks, 5 % leave and rejoin, stragglers: rounds end in time, groups are full, variance contracts."""
    parameters = {"rounds": 3, "leaving": 0.05, "group_size": 8}
    run = spawnsim.run(
        STUDY, ranks=256, platform="ethernet-10g", stragglers="lognormal:0.3", seed=7, parameters=parameters
    )
    table = run.table
    steps = ~np.isnan(table["value"])
    assert np.nanmax(table["late_s"]) < 1e-4  # nobody waits past its deadline
    rejoined = table["rejoined"][~np.isnan(table["rejoined"])]
    assert 5 <= len(rejoined) <= 24
    assert (rejoined == 1).all()
    assert steps.sum() + len(rejoined) == 3 * 256
    assert np.mean(table["group_size"][steps] == 8) > 0.6
    assert np.mean(table["group_size"][steps] == 0) < 0.02
    found = figures.contraction(table)
    assert found.variance[0] == pytest.approx(found.expected[0], rel=0.5)
    assert found.variance[2] < 0.05 * found.variance[0]
    assert figures.sizes(table).ranks.sum() == steps.sum()
    assert len(figures.figure(run, "dynamic").axes) == 2
