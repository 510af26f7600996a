"""FedAvg of an MLP on digits, here and in Flower's simulation engine: the cost of a client's round.

usage: python benchmarks/flower.py --flower-python PYTHON [--clients N] [--rounds N]

Each client has 32 images and makes 10 steps of SGD (64-32-10, one batch, learning rate 0.1, no momentum) between two
averages. Wall time of the median round after the first, for N and N/2 clients; their difference is the slope per client
and round, without start-up. Flower runs in another environment (`pip install "flwr[simulation]" torch` there), with one
ray actor for each core; spawnsim runs in this process and thread, on ordinary virtual ranks and over columns. All
global models must agree: their largest difference is printed, and must be below 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS, LR, SEED = 10, 0.1, 1
MORE = 12  # rounds timed here after Flower's


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


@cache
def images(path: str) -> tuple[Tensor, Tensor]:
    """Return the images and classes of all clients, (clients, 32, 64) and (clients, 32)."""
    with np.load(path) as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


def flat(model: nn.Module) -> list[float]:
    return torch.cat([weight.detach().flatten() for weight in model.parameters()]).tolist()


# ------------------------------------------------------------------------------------------ in Flower's environment
def peer(path: str, clients: int, rounds: int) -> None:
    """Run Flower; print the times at which rounds ended, the last global model, and versions, as JSON."""
    from flwr.app import ArrayRecord, MetricRecord, RecordDict
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    ends: list[float] = []
    last: list[float] = []
    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        x, y = images(path)
        mine = int(context.node_config["partition-id"])
        model = mlp()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, x[mine], y[mine]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        content = {
            "arrays": ArrayRecord(model.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y[mine])}),
        }
        return Reply(content=RecordDict(content), reply_to=message)

    def ended(round_: int, arrays: Any) -> None:
        ends.append(time.perf_counter())
        model = mlp()
        model.load_state_dict(arrays.to_torch_state_dict())
        last[:] = flat(model)

    @server.main()
    def serve(grid: Any, context: Any) -> None:
        torch.manual_seed(SEED)
        while len([*grid.get_node_ids()]) < clients:  # the first round samples whatever clients are there
            time.sleep(0.1)
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
        strategy.start(grid, ArrayRecord(mlp().state_dict()), num_rounds=rounds, evaluate_fn=ended)

    cores = os.cpu_count() or 1
    backend: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": cores}}
    run_simulation(server, client, clients, backend_config=backend)
    versions = {name: version(name) for name in ("flwr", "ray", "torch")}
    print("\n" + json.dumps({"ends": ends, "last": last, "versions": versions}))


# ------------------------------------------------------------------------------------------ in spawnsim's environment
@dataclass(frozen=True)
class EndOf:
    """Acts after the last of each `period` iterations."""

    period: int

    def due(self, iteration: int) -> bool:
        return iteration % self.period == self.period - 1


def built() -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(SEED)
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def ordinary(path: str, clients: int, rounds: int) -> tuple[list[float], list[list[float]]]:
    """Run a program of virtual ranks; return the times at which rounds ended, and the global model after each."""
    import spawnsim
    from spawnsim import TrainingStep
    from spawnsim.policies import AverageAllPolicy

    ends, models = [time.perf_counter()], []
    x, y = images(path)

    def main(comm: Any) -> None:
        model, optimizer = built()
        step, policy = TrainingStep(loss_of), AverageAllPolicy(STEPS, cadence=EndOf(STEPS))
        for iteration in range(rounds * STEPS):
            with comm.compute(0.01):
                step(model, optimizer, x[comm.rank], y[comm.rank])
            model, optimizer, _ = policy(iteration, model, optimizer, None, comm)
            if comm.rank == 0 and policy.cadence.due(iteration):
                models.append(flat(model))  # reads the weights, so that no work is deferred
                ends.append(time.perf_counter())

    spawnsim.run(main, ranks=clients)
    return ends, models


def over_columns(path: str, clients: int, rounds: int) -> tuple[list[float], list[list[float]]]:
    """Run the same over columns."""
    from spawnsim import columnar
    from spawnsim.policies import AverageAllPolicy

    (x, y), ends, models = images(path), [time.perf_counter()], []
    training = columnar.Training(
        lambda rng: built(), loss_of, lambda rng, rank, size: repeat((x[rank], y[rank]))
    )

    def on_round(_: Any) -> None:
        models.append(flat(training.model(0)))
        ends.append(time.perf_counter())

    columnar.run(
        AverageAllPolicy(STEPS, cadence=EndOf(STEPS)), ranks=clients, iterations=rounds * STEPS, training=training,
        compute=0.01, on_round=on_round,
    )  # fmt: skip
    return ends, models


def flower(
    python: str, path: str, clients: int, rounds: int
) -> tuple[list[float], list[float], dict[str, str]]:
    """Run `peer` in the other environment."""
    # Imported by name, so that ray's actors find the functions and keep the images.
    command = [python, "-c", f"import flower; flower.peer({path!r}, {clients}, {rounds})"]
    settings = {
        "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    if done.returncode:
        raise SystemExit(
            f"flower.py: Flower's run failed with code {done.returncode}:\n{done.stderr[-3000:]}"
        )
    replies = re.findall(r"Received (\d+) results and (\d+) failures", done.stdout + done.stderr)
    if [int(results) for results, _ in replies] != [clients] * rounds:
        raise SystemExit(
            f"flower.py: not all of {clients} clients replied in each round of Flower's run: {replies}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return found["ends"], found["last"], found["versions"]


def shards(clients: int, path: Path) -> None:
    """Write each client's images."""
    from spawnsim.workloads.digits import load, shard

    train, _ = load()
    mine = [shard(rank, clients, SEED, minimum=32)[:32] for rank in range(clients)]
    np.savez(
        path,
        x=np.stack([train.x.numpy()[each] for each in mine]),
        y=np.stack([train.labels[each] for each in mine]),
    )


