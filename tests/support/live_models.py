"""Small models that ranks train in tests, and runs of them: batched and eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spawnsim
from spawnsim import TrainingStep

RANKS = 6


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return cross_entropy(model(x), y)


def mlp() -> nn.Module:
    """Return a small network."""
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 5))


def sgd(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), **({"lr": 0.1, "momentum": 0.9} | how))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return eight examples."""
    return torch.randn(8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def program(
    model_of: Callable[[], nn.Module] = mlp,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    *,
    batch_of: Callable[[torch.Generator], tuple[Tensor, ...]] = batch,
    loss: Callable[..., Any] = loss_of,
    iterations: int = 12,
    between: Callable[[Any, nn.Module, Any, int], None] = lambda comm, model, optimizer, iteration: None,
    **how: Any,
) -> Callable[[Any], None]:
    """Return a program that trains a model on each rank, and records losses and a sum of all that it has learned."""

    def main(comm: Any) -> None:
        torch.manual_seed(comm.rank)
        model = model_of()
        optimizer, step = optimizer_of(model), TrainingStep(loss, **how)
        generator = torch.Generator().manual_seed(comm.rank)
        for iteration in range(iterations):
            inputs = batch_of(generator)
            with comm.compute(0.01):
                found = step(model, optimizer, *inputs)
            comm.record(iteration=iteration, loss=found[0] if isinstance(found, tuple) else found)
            between(comm, model, optimizer, iteration)
        own = [*model.state_dict().values()]
        state = [each for entry in optimizer.state.values() for each in entry.values()]
        comm.record(iteration=-1, loss=float(sum(each.double().sum() for each in own)))
        comm.record(iteration=-2, loss=float(sum(torch.as_tensor(each).double().sum() for each in state)))
        comm.record(iteration=-3, loss=float(torch.rand(())))  # where the rank's generator stands

    return main


def both(main: Callable[[Any], None], *, ranks: int = RANKS, **how: Any) -> tuple[Any, Any]:
    """Return a run with batched steps, and the same with eager ones."""
    return (
        spawnsim.run(main, ranks=ranks, seed=5, **how),
        spawnsim.run(main, ranks=ranks, seed=5, eager=True, **how),
    )


def require_equal(main: Callable[[Any], None], *, rtol: float = 1e-5, **how: Any) -> Any:
    """Require a batched run to be the eager one up to rounding, and its times to be equal; return the batched run."""
    run, eager = both(main, **how)
    for name in ("rank", "time_s", "iteration"):
        assert (run.table[name] == eager.table[name]).all()
    torch.testing.assert_close(
        torch.from_numpy(run.table["loss"]), torch.from_numpy(eager.table["loss"]), rtol=rtol, atol=rtol,
        equal_nan=True,
    )  # fmt: skip
    for name in ("events", "messages", "bytes", "virtual_seconds", "replacements"):
        assert run.totals[name] == eager.totals[name]
    return run


def warnings_of(run: Any) -> list[str]:
    """Return the warnings of a run."""
    return [each["text"] for each in run.events if each["kind"] == "warning"]
