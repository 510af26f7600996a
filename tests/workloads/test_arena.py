"""The arena: many models in one tensor, trained as each would have been alone."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.random import Streams
from spawnsim.workloads import MLP, SGD, Arena, Digits

RANKS = 12


def crowd(ranks=RANKS, **how):
    """Return learners and their (model, optimizer), each rank from its own weights."""
    learners = [
        Digits(Streams(7, rank), rank, ranks, alpha=0.3, same_start=False, **how) for rank in range(ranks)
    ]
    return learners, [learner.build() for learner in learners]


def batches(learners):
    """Return the next batches of all ranks, (ranks, batch, 64) and (ranks, batch)."""
    chosen = torch.stack([learner.indices() for learner in learners])
    return learners[0].train.x[chosen], learners[0].train.y[chosen]


def filled(pairs):
    """Return an arena that has adopted these models and optimizers."""
    arena = Arena(pairs[0][0], len(pairs), lr=0.1, momentum=0.9)
    for row, (model, optimizer) in enumerate(pairs):
        arena.adopt(row, model, optimizer)
    return arena


def vector(model):
    """Return all weights of a model, end to end."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_losses_and_weights_equal_those_of_eager_training():
    """Thirty steps of all rows give each rank's own losses to 1e-6 and its weights to 1e-5."""
    learners, pairs = crowd()
    twins, alone = crowd()
    arena = filled(pairs)
    for _ in range(30):
        losses = arena.step(slice(None), *batches(learners))
        eager = torch.tensor([twin.step(*pair) for twin, pair in zip(twins, alone, strict=True)])
        torch.testing.assert_close(losses, eager, rtol=0, atol=1e-6)
    for (model, _), (other, _) in zip(pairs, alone, strict=True):
        torch.testing.assert_close(vector(model), vector(other), rtol=0, atol=1e-5)


def test_one_step_from_equal_weights_has_equal_losses():
    """The very same weights and batches: losses agree to 5e-7, for a slice and for a choice of rows."""
    learners, pairs = crowd()
    x, y = batches(learners)
    with torch.no_grad():
        eager = torch.stack(
            [nn.functional.cross_entropy(m(a), b) for (m, _), a, b in zip(pairs, x, y, strict=True)]
        )
    assert (filled(pairs).step(slice(None), x, y) - eager).abs().max() <= 5e-7
    rows = torch.tensor([5, 2])
    _, again = crowd()
    assert (filled(again).step(rows, x[rows], y[rows]) - eager[rows]).abs().max() <= 5e-7


def test_a_model_is_its_row():
    """Adopting keeps the weights; from then on a write on either side is seen on the other."""
    _, pairs = crowd()
    before = [vector(model) for model, _ in pairs]
    arena = filled(pairs)
    assert all(torch.equal(vector(m), b) for (m, _), b in zip(pairs, before, strict=True))
    model = pairs[3][0]
    arena.weights[3] = 0.0
    assert not vector(model).any()
    with torch.no_grad():
        model.stages()[0].bias.fill_(2.0)
    assert (arena.weights[3] == 2.0).sum() == 32 and not arena.weights[4].eq(2.0).any()
    assert arena.holds(3, model) and not arena.holds(4, model)


def test_a_model_that_left_its_row_is_noticed():
    """Giving a parameter other memory ends the tie, and adopting mends it."""
    _, pairs = crowd()
    arena, model = filled(pairs), pairs[3][0]
    model.stages()[0].bias.data = torch.ones(32)
    assert not arena.holds(3, model)
    arena.adopt(3, model)
    assert arena.holds(3, model) and (arena.weights[3] == 1.0).sum() == 32


def test_only_the_rows_that_were_asked_for_move():
    """A step of rows 5 and 2 trains these two, velocity included, and leaves the others."""
    learners, pairs = crowd()
    arena, rows = filled(pairs), torch.tensor([5, 2])
    before = arena.weights.clone()
    x, y = batches(learners)
    arena.step(rows, x[rows], y[rows])
    moved = (arena.weights != before).any(1)
    assert torch.equal(moved, (arena.velocity != 0).any(1)) and moved.nonzero().flatten().tolist() == [2, 5]


