"""Live models: a simulated run whose steps are executed together, compared with loops without a simulator.

usage: python benchmarks/training.py [--ranks N] [--iterations N] [--widths N,N,…] [--momentum M] [--repeats N] [--lean]
                                     [--norm] [--device cuda]

1,000 MLPs (64-64-64-10), batch 32, SGD with momentum 0.9; each rank has its own batches. Processor time of a step of
all ranks, without start-up (the slope between two numbers of iterations), medians of 5, alternating. Peers: a
hand-written loop that calls `vmap(grad_and_value)` on stacked parameters; plain torch, one model after the other.
Asserts the number of calls of the batched steps. OMP_NUM_THREADS=2 gives all of them two threads, and compares wall
times. `--norm` puts a BatchNorm behind each hidden layer, which columns do not have. `--lean` runs only the simulated
ranks, in lockstep and over columns: for models that would not fit into memory twice. With a GPU, which also holds the
batches, wall times until the GPU is idle are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.functional import cross_entropy

import spawnsim
from spawnsim import TrainingStep, columnar
from spawnsim.policies import AverageAllPolicy, Every
from spawnsim.training import vmapped

BATCH, KINDS = 32, 16  # number of different batches, in turn: drawing them is not part of a step


CHOSEN = argparse.Namespace(widths=[64, 64, 64, 10], momentum=0.9, norm=False, device="cpu")


def mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(CHOSEN.widths):
        norm = [nn.BatchNorm1d(inputs)] if CHOSEN.norm else []
        layers += [*norm, nn.ReLU(), nn.Linear(inputs, outputs)] if layers else [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers).to(CHOSEN.device)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def data(ranks: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(BATCH, CHOSEN.widths[0], generator=generator).to(CHOSEN.device),
            torch.randint(0, CHOSEN.widths[-1], (BATCH,), generator=generator).to(CHOSEN.device),
        )
        for _ in range(min(ranks, KINDS * 64))
    ]


def simulated(
    ranks: int, iterations: int, straggler: str | None = None, *, looks: bool = False, eager: bool = False
) -> None:
    """Run as a user would: a loss recorded in each iteration; with `looks`, the loss is read first."""
    examples = data(ranks)

    def main(comm: Any) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=CHOSEN.momentum)
        step = TrainingStep(loss_of)
        for iteration in range(iterations):
            x, y = examples[(comm.rank + iteration) % len(examples)]
            with comm.compute(0.01):
                loss = step(model, optimizer, x, y)
            comm.record(iteration=iteration, loss=float(loss) if looks else loss)

    run = spawnsim.run(main, ranks=ranks, stragglers=straggler, eager=eager)
    assert run.table.rows == ranks * iterations


def over_columns(ranks: int, iterations: int, every: int = 0) -> None:
    """Run as rows of arrays, which average every `every` iterations, or never."""
    examples = data(ranks)

    def build(rng: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=CHOSEN.momentum)

    def batches_of(rng: Any, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return (examples[(rank + iteration) % len(examples)] for iteration in count())

    training = columnar.Training(build, loss_of, batches_of)
    policy = AverageAllPolicy(1, cadence=Every(every or iterations + 1))
    run = columnar.run(policy, ranks=ranks, iterations=iterations, training=training, compute=0.01)
    assert run.totals["events"] == ranks * iterations


def by_hand(ranks: int, iterations: int) -> None:
    """Run the loop that one writes for a batch of models without any communication."""
    examples = data(ranks)
    params, buffers = stack_module_state([mlp() for _ in range(ranks)])  # type: ignore[arg-type]
    params = {name: p.detach() for name, p in params.items()}
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    pattern = mlp().to("meta")
    gradient = vmap(
        grad_and_value(lambda p, b, x, y: cross_entropy(functional_call(pattern, {**p, **b}, (x,)), y))
    )
    for iteration in range(iterations):
        chosen = [examples[(rank + iteration) % len(examples)] for rank in range(ranks)]
        x, y = torch.stack([each for each, _ in chosen]), torch.stack([each for _, each in chosen])
        gradients, _ = gradient(params, buffers, x, y)
        with torch.no_grad():
            for name, p in params.items():
                velocity[name].mul_(CHOSEN.momentum).add_(gradients[name])
                p.add_(velocity[name], alpha=-0.1)


def one_by_one(ranks: int, iterations: int) -> None:
    """Run plain autograd and torch.optim.SGD."""
    examples = data(ranks)
    models = [mlp() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=CHOSEN.momentum) for model in models]
    for iteration in range(iterations):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = loss_of(model, *examples[(rank + iteration) % len(examples)])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            loss.item()


def done() -> None:
    """Wait for the GPU."""
    if CHOSEN.device != "cpu":
        torch.cuda.synchronize()


def spent(call: Callable[[int], None], iterations: int) -> tuple[float, float]:
    """Return processor and wall seconds of a number of iterations, without start-up."""
    times = []
    for number in (1 + iterations, 1):
        done()
        begin = time.process_time(), time.perf_counter()
        call(number)
        done()
        times.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    return times[0][0] - times[1][0], times[0][1] - times[1][1]


def assert_calls(ranks: int, straggler: str | None) -> None:
    """Assert that all ranks' steps are executed in one call per chunk, even with stragglers."""
    sizes: list[int] = []
    rows_of = vmapped.Vmapped.rows

    def counted(self: Any, rows: Any, dims: Any) -> Any:
        sizes.append(len(rows.trained[0]))
        return rows_of(self, rows, dims)

    vmapped.Vmapped.rows = counted  # type: ignore[method-assign]
    try:
        simulated(ranks, 3, straggler)
    finally:
        vmapped.Vmapped.rows = rows_of  # type: ignore[method-assign]
    assert sum(sizes) == 3 * ranks
    assert len(sizes) <= 3 * -(-ranks // vmapped.CHUNK[0]), sizes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--widths", type=lambda text: [*map(int, text.split(","))], default=CHOSEN.widths)
    parser.add_argument("--momentum", type=float, default=CHOSEN.momentum)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--lean", action="store_true")
    parser.add_argument("--device", default=CHOSEN.device)
    return parser.parse_args(namespace=CHOSEN)


def main() -> None:
    chosen = arguments()
    ranks, iterations = chosen.ranks, chosen.iterations
    few = max(iterations // 5, 1)
    hand, lockstep, alone = (
        "vmapped by hand, no simulator",
        "simulated, in lockstep",
        "one by one, no simulator",
    )
    contenders: dict[str, tuple[Callable[[int], None], int]] = {
        hand: (lambda n: by_hand(ranks, n), iterations),
        lockstep: (lambda n: simulated(ranks, n), iterations),
        "losses looked at": (lambda n: simulated(ranks, n, looks=True), iterations),
        "simulated, lognormal:0.3": (lambda n: simulated(ranks, n, "lognormal:0.3"), iterations),
        "losses looked at, lognormal": (
            lambda n: simulated(ranks, n, "lognormal:0.3", looks=True),
            iterations,
        ),
        alone: (lambda n: one_by_one(ranks, n), few),
        "over columns": (lambda n: over_columns(ranks, n), iterations),
        "over columns, averaged every 10": (lambda n: over_columns(ranks, n, 10), iterations),
        "simulated, eager": (lambda n: simulated(ranks, n, eager=True), few),
    }
    if chosen.norm:
        contenders = {name: each for name, each in contenders.items() if not name.startswith("over")}
    if chosen.lean:
        contenders = {name: contenders[name] for name in (lockstep, "over columns") if name in contenders}
    else:
        assert_calls(ranks, None)
        assert_calls(ranks, "lognormal:0.3")
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(chosen.repeats):
        for name, (call, number) in contenders.items():
            seconds[name].append(tuple(each / number for each in spent(call, number)))  # type: ignore[arg-type]
    numbers = sum(p.numel() for p in mlp().parameters())
    threads = torch.get_num_threads()
    compared = 0 if threads == 1 and CHOSEN.device == "cpu" else 1
    medians = {name: statistics.median(pair[compared] for pair in pairs) for name, pairs in seconds.items()}
    print(f"{ranks} models of {numbers} parameters, a step of all; medians of {chosen.repeats}, ", end="")
    print(f"{chosen.device}, {threads} thread(s); {('processor', 'wall')[compared]} times compared")
    for name, time_s in medians.items():
        cpu, wall = (statistics.median(each) for each in zip(*seconds[name], strict=True))
        against = [f"{time_s / medians[hand]:5.2f} x by hand"] if hand in medians else []
        against += [f"{medians[alone] / time_s:5.1f} x faster than one by one"] if alone in medians else []
        rate = f"{ranks * numbers / time_s:8.1e} rank·parameter·steps/s"
        print(f"{name:<33}{1e3 * cpu:9.1f} ms of processor,{1e3 * wall:9.1f} ms ", rate, *against, sep="  ")


if __name__ == "__main__":
    main()
