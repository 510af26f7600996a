"""Digits: shards that ranks agree on without talking, and a training step that is both quick and right."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import spawnsim.workloads.digits
from spawnsim.errors import ParameterError, UsageError
from spawnsim.random import Streams
from spawnsim.workloads import Digits
from spawnsim.workloads.digits import _load, load, shard


def learner(rank=0, size=4, seed=7, **how):
    """Return one rank's learner, without any communicator."""
    return Digits(Streams(seed, rank), rank, size, **how)


def same(a, b):
    """Return whether two models have equal bits."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_every_image_is_either_trained_on_or_held_out():
    """The two splits hold all 1,797 images, and all ten digits each."""
    train, test = load()
    assert len(train.x) == 1438 and len(test.x) == 359
    assert len(set(train.labels)) == len(set(test.labels)) == 10


def test_images_are_read_once_and_cannot_be_written():
    """All ranks of a process share one read-only copy."""
    train, _ = load()
    assert load()[0] is train and learner().train is train
    with pytest.raises(ValueError, match="read-only"):
        train.labels[0] = 3


@pytest.mark.parametrize("alpha", [None, 0.1, 10.0])
@pytest.mark.parametrize("size", [1, 4, 44])
def test_shards_of_few_ranks_are_disjoint_and_of_one_size(size, alpha):
    """No image is on two ranks while there are enough for all."""
    shards = [shard(rank, size, 7, alpha=alpha) for rank in range(size)]
    assert {len(s) for s in shards} == {1438 // size}
    assert len(np.unique(np.concatenate(shards))) == size * (1438 // size)


@given(rank=st.integers(0, 999), seed=st.integers(0, 2**32), alpha=st.sampled_from([None, 0.001, 0.3, 100.0]))
def test_each_of_a_thousand_ranks_has_the_minimum(rank, seed, alpha):
    """More ranks than the data can feed draw from their own mixture, with replacement."""
    assert len(shard(rank, 1000, seed, alpha=alpha, minimum=32)) == 32


def test_a_small_alpha_leaves_a_rank_with_few_digits_and_a_large_one_with_all():
    """The concentration does what the paper says."""
    labels = load()[0].labels

    def kinds(alpha):
        return np.mean([len(set(labels[shard(rank, 1000, 7, alpha=alpha)])) for rank in range(100)])

    assert kinds(0.03) < 2.5 < 8 < kinds(100.0)


def test_shards_depend_on_the_seed_alone():
    """Asking in another order, or twice, gives the same shard; another seed another one."""
    backwards = [shard(rank, 10, 7, alpha=0.3) for rank in reversed(range(10))][::-1]
    assert all(np.array_equal(backwards[rank], shard(rank, 10, 7, alpha=0.3)) for rank in range(10))
    assert not np.array_equal(shard(0, 10, 7), shard(0, 10, 8))


def test_batches_pass_through_the_whole_shard():
    """Each pass shows every image of the shard once."""
    digits = learner(size=44, batch=8)
    drawn = torch.cat([digits.indices() for _ in range(4)])
    assert sorted(drawn.tolist()) == sorted(digits.shard.tolist())


def test_ranks_start_alike_or_not_as_asked_and_a_rebuilt_model_is_new():
    """`same_start` decides; a second build never repeats the first."""
    first, second = learner(0), learner(1)
    (a, _), (b, _) = first.build(), second.build()
    assert same(a, b) and not same(a, first.build()[0])
    assert not same(learner(0, same_start=False).build()[0], learner(1, same_start=False).build()[0])


def test_nothing_draws_from_the_global_generators():
    """Building and training leave torch's and numpy's shared states as they were: ranks stay uncoupled."""
    torch.manual_seed(3)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    digits = learner()
    digits.step(*digits.build())
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(numpy_before, np.random.get_state()[1])


def test_frozen_parameters_stay():
    """A frozen first layer does not move; the second does."""
    digits = learner()
    model, optimizer = digits.build()
    first, second = model.stages()
    first.requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    digits.step(model, optimizer)
    assert torch.equal(first.weight, before[0]) and torch.equal(first.bias, before[1])
    assert not torch.equal(second.weight, before[2])


def test_any_classifier_and_any_optimizer_will_do():
    """A model of the user's own trains by autograd, with torch's optimizers."""
    digits = learner()
    model = nn.Sequential(nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = [digits.step(model, optimizer) for _ in range(60)]
    assert losses[-1] < losses[0] / 2


def test_one_rank_learns_to_read():
    """The whole training set, 400 steps: nine digits of ten that were never seen are named right."""
    digits = learner(size=1)
    model, optimizer = digits.build()
    assert digits.accuracy(model) < 0.3
    for _ in range(400):
        digits.step(model, optimizer)
    assert digits.accuracy(model) > 0.9


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "nonsense"},
        {"rank": 4},
        {"alpha": 0.0},
        {"alpha": "none"},
        {"alpha": float("nan")},
        {"minimum": 0},
        {"batch": 0},
        {"hidden": (0,)},
        {"lr": -1.0},
    ],
)
def test_wrong_parameters_are_refused(wrong):
    """Each with its name and value in the message."""
    with pytest.raises(ParameterError, match=next(iter(wrong)).replace("hidden", "widths")):
        learner(**wrong).build()


def test_a_missing_scikit_learn_names_the_extra(monkeypatch):
    """The message is the command that mends it."""
    _load.cache_clear()
    monkeypatch.setattr(spawnsim.workloads.digits, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'spawnsim\[demo\]'"):
        load()


def test_the_images_are_those_of_scikit_learn():
    """All 1,797, in its order; reading them loads nothing of it, which would take longer than a short training."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    rows = spawnsim.workloads.digits._rows()
    assert np.array_equal(rows[:, :-1], x) and np.array_equal(rows[:, -1], y)
    program = (
        "import sys; from spawnsim.workloads.digits import load; load(); assert 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
