"""Handwritten digits: a small classifier per rank, each on its own shard of real data.

The data are the UCI digits (1,797 images of 8 x 8 pixels, shipped with scikit-learn). Shards are pure functions of
(labels, number of ranks, seed): ranks agree on them without communication. The label skew follows Hsu, Qi and Brown
(2019), arXiv:1909.06335: every rank draws its own mixture of classes from a symmetric Dirichlet(alpha), and its
samples from that mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from spawnsim.errors import ParameterError, UsageError
from spawnsim.random import WORLD, Streams, generator
from spawnsim.training import Evaluation, TrainingStep
from spawnsim.workloads.mlp import MLP

Indices = NDArray[np.int64]
Floats = NDArray[np.float64]


def check_shard(rank: int, size: int, minimum: int, alpha: Any) -> None:
    """Raise `ParameterError` unless the arguments describe a rank's shard."""
    if not 0 <= rank < size:
        raise ParameterError(f"rank={rank}, size={size}: rank must be in 0..size-1")
    if minimum < 1:
        raise ParameterError(f"minimum={minimum}: give at least 1 sample for each rank")
    if alpha is not None and not (isinstance(alpha, Real) and 0 < float(alpha) < np.inf):
        raise ParameterError(f"alpha={alpha!r}: give a positive number, or None for an even split")


def mixture(labels: Indices, seed: int, rank: int, alpha: float | None) -> Floats:
    """Return the rank's class probabilities, (classes,) float64; the data's frequencies without alpha.

    They depend on (seed, rank) alone: the same rank has the same mixture in a larger world.
    """
    counts = np.bincount(labels)
    if alpha is None:
        return np.asarray(counts / counts.sum(), np.float64)
    return generator(seed, rank, "shards.mixture").dirichlet(np.full(len(counts), alpha))


def partition(labels: Indices, size: int, seed: int, alpha: float | None) -> list[Indices]:
    """Assign samples to ranks, each at most once: `len(labels) // size` for every rank; the rest stays unassigned.

    Under a Dirichlet split a class may run out; ranks served later then draw from their other classes.
    """
    rng = generator(seed, WORLD, "shards.partition")
    order, share = rng.permutation(len(labels)), len(labels) // size
    if alpha is None:
        return [order[r * share : (r + 1) * share] for r in range(size)]
    pools = [list(order[labels[order] == c]) for c in range(labels.max() + 1)]
    return [_deal(pools, mixture(labels, seed, r, alpha), share, rng) for r in range(size)]


def _deal(pools: list[list[int]], taste: Floats, share: int, rng: np.random.Generator) -> Indices:
    taken: list[int] = []
    while len(taken) < share:
        stocked = np.array([bool(pool) for pool in pools])
        wanted = taste * stocked
        # A rank whose classes have all run out draws from the remaining samples.
        chances = wanted / wanted.sum() if wanted.sum() > 0 else stocked / stocked.sum()
        taken.append(pools[rng.choice(len(pools), p=chances)].pop())
    return np.array(taken, np.int64)


def bootstrap_shard(labels: Indices, seed: int, rank: int, *, count: int, alpha: float | None) -> Indices:
    """Draw the rank's samples from its mixture, with replacement: classes first, then uniformly within each."""
    chances = (mixture(labels, seed, rank, alpha) / np.bincount(labels))[labels]
    return generator(seed, rank, "shards.bootstrap").choice(len(labels), count, p=chances / chances.sum())


CLASSES = 10
PIXELS = 64
HOLD_OUT_EVERY = 5  # each fifth image is for testing, whatever the seed: runs stay comparable
BATCHES_AHEAD = 16  # batches drawn at once: one call of the generator serves as many steps


@dataclass(frozen=True)
class Images:
    """Images (n, 64) float32 in [0, 1] and their classes (n,) int64, shared by all ranks of a process. Read-only."""

    x: Tensor
    y: Tensor
    labels: Indices  # y as a numpy array

    def on(self, device: str) -> Images:
        return Images(self.x.to(device), self.y.to(device), self.labels)


def load(device: str = "cpu") -> tuple[Images, Images]:
    """Return the training images (1,438) and the held-out ones (359), read once per process and device."""
    return _load(device)


@lru_cache(maxsize=2)
def _load(device: str) -> tuple[Images, Images]:
    if device != "cpu":
        train, test = _load("cpu")
        try:
            return train.on(device), test.on(device)
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # torch's errors for an unknown or absent device
            raise ParameterError(f"device={device!r}: {error}") from error
    rows = _rows()
    x, y = rows[:, :-1], rows[:, -1].astype(np.int64)
    held_out = np.arange(len(y)) % HOLD_OUT_EVERY == HOLD_OUT_EVERY - 1
    return _images(x[~held_out], y[~held_out]), _images(x[held_out], y[held_out])


def _rows() -> Floats:
    """Return the pixels (0 to 16) and the class of all images, (1797, 65)."""
    # As `sklearn.datasets.load_digits` reads them, from the file that scikit-learn ships. Importing scikit-learn, with
    # SciPy and pandas, takes 1 to 2 s: on each real rank longer than its training.
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UsageError("digits needs scikit-learn: pip install 'spawnsim[demo]'")
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    return np.loadtxt(path, delimiter=",")


def _images(x: Floats, y: Indices) -> Images:
    pixels, labels = (x / 16).astype(np.float32), y.astype(np.int64)
    images = Images(torch.from_numpy(pixels), torch.from_numpy(labels), labels)
    # The tensors share this memory; torch warns if it wraps memory that is read-only already, so the flag is set last.
    pixels.flags.writeable = labels.flags.writeable = False
    return images


