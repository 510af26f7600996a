"""What losses and models usually do: computed together, and from a record that needs no Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import spawnsim
from spawnsim import TrainingStep
from spawnsim.training import tracing

RANKS, ITERATIONS = 11, 5
IMAGES, LABELS = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 5


def network():
    """Return a small network."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))


def generator(rank, iteration):
    """Return a generator of a rank's batch."""
    return torch.Generator().manual_seed(1000 * rank + iteration)


def classes(rank, iteration):
    """Inputs (6, 8) and a class for each."""
    draw = generator(rank, iteration)
    return torch.randn(6, 8, generator=draw), torch.randint(0, 5, (6,), generator=draw)


def targets(rank, iteration):
    """Inputs (6, 8) and five numbers in [0, 1) for each."""
    draw = generator(rank, iteration)
    return torch.randn(6, 8, generator=draw), torch.rand(6, 5, generator=draw)


def chosen(rank, iteration):
    """Numbers of images."""
    return (torch.randint(0, 50, (6,), generator=generator(rank, iteration)),)


def pictures(rank, iteration):
    """Pictures of three colours (4, 3, 8, 8), and a class for each."""
    draw = generator(rank, iteration)
    return torch.randn(4, 3, 8, 8, generator=draw), torch.randint(0, 5, (4,), generator=draw)


def words(rank, iteration):
    """Sentences (4, 7) of eleven words, and a class for each."""
    draw = generator(rank, iteration)
    return torch.randint(0, 11, (4, 7), generator=draw), torch.randint(0, 5, (4,), generator=draw)


def series(rank, iteration):
    """Series (4, 7, 8), and a class for each."""
    draw = generator(rank, iteration)
    return torch.randn(4, 7, 8, generator=draw), torch.randint(0, 5, (4,), generator=draw)


def contrast(model, x, y):
    """Each is to be like itself alone."""
    one = functional.normalize(model(x), dim=-1)
    return functional.cross_entropy(one @ one.T / 0.1, torch.arange(6))


def penalised(model, x, y):
    """With a penalty of large weights."""
    return functional.cross_entropy(model(x), y) + 1e-3 * sum(p.square().sum() for p in model.parameters())


def next_word(model, x, y):
    """Predict each word by those before."""
    return functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def cross_entropy(model, x, y):
    """The usual one."""
    return functional.cross_entropy(model(x), y)


LOSSES = {
    "cross_entropy": (cross_entropy, classes),
    "smoothed": (lambda model, x, y: functional.cross_entropy(model(x), y, label_smoothing=0.1), classes),
    "weighted": (
        lambda model, x, y: functional.cross_entropy(model(x), y, torch.tensor([1.0, 2, 1, 1, 3])),
        classes,
    ),
    "mse": (lambda model, x, y: functional.mse_loss(model(x), y), targets),
    "huber": (lambda model, x, y: functional.huber_loss(model(x), y), targets),
    "bce": (lambda model, x, y: functional.binary_cross_entropy_with_logits(model(x), y), targets),
    "kl": (
        lambda model, x, y: functional.kl_div(model(x).log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        targets,
    ),
    "by number": (lambda model, i: functional.cross_entropy(model(IMAGES[i]), LABELS[i]), chosen),
    "by place": (lambda model, x, y: -model(x).log_softmax(-1)[torch.arange(6), y].mean(), classes),
    "gathered": (lambda model, x, y: -model(x).log_softmax(-1).gather(1, y[:, None]).mean(), classes),
    "masked": (
        lambda model, x, y: functional.cross_entropy(model(x).masked_fill(x[:, :5] > 1, -1e9), y),
        classes,
    ),
    "where": (lambda model, x, y: torch.where(x[:, :5] > 0, model(x), 0.0).square().mean(), classes),
    "spread": (lambda model, x, y: model(x).std(0).sum() + model(x).var() + model(x).norm(), classes),
    "cosine": (lambda model, x, y: 1 - functional.cosine_similarity(model(x), y, dim=-1).mean(), targets),
    "top": (lambda model, x, y: model(x).topk(2, -1).values.sum() - model(x).max(-1).values.mean(), classes),
    "einsum": (
        lambda model, x, y: torch.einsum("bi,bj->ij", model(x), model(x)).square().mean(),
        classes,
    ),
    "powers": (lambda model, x, y: (model(x) ** 3 + 2.0 ** model(x)).mean(), classes),
    "slices": (
        lambda model, x, y: model(x)[:, 1:4].square().mean() + model(x)[::2, -1].mean(),
        classes,
    ),
    "added": (lambda model, x, y: torch.zeros(5, 5).index_add(0, y, model(x)).square().mean(), classes),
    "contrast": (contrast, classes),
    "penalised": (penalised, classes),
}
MODELS = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
        ),
        pictures,
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.SiLU(), nn.ConvTranspose2d(4, 2, 2, 2),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 5),
        ),
        pictures,
    ),
    "recurrent": (lambda: OfLast(nn.GRU(8, 16, batch_first=True)), series),
    "long memory": (lambda: OfLast(nn.LSTM(8, 16, 2, batch_first=True)), series),
    "both ways": (lambda: OfLast(nn.LSTM(8, 8, batch_first=True, bidirectional=True)), series),
    "projected": (lambda: OfLast(nn.LSTM(8, 24, proj_size=16, batch_first=True, bias=False)), series),
    "normed": (
        lambda: nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 5)
        ),
        classes,
    ),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(11, 16), nn.Linear(16, 5)), words),
    "attention": (
        lambda: OfMean(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)),
        words,
    ),
    "scaled": (lambda: Scaled(), classes),
}  # fmt: skip


