"""Chunks of rows that several threads compute side by side: the same bits as one thread, whatever goes wrong."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import spawnsim
from spawnsim import TrainingStep
from spawnsim.errors import RankError
from spawnsim.training import row_step, threads, tracing
from tests.training.test_steps import OPTIMIZERS, batch, build, loss_of, run, sgd, trained, weights

RANKS = 75


@pytest.fixture
def chunks(monkeypatch):
    """Chunks of 16 rows, recorded at the second call; how many were computed side by side, since `use` was called."""
    monkeypatch.setattr(row_step, "CHUNK", (16, 16))
    monkeypatch.setattr(tracing, "CALLS_BEFORE", 1)
    found = []
    mapped = threads.Threads.map

    def counted(self, call, items):
        found.append(len(items))
        return mapped(self, call, items)

    monkeypatch.setattr(threads.Threads, "map", counted)
    before = torch.get_num_threads()

    def use(count):
        monkeypatch.setenv("OMP_NUM_THREADS", str(count))
        torch.set_num_threads(count)
        found.clear()
        return found

    yield use
    torch.set_num_threads(before)


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "groups"])
def test_threads_end_as_one_thread(optimizer, looks, chunks):
    """Weights, losses and state, to the bit; the last chunk, of 11 rows, among them."""

    def ends():
        return trained(OPTIMIZERS[optimizer], ranks=RANKS, iterations=20, looks=looks, stragglers=None)

    assert not chunks(1)
    one = ends()
    assert not chunks(1)
    for count in (2, 3):
        found = chunks(count)
        some = ends()
        assert 5 in found, found
        for (w, losses, state), (w1, losses1, state1) in zip(some, one, strict=True):
            assert torch.equal(w, w1)
            assert torch.equal(losses, losses1)
            mine, others = state.state_dict()["state"], state1.state_dict()["state"]
            assert all(torch.equal(mine[p][name], others[p][name]) for p in mine for name in mine[p])
        assert torch.get_num_threads() == count
        assert not [each for each in threading.enumerate() if "spawnsim-training" in each.name]


def test_each_has_one_thread_of_torch(chunks):
    """Also when it is asked for the first time, which may be in an operation."""
    chunks(3)
    own = threads.Threads(3)
    found = own.map(lambda _: torch.get_num_threads(), range(30))
    own.close()
    assert found == [1] * 30
    assert torch.get_num_threads() == 3


def test_gradients_and_clipping(chunks):
    """Each rank's own."""

    def main(comm):
        model = build(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of, max_norm=0.1, gradients=True)
        for iteration in range(12):
            with comm.compute(0.01):
                step(model, optimizer, *batch(comm.rank, iteration))
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    chunks(1)
    one, _ = run(main, ranks=RANKS, stragglers=None)
    found = chunks(2)
    some, _ = run(main, ranks=RANKS, stragglers=None)
    assert found
    assert all(map(torch.equal, some, one))