@lru_cache(maxsize=4)
def _partition(size: int, seed: int, alpha: float | None) -> list[Indices]:
    return partition(load()[0].labels, size, seed, alpha)


def shard(rank: int, size: int, seed: int, *, alpha: float | None = None, minimum: int = 32) -> Indices:
    """Return the indices of a rank's training images.

    While there are `minimum` images for each rank, shards are disjoint and have equal sizes. With more ranks than that
    (45 and above by default) each rank draws `minimum` images with replacement from its own mixture of classes.

    Args:
        rank: the calling rank, in 0..size-1.
        size: number of ranks that share the images.
        seed: the run's seed; equal seeds give equal shards on every rank and in every process.
        alpha: concentration of the ranks' class mixtures (0.1: one or two digits for each rank; 100: nearly uniform);
            None splits uniformly.
        minimum: images for each rank, at least 1.
    """
    check_shard(rank, size, minimum, alpha)
    labels = load()[0].labels
    if size * minimum <= len(labels):
        return _partition(size, seed, alpha)[rank]
    return bootstrap_shard(labels, seed, rank, count=minimum, alpha=alpha)


def loss_of(model: nn.Module, chosen: Tensor, device: str) -> Tensor:
    """Return the mean cross-entropy (natural logarithm), 0-dim, of the training images with the indices `chosen`."""
    # A step receives indices and not images: the images of all ranks' batches are then gathered together, by calls
    # that vmap batches.
    train = load(device)[0]
    return cross_entropy(model(embedding(chosen, train.x)), train.y[chosen])


def accuracy_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the fraction of a batch that the model classifies correctly, 0-dim."""
    right: Tensor = model(x).argmax(-1) == y
    return right.float().mean()


class Digits:
    """One rank's classifier: its shard, its model and optimizer, its training step.

    >>> digits = Digits(comm.rng, comm.rank, comm.size, alpha=0.3)
    >>> model, optimizer = digits.build()
    >>> loss = digits.step(model, optimizer)

    Args:
        rng: the rank's streams; draws from the purposes "digits.batches" and "digits.init".
        rank, size: rank of this learner, and number of learners that share the data.
        alpha, minimum: see `shard`.
        batch: images per step, drawn from the shard in shuffled passes.
        hidden: widths of the hidden layers.
        lr, momentum: parameters of the optimizer that `build` makes.
        same_start: whether all ranks start from the same weights.
        device: the device of images and models: "cpu", "cuda".
    """

    def __init__(
        self,
        rng: Streams,
        rank: int,
        size: int,
        *,
        alpha: float | None = None,
        minimum: int = 32,
        batch: int = 32,
        hidden: Sequence[int] = (32,),
        lr: float = 0.1,
        momentum: float = 0.9,
        same_start: bool = True,
        device: str = "cpu",
    ) -> None:
        if batch < 1:
            raise ParameterError(f"batch={batch}: give at least 1 image a step")
        if not lr >= 0 or not 0 <= momentum < 1:
            raise ParameterError(f"lr={lr}, momentum={momentum}: give lr >= 0 and momentum in [0, 1)")
        seed = rng.key[0]
        self.shard = shard(rank, size, seed, alpha=alpha, minimum=minimum)
        self.widths = (PIXELS, *hidden, CLASSES)
        self.lr, self.momentum = lr, momentum
        self.train, self.test = load(device)
        self._device = device
        self._batch = batch
        self._orders = rng("digits.batches")
        self._ahead: list[Tensor] = []
        self._train, self._evaluate = TrainingStep(loss_of), Evaluation(accuracy_of)
        self._starts = (Streams(seed, WORLD) if same_start else rng)("digits.init")

    def build(self) -> tuple[MLP, torch.optim.SGD]:
        """Return a fresh model and its optimizer; each call draws new initial weights."""
        # A separate generator: all virtual ranks of the process share torch's global one.
        generator = torch.Generator().manual_seed(int(self._starts.integers(2**63)))
        model = MLP(self.widths, generator).to(self._device)
        return model, torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def indices(self) -> Tensor:
        """Return the training images of the next batch, (batch,) int64, on the models' device."""
        if not self._ahead:
            passes = -(-BATCHES_AHEAD * self._batch // len(self.shard))
            # Whole passes in one call of the generator: a call for each batch costs as much as a training step of this
            # model.
            order = self._orders.permuted(np.tile(self.shard, (passes, 1)), axis=1).ravel()
            whole = torch.from_numpy(order[: BATCHES_AHEAD * self._batch]).to(self._device)
            # Reversed, since `pop` takes the last: batches are used in the order drawn.
            self._ahead = list(whole.view(BATCHES_AHEAD, self._batch).flip(0).unbind())
        return self._ahead.pop()

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        """Train on the next batch; return its mean cross-entropy (natural logarithm) before the update, 0-dim."""
        loss: Tensor = self._train(model, optimizer, self.indices(), self._device)  # type: ignore[assignment]  # one output
        return loss

    def accuracy(self, model: nn.Module, part: slice = slice(None)) -> Tensor:
        """Return the model's accuracy on the held-out images, or on a part of them, 0-dim."""
        right: Tensor = self._evaluate(model, self.test.x[part], self.test.y[part])  # type: ignore[assignment]
        return right