class OfLast(nn.Module):
    """A class from the last state."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.out = cell, nn.Linear(16, 5)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class OfMean(nn.Module):
    """A class from all words."""

    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer, self.out = nn.Embedding(11, 16), layer, nn.Linear(16, 5)

    def forward(self, x):
        return self.out(self.layer(self.embed(x)).mean(1))


class Scaled(nn.Module):
    """Parameters without dimensions."""

    def __init__(self):
        super().__init__()
        self.scale, self.net, self.shift = (
            nn.Parameter(torch.ones(())),
            network(),
            nn.Parameter(torch.zeros(())),
        )

    def forward(self, x):
        return self.scale * self.net(x) + self.shift


CASES = {
    **{f"loss: {name}": (network, *found) for name, found in LOSSES.items()},
    **{f"model: {name}": (made, cross_entropy, batch) for name, (made, batch) in MODELS.items()},
    "model: words": (
        lambda: nn.Sequential(nn.Embedding(11, 16), nn.GELU(), nn.Linear(16, 11)),
        next_word,
        words,
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", CASES)
def test_it_is_computed_together_and_without_python(name, monkeypatch):
    """No model steps alone, the record is of TorchScript, and losses are those of eager steps."""
    made, loss, batch = CASES[name]
    monkeypatch.setattr(tracing, "CALLS_BEFORE", 1)
    compiled, compile_graph = [], tracing._compiled
    monkeypatch.setattr(
        tracing, "_compiled", lambda graph: compiled.append(compile_graph(graph)) or compiled[-1]
    )
    repeated = []
    ready = tracing.Traced.ready
    call = tracing.Traced.__call__
    monkeypatch.setattr(
        tracing.Traced,
        "__call__",
        lambda self, *given: repeated.append(ready(self, len(given[0]))) or call(self, *given),
    )

    def main(comm):
        torch.manual_seed(comm.rank)
        model = made()
        optimizer, step = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), TrainingStep(loss)
        for iteration in range(ITERATIONS):
            with comm.compute(0.01):
                value = step(model, optimizer, *batch(comm.rank, iteration))
            comm.record(loss=float(value))

    together = spawnsim.run(main, ranks=RANKS)
    assert "warnings" not in together.what
    assert len(compiled) == 1 and compiled[0] is not None
    assert repeated[-1], "a record that was made and dropped"
    eager = spawnsim.run(main, ranks=RANKS, eager=True)
    assert len(compiled) == 1
    assert together.table["loss"] == pytest.approx(eager.table["loss"], rel=1e-4, abs=1e-5)
