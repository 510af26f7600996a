"""A second data set for `phase_diagram`: ten Gaussian classes in 64 dimensions, without end.

    spawnsim sweep studies/phase_mixtures.py --columns --ranks 16 --set policy=none,average --set alpha=0.1 --seeds 20

Each rank draws its classes from its own mixture, Dirichlet(alpha). Models train over columns only: there is no `main`.
"""

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from spawnsim import columnar
from spawnsim.random import WORLD, Streams
from spawnsim.workloads import MLP

CLASSES, PIXELS, NOISE, HELD_OUT, BATCH = 10, 64, 4.0, 400, 32
_draw = np.random.default_rng(0)  # one data set for all seeds
CENTRES = _draw.standard_normal((CLASSES, PIXELS)).astype(np.float32)
LABELS = torch.from_numpy(_draw.integers(0, CLASSES, HELD_OUT))
NOISES = _draw.standard_normal((HELD_OUT, PIXELS)).astype(np.float32)
HELD = torch.from_numpy(CENTRES[LABELS.numpy()] + NOISE * NOISES)


def loss(model, x, y):
    """Return the mean cross-entropy of a batch."""
    return cross_entropy(model(x), y)


def share(model, part):
    """Return the share of held-out samples that the model classifies correctly."""
    return (model(HELD[part]).argmax(-1) == LABELS[part]).float().mean()


def judged(model):
    """Return the accuracy that decides."""
    return share(model, slice(0, None, 2))


def accuracy(model):
    """Return the accuracy that is reported."""
    return share(model, slice(1, None, 2))


def training(alpha=0.3, spread=0.0, judge="accuracy"):
    """Return how models train; the parameters are those of `digits.py`."""

    def build(rng):
        start = torch.Generator().manual_seed(
            int(Streams(rng.key[0], WORLD)("mixtures.init").integers(2**63))
        )
        model = MLP((PIXELS, 32, CLASSES), start)
        lr = 0.1 * float(rng("rate").lognormal(0.0, spread))
        return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def data(rng, rank, size):
        own = np.full(CLASSES, 0.1) if alpha is None else rng("mixtures.classes").dirichlet([alpha] * CLASSES)
        draw = rng("mixtures.batches")
        while True:
            y = draw.choice(CLASSES, BATCH, p=own)
            x = CENTRES[y] + NOISE * draw.standard_normal((BATCH, PIXELS), dtype=np.float32)
            yield torch.from_numpy(x), torch.from_numpy(y)

    return columnar.Training(
        build, loss, data, score=judged if judge == "accuracy" else None, report=(accuracy,)
    )