def test_a_choice_of_rows_trains_as_a_slice_does():
    """Both ways of naming rows give the same bits."""
    learners, pairs = crowd()
    _, others = crowd()
    x, y = batches(learners)
    one, other = filled(pairs), filled(others)
    one.step(slice(2, 5), x[2:5], y[2:5])
    other.step(torch.arange(2, 5), x[2:5], y[2:5])
    assert torch.equal(one.weights, other.weights) and torch.equal(one.velocity, other.velocity)


def test_eager_steps_and_arena_steps_take_turns():
    """The optimizer's momentum is the arena's velocity: alternating equals eager training."""
    learners, pairs = crowd()
    twins, alone = crowd()
    arena = filled(pairs)
    for step in range(6):
        if step % 2:
            arena.step(slice(None), *batches(learners))
        else:
            _ = [learner.step(*pair) for learner, pair in zip(learners, pairs, strict=True)]
        _ = [twin.step(*pair) for twin, pair in zip(twins, alone, strict=True)]
    torch.testing.assert_close(vector(pairs[7][0]), vector(alone[7][0]), rtol=0, atol=1e-6)


def test_each_row_has_its_own_learning_rate():
    """A row of rate 0 keeps its weights."""
    learners, pairs = crowd()
    arena = filled(pairs)
    arena.lr[4] = 0.0
    before = arena.weights.clone()
    arena.step(slice(None), *batches(learners))
    assert torch.equal(arena.weights[4], before[4]) and not torch.equal(arena.weights[5], before[5])


def test_zero_dim_parameters_have_their_place():
    """A scalar such as `logZ` is a column like any other."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return self.scale * x

    arena = Arena(Scaled(), 3, lr=0.5, loss=lambda out, y: (out - y).square().mean())
    losses = arena.step(slice(None), torch.ones(3, 1), torch.tensor([[2.0], [1.0], [0.0]]))
    assert losses.tolist() == [0.0, 1.0, 4.0] and arena.weights[:, 0].tolist() == [2.0, 1.0, 0.0]


def test_models_that_do_not_fit_are_refused():
    """Other shapes, other names, buffers and frozen parameters each end in a message that names them."""
    model, _ = Digits(Streams(7, 0), 0, 1).build()
    wide = MLP((64, 33, 10), torch.Generator())
    deep = MLP((64, 32, 32, 10), torch.Generator())
    arena = Arena(model, 2, lr=0.1)
    with pytest.raises(ParameterError, match=r"row 1: layers.0.weight is \(33, 64\)"):
        arena.adopt(1, wide)
    with pytest.raises(ParameterError, match=r"layers\.2\.bias"):
        arena.adopt(1, deep)
    with pytest.raises(UnsupportedError, match="buffers"):
        Arena(nn.BatchNorm1d(3), 2, lr=0.1)
    with pytest.raises(ParameterError, match="ranks=0"):
        Arena(model, 0, lr=0.1)


@pytest.mark.slow
def test_a_thousand_rows_train_at_least_twice_as_fast_together():
    """Against the leanest eager step (autograd takes twice as long again); a ratio, not a time, for slow machines."""
    learners, pairs = crowd(1000)
    arena = filled([(m, SGD(m.parameters(), lr=0.1, momentum=0.9)) for m, _ in pairs])

    def together():
        arena.step(slice(None), *batches(learners))

    def alone():
        _ = [learner.step(*pair) for learner, pair in zip(learners, pairs, strict=True)]

    def quickest(action, repeats=3):
        action()
        times = []
        for _ in range(repeats):
            start = time.process_time()  # others may use the machine
            action()
            times.append(time.process_time() - start)
        return min(times)

    assert quickest(together) < quickest(alone) / 2