class Tokens(nn.Module):
    """A model that raises for a token that it does not know."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.out = nn.Embedding(11, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


@pytest.mark.parametrize("looks", [True, False])
def test_an_error_is_its_ranks_and_all_others_go_on(looks, chunks):
    """Two ranks of different chunks fail at different steps; what they put off behind that is dropped."""
    failing = {20: 9, 60: 11}

    def main(comm):
        model = Tokens(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        told = None
        for iteration in range(16):
            x, y = torch.full((6, 7), (comm.rank + iteration) % 11), torch.full((6,), comm.rank % 5)
            if failing.get(comm.rank) == iteration:
                x = x + 10_000  # no such token, of no model
            try:
                with comm.compute(0.01):
                    loss = step(model, optimizer, x, y)
                if looks:
                    float(loss)
            except IndexError as error:
                told = str(error.__notes__)
                break
        try:
            return weights(model), told, step._seat.pending, step._seat.steps
        except IndexError as error:
            return weights(model), str(error.__notes__), step._seat.pending, step._seat.steps

    chunks(1)
    one, _ = run(main, ranks=RANKS, stragglers=None)
    found = chunks(2)
    some, _ = run(main, ranks=RANKS, stragglers=None)
    assert found
    assert all(waiting == [0, 0] for _, _, *waiting in some)
    for rank, ((w, told, *_), (w1, told1, *_)) in enumerate(zip(some, one, strict=True)):
        assert torch.equal(w, w1), rank
        assert told == told1
        assert (told is not None) == (rank in failing), rank


def test_an_error_that_nobody_catches_ends_the_run(chunks):
    """As with one thread."""

    def main(comm):
        model = Tokens(comm.rank)
        optimizer, step = sgd(model), TrainingStep(loss_of)
        for iteration in range(16):
            x = torch.full((6, 7), 10_000 if (comm.rank, iteration) == (60, 12) else 1)
            with comm.compute(0.01):
                step(model, optimizer, x, torch.zeros(6, dtype=torch.int64))

    for count in (1, 2):
        chunks(count)
        with pytest.raises(RankError, match=r"rank 60"):
            spawnsim.run(main, ranks=RANKS)
        assert not [each for each in threading.enumerate() if "spawnsim-training" in each.name]


@pytest.mark.parametrize("kind", ["a model of two ranks", "a view of a parameter"])
def test_what_ranks_share_is_computed_in_turn(kind, chunks):
    """A model of two ranks of different chunks, and memory that somebody else refers to."""

    def ends():
        shared, kept = build(7), []

        def main(comm):
            model = shared if kind.startswith("a model") and comm.rank in (3, 70) else build(comm.rank)
            if kind.startswith("a view") and comm.rank % 9 == 0:
                kept.append(model[0].weight.detach()[0])
            optimizer, step = sgd(model), TrainingStep(loss_of)
            for iteration in range(12):
                with comm.compute(0.01):
                    step(model, optimizer, *batch(comm.rank, iteration))
            return weights(model)

        return run(main, ranks=RANKS, stragglers=None)[0] + kept

    chunks(1)
    one = ends()
    chunks(2)
    some = ends()
    # In turn, torch's own threads divide each operation: last bits may be others.
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(some, one, strict=True))
    assert all(map(torch.equal, some, ends()))


TEACHER = build(99)


def distilled(model, x, y):
    """A loss that reads another model."""
    return loss_of(model, x, y) + mse_loss(model(x), TEACHER(x).detach())


@pytest.mark.parametrize("kind", ["a teacher that learns", "a model over another one's weights"])
def test_what_others_read_or_share_is_trained_in_turn(kind, chunks):
    """A rank of one chunk reads, or writes, while one of another trains: the order is that of one thread."""
    learns = kind.startswith("a teacher")

    def ends():
        TEACHER.load_state_dict(build(99).state_dict())

        def main(comm):
            model = TEACHER if comm.rank == (1 if learns else 35) else build(comm.rank)
            optimizer, step = sgd(model), TrainingStep(distilled if learns else loss_of)
            for iteration in range(10):
                with comm.compute(0.01):
                    loss = step(model, optimizer, *batch(comm.rank, iteration))
                float(loss)
                if iteration == 2 and not learns and comm.rank == 3:
                    for p, other in zip(model.parameters(), TEACHER.parameters(), strict=True):
                        p.data = other.data
            return weights(model)

        return run(main, ranks=40, stragglers=None)[0]

    chunks(1)
    one = ends()
    chunks(2)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ends(), one, strict=True))


PROGRAM = """
import torch
from spawnsim import TrainingStep

def main(comm):
    torch.manual_seed(comm.rank)
    model = torch.nn.Linear(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainingStep(lambda model, x: model(x).square().mean())
    for iteration in range(10):
        with comm.compute(0.01):
            loss = step(model, optimizer, torch.randn(8, 20))
        comm.record(loss=loss)
"""


def test_ranks_that_are_threads(chunks, tmp_path):
    """The threads are the process's, not those of the rank that happens to look."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    chunks(1)
    one = spawnsim.run(path, ranks=40, options={"carrier": "threads"})
    found = chunks(2)
    some = spawnsim.run(path, ranks=40, options={"carrier": "threads"})
    assert found
    assert some.totals["digest"] == one.totals["digest"]
