"""Columns whose models are shared by real processes: results do not depend on their number."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from spawnsim import Run
from spawnsim.columnar.shards import Sums, held_after
from tests.real.conftest import mpiexec, surroundings

ROOT = Path(__file__).parents[2]
HEAD = """
import json, sys
from functools import partial
import torch
from spawnsim import columnar
from spawnsim.policies import *
from spawnsim.policies import StateScope
from spawnsim.training import vmapped
from tests.columnar.test_training import alike, batches, built, half_spoilt, spread_of, training, vector

vmapped.CHUNK = (16, 16)  # many chunks of few ranks
"""
CASES = """
Selective = partial(AsyncSelectiveAveragingPolicy, None, 3, 0.3)

def state(name):
    return StateScope(optimizer_state=name)

def drawn(rng, rank, size):
    while True:  # from the generators of the process
        yield torch.randn(8, 6), torch.randint(4, (8,))

CASES = {
    "average": (AverageAllPolicy(3), {}, {}),
    "average, of equal models": (AverageAllPolicy(3), {"build": alike}, {}),
    "average, state": (AverageAllPolicy(3, momentum=0.5, travels=state("average")), {"optimizer": "adam"}, {}),
    "average, not finite": (AverageAllPolicy(2), {"data": half_spoilt, "optimizer": "adam"}, {}),
    "average, deaths": (AverageAllPolicy(2), {}, {"mtbf_s": 0.3, "detection_s": 0.1}),
    "selective": (Selective(momentum=0.25, donors=3), {"score": spread_of}, {"mtbf_s": 0.5}),
    "selective, best": (Selective(averaging_strategy="best_only", travels=state("copy")), {"optimizer": "groups"}, {}),
    "selective, average": (Selective(donors=5, travels=state("average")), {"optimizer": "adam"}, {"ranks": 65}),
    "selective, keep": (Selective(travels=state("keep")), {"data": half_spoilt}, {}),
    "diloco": (OuterOptimizerPolicy(3), {"optimizer": "adam"}, {"mtbf_s": 0.5}),
    "gossip": (GossipPolicy(2), {}, {}),
    "elastic": (EASGDPolicy(2), {}, {"mtbf_s": 0.5}),
    "sparse": (SPARTAPolicy(1, share=0.1), {}, {}),
    "streaming": (StreamingDiLoCoPolicy(4, fragments=2), {}, {}),
    "compressed": (OuterOptimizerPolicy(3, compression="uniform8"), {}, {}),
    "generators": (AverageAllPolicy(3), {"data": drawn}, {}),
}

def digests(comm):
    found = {}
    for name, (policy, of_training, given) in CASES.items():
        how, sums = training(**of_training), []
        looked = lambda round_: sums.append([float(vector(how.model(each)).sum()) for each in (None, 0, 50)])
        kept = {"ranks": 101, "iterations": 8, "seed": 4, "stragglers": "lognormal:0.3"} | given
        run = columnar.run(policy, training=how, comm=comm, on_round=looked, **kept)
        totals = [run.totals.get(each, 0) for each in ("digest", "deaths", "replacements")]
        found[name] = [*totals, repr(sums), repr(run.table["loss"].sum())]
    return found
"""
MAIN = """
from spawnsim.real.{backend} import guarded, world
with guarded(world()) as comm:
    found = digests(comm)
    if comm.rank == 0:
        print(json.dumps(found))
"""


def job(*line: str, folder: Path, n: int = 2, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a command on real processes."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [mpiexec(), "-n", str(n), *line], cwd=folder, env=surroundings() | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == status or (status and done.returncode), done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """Return the results of one process without a launcher."""
    file = tmp_path_factory.mktemp("alone") / "alone.py"
    file.write_text(HEAD + CASES + "print(json.dumps(digests(None)))")
    env = surroundings() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = subprocess.run([sys.executable, str(file)], env=env, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, list[object]] = json.loads(done.stdout)
    return found


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(("n", "backend"), [(1, "mpi"), (2, "mpi"), (3, "mpi"), (4, "mpi"), (2, "torch")])
def test_results_do_not_depend_on_the_number_of_processes(
    n: int, backend: str, alone: dict[str, list[object]], tmp_path: Path
) -> None:
    """Digests, weights in and between rounds, losses: under every policy, with deaths and with uneven counts."""
    file = tmp_path / "program.py"
    file.write_text(HEAD + CASES + MAIN.format(backend=backend))
    found = json.loads(job(sys.executable, str(file), folder=tmp_path, n=n).stdout)
    assert found == alone
    assert len({digest for digest, *_ in alone.values()}) == len(alone)
    assert all(replaced for name, (_, _, replaced, *_) in alone.items() if "selective" in name)
    assert sum(bool(deaths) for _, deaths, *_ in alone.values()) == 4


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_sums_are_added_in_one_order(count: int) -> None:
    """However chunks are divided among processes."""
    values = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    whole = Sums()
    for place in range(count):
        whole.add(place, 1, values[place])
    for cut in range(count + 1):
        joined = Sums()
        for low, high in ((0, cut), (cut, count)):
            part = Sums()
            for place in range(low, high):
                part.add(place, 1, values[place])
            assert [each[:2] for each in part.held] == [*held_after(low, high)]
            for place, length, value in part.held:
                joined.add(place, length, value)
        assert torch.equal(joined.total(), whole.total())


LEARN = """
import os, torch
def build(rng):
    model = torch.nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def data(rng, rank, size):
    draw = rng("data")
    while True:
        if rank == 700 and "KILLED" in os.environ:
            os.environ["KILLED"] += "1"
            if len(os.environ["KILLED"]) > 9:
                os.kill(os.getpid(), 9)
        yield torch.from_numpy(draw.normal(size=(8, 4))).float(), torch.from_numpy(draw.integers(0, 2, 8))