def compare(python: str, clients: int, rounds: int) -> None:
    torch.set_num_threads(1)
    seconds: dict[str, dict[int, float]] = {"Flower": {}, "virtual ranks": {}, "columns": {}}
    versions: dict[str, str] = {}
    apart = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for count in (clients // 2, clients):
            path = Path(folder, f"{count}.npz")
            shards(count, path)
            ends, want, versions = flower(python, str(path), count, rounds)
            seconds["Flower"][count] = statistics.median(np.diff(ends)[1:])
            for name, call in (("virtual ranks", ordinary), ("columns", over_columns)):
                times, models = call(str(path), count, rounds + MORE)
                assert len(times) == len(models) + 1 == rounds + MORE + 1, (name, len(times))
                seconds[name][count] = statistics.median(np.diff(times)[1:])
                apart = max(apart, float(np.abs(np.subtract(models[rounds - 1], want)).max()))
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    print(f"{named}; spawnsim {version('spawnsim')}, torch {version('torch')}, Python {platform.python_version()}, "
          f"{os.cpu_count()} cores")  # fmt: skip
    print(
        f"{'':14} {'s a round':>10} {'ms a client and round':>22} {'× Flower':>9}   largest difference {apart:.1e}"
    )
    slopes = {
        name: (each[clients] - each[clients // 2]) / (clients - clients // 2)
        for name, each in seconds.items()
    }
    for name, slope in slopes.items():
        print(f"{name:14} {seconds[name][clients]:10.3f} {1e3 * slope:22.3f} {slopes['Flower'] / slope:9.1f}")
    assert apart < 1e-4, f"the global models differ by {apart}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--flower-python", metavar="PYTHON", help="the interpreter of an environment with Flower"
    )
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    if options.clients < 2 or options.rounds < 2:
        parser.error("give at least 2 clients and 2 rounds: a slope needs two")
    python = options.flower_python
    asked = [python or "", "-c", "import flwr, ray, torch"]
    if not python or not shutil.which(python) or subprocess.run(asked, capture_output=True).returncode:
        parser.error(
            f"--flower-python {python}: give the interpreter of an environment with Flower, ray and torch: "
            "python -m venv flower; flower/bin/pip install 'flwr[simulation]' torch; --flower-python flower/bin/python"
        )
    compare(python, options.clients, options.rounds)


if __name__ == "__main__":
    main()
