"""HyperGrid and the flow network on it, held to the exact distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.random import Streams
from spawnsim.workloads import Digits, GFlowNet, HyperGrid
from spawnsim.workloads.gflownet import balance, distribution, l1_distance, sample


def trained(steps=300, **how):
    """Return a learner, its model and its losses after some steps."""
    flow = GFlowNet(Streams(7, 0), **how)
    model, optimizer = flow.build()
    return flow, model, [flow.step(model, optimizer).item() for _ in range(steps)]


def test_the_reward_is_the_papers():
    """Corner, rim, mode and middle of the 8 x 8 grid by hand."""
    grid = HyperGrid()
    states = torch.tensor([[0, 0], [1, 0], [1, 1], [1, 6], [3, 3], [1, 3]])
    torch.testing.assert_close(grid.reward(states), torch.tensor([0.6, 0.6, 2.6, 2.6, 0.1, 0.1]))
    assert grid.is_mode(states).tolist() == [False, False, True, True, False, False]


@pytest.mark.parametrize(
    ("dimensions", "height", "modes"), [(2, 8, 4), (4, 8, 16), (2, 16, 4), (2, 32, 36), (1, 31, 4)]
)
def test_modes_are_counted_and_symmetric(dimensions, height, modes):
    """Mirroring the grid maps modes to modes: no rounding at 0.3 and 0.4."""
    grid = HyperGrid(dimensions, height)
    states = grid.states()
    assert grid.is_mode(states).sum() == modes
    assert torch.equal(grid.is_mode(states), grid.is_mode(height - 1 - states))


def test_states_and_numbers_are_inverse():
    """State number n is the n-th state."""
    grid = HyperGrid(3, 5)
    assert torch.equal(grid.number(grid.states()), torch.arange(125))


def test_the_distribution_of_any_policy_sums_to_one():
    """All flow that enters the grid ends in some state, for an untrained model too."""
    model, _ = GFlowNet(Streams(7, 0), HyperGrid(3, 4), learned_backward=True).build()
    assert distribution(model).sum().item() == pytest.approx(1.0, abs=1e-6)


def test_samples_follow_the_exact_distribution():
    """20,000 trajectories against the enumeration; both ways of sampling give the same trajectories."""
    flow = GFlowNet(Streams(7, 0), HyperGrid(2, 4), batch=20_000)
    model, _ = flow.build()
    counts = np.bincount(flow.grid.number(sample(model, flow.luck()).final), minlength=16) / 20_000
    np.testing.assert_allclose(counts, distribution(model), atol=0.012)


def test_both_ways_of_sampling_agree(monkeypatch):
    """A pass over the whole grid or one per action: the same trajectories from the same stream."""
    flow, again = (GFlowNet(Streams(7, 0)) for _ in range(2))
    model, _ = flow.build()
    by_table = sample(model, flow.luck())
    monkeypatch.setattr("spawnsim.workloads.gflownet.STATES_PER_CALL", 0)
    by_calls = sample(model, again.luck())
    assert torch.equal(by_table.final, by_calls.final) and torch.equal(by_table.actions, by_calls.actions)


def test_trajectories_lead_from_the_origin_to_their_ends():
    """Replaying each trajectory's actions arrives where it says; every last action stops."""
    flow = GFlowNet(Streams(7, 0), epsilon=0.5)
    paths = sample(flow.build()[0], flow.luck(), 0.5)
    for path in range(flow.batch):
        actions = paths.actions[paths.alive[:, path], path].tolist()
        assert actions[-1] == 2 and 2 not in actions[:-1]
        assert [actions.count(0), actions.count(1)] == paths.final[path].tolist()


def test_a_balanced_flow_has_no_loss():
    """On a line of two points the answer is known: P(stop at 0) = R(0)/Z."""
    flow = GFlowNet(Streams(7, 0), HyperGrid(1, 2))
    model, _ = flow.build()
    z = flow.grid.reward(flow.grid.states()).sum()
    with torch.no_grad():
        for p in model.net.parameters():
            p.zero_()  # both actions equally likely, and so are the two rewards
        model.logZ.fill_(z.log())
    assert balance(model, sample(model, flow.luck())).item() == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("learned_backward", [False, True])
def test_training_approaches_the_true_distribution(learned_backward):
    """300 steps on 8 x 8: the loss falls fifty-fold, Z comes out right, and all four modes are found."""
    flow, model, losses = trained(learned_backward=learned_backward)
    assert l1_distance(model) < 0.15 < 1.2 < l1_distance(flow.build()[0])
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) / 50
    assert model.logZ.exp().item() == pytest.approx(
        flow.grid.reward(flow.grid.states()).sum().item(), rel=0.1
    )
    assert flow.modes_found == 4


def test_models_are_computed_together():
    """On virtual ranks a step of all is one call: of the digits, too."""

    def main(comm, learner):
        own = learner(comm)
        model, optimizer = own.build()
        for _ in range(6):
            with comm.compute(0.01):
                loss = own.step(model, optimizer)
            comm.record(loss=float(loss))

    for learner in (
        lambda comm: GFlowNet(comm.rng),
        lambda comm: GFlowNet(comm.rng, learned_backward=True),
        lambda comm: Digits(comm.rng, comm.rank, comm.size),
    ):
        result = spawnsim.run(lambda comm, learner=learner: main(comm, learner), ranks=12, check_steps=True)
        assert "warnings" not in result.what
        assert result.totals["digest"].startswith("batched-")


def test_found_modes_are_modes_and_are_fresh_once():
    """Each mode is fresh in the step that found it, and in no other."""
    flow = GFlowNet(Streams(7, 0))
    model, optimizer = flow.build()
    seen: list[int] = []
    for _ in range(60):
        flow.step(model, optimizer)
        seen += flow.fresh
    assert len(seen) == len(set(seen)) == flow.modes_found and set(seen) == flow.found
    assert flow.grid.is_mode(flow.grid.state(torch.tensor(seen))).all()


def test_the_same_seed_trains_alike_and_another_rank_differently():
    """Losses are a function of (seed, rank)."""

    def losses(rank):
        flow = GFlowNet(Streams(7, rank))
        pair = flow.build()
        return [flow.step(*pair).item() for _ in range(5)]

    assert losses(0) == losses(0) != losses(1)


def test_log_z_is_a_scalar_parameter_with_its_own_rate():
    """0-dim, in `state_dict`, and faster than the network."""
    model, optimizer = GFlowNet(Streams(7, 0), lr=1e-3, lr_logZ=0.5).build()
    assert model.logZ.shape == () and "logZ" in model.state_dict()
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 0.5]


@pytest.mark.parametrize("wrong", [{"dimensions": 0}, {"height": 1}, {"r0": 0.0}, {"r2": -1.0}])
def test_grids_that_cannot_be_are_refused(wrong):
    """The message shows the grid that was asked for."""
    with pytest.raises(ParameterError, match=f"{next(iter(wrong))}="):
        HyperGrid(**wrong)


def test_a_vast_grid_is_trained_on_but_not_enumerated():
    """16^8 states: a step works, the exact distribution says why it does not."""
    _, model, losses = trained(steps=1, grid=HyperGrid(8, 16), batch=4)
    assert np.isfinite(losses[0])
    with pytest.raises(ParameterError, match="enumerate"):
        distribution(model)
    with pytest.raises(ParameterError, match="epsilon=2"):
        GFlowNet(Streams(7, 0), epsilon=2)