def loss(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)
"""


@pytest.mark.mpi
@pytest.mark.slow
def test_an_error_of_one_process_ends_all_with_one_message(tmp_path: Path) -> None:
    """It names rank and iteration; too many processes are refused; the first process alone writes and prints."""
    (tmp_path / "learn.py").write_text(textwrap.dedent(LEARN))
    bad = LEARN.replace("    while True:", "    for _ in range(9 if rank != 700 else 5):")
    (tmp_path / "bad.py").write_text(bad)
    line = [
        str(Path(sys.executable).parent / "spawnsim"),
        "columnar",
        "average",
        "-n",
        "1100",
        "--set",
        "iterations=8",
    ]
    done = job(*line, "--train", "bad.py", folder=tmp_path, status=2)
    assert done.stderr.count("the batches of rank 700 ended before iteration 5") == 1, done.stderr
    assert "Traceback" not in done.stderr
    done = job(*line, "--train", "learn.py", folder=tmp_path, n=4, status=2)
    assert done.stderr.count("1,100 ranks are 3 chunks of 512") == 1, done.stderr
    done = job(*line, "--train", "learn.py", "--out", "run", folder=tmp_path)
    assert done.stdout.count("digest") == 1
    assert (tmp_path / "run" / "run.json").exists()


def of_folder(folder: Path) -> dict[str, object]:
    """Return the totals of a run without the time that it took."""
    run = Run.load(folder)
    return run.totals | {"wall_seconds": 0, "rows": run.table["loss"].sum(), "events": len(run.events)}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["selective --set momentum=0.2 --set mtbf=1s", "diloco --set lr=0.5"])
def test_a_killed_run_continues_on_other_processes(policy: str, tmp_path: Path) -> None:
    """Its digest, rows and events are those of a run without interruption."""
    (tmp_path / "learn.py").write_text(LEARN)
    name, *own = policy.split()
    line = [
        str(Path(sys.executable).parent / "spawnsim"),
        "columnar",
        name,
        "-n",
        "1100",
        "--train",
        "learn.py",
        *own,
    ]
    line += ["--set", "iterations=14", "--set", "average_every=2", "--quiet", "--set", "checkpoint_every=3"]
    job(*line, "--out", "whole", folder=tmp_path, n=1)
    os.environ["KILLED"] = ""
    try:
        done = job(*line, "--out", "killed", folder=tmp_path, n=2, status=9)
    finally:
        del os.environ["KILLED"]
    assert "signal 9" in done.stderr + done.stdout
    saved = sorted(each.name for each in (tmp_path / "killed" / "checkpoints").rglob("*.safetensors"))
    assert saved == [f"rank-0000{rank}-of-00002.safetensors" for rank in (0, 0, 1, 1)]
    for n in (1, 3):
        shutil.copytree(tmp_path / "killed", tmp_path / f"on{n}")
        job(*line, "--out", f"on{n}", "--resume", folder=tmp_path, n=n)
        assert of_folder(tmp_path / f"on{n}") == of_folder(tmp_path / "whole")
    other = [each.replace("iterations=14", "iterations=15") for each in line]
    done = job(*other, "--out", "killed", "--resume", folder=tmp_path, n=2, status=2)
    assert done.stderr.count("is of a run with iterations=14, and this one has 15") == 1, done.stderr
    done = job(*line[:1], "resume", "killed", folder=tmp_path, n=1, status=2)
    assert "repeat its command" in done.stderr
