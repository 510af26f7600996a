"""Test suites with processes and on virtual ranks: cases, agreement, seconds; both ways in one run.

    python benchmarks/suites.py torch [EVERY]        # PyTorch's own bodies, 4 ranks; every n-th with processes
    python benchmarks/suites.py spawn                # a step of DDP on 4 ranks by mp.spawn
    python benchmarks/suites.py mpiexec N FILES...   # test files of a suite for mpiexec -n N

The first needs `pip install expecttest`. PyTorch's bodies are the tests of
`torch.testing._internal.distributed.distributed_test` without the names of CUDA and NCCL; tests skipped on virtual
ranks (for want of GPUs or ranks) are not started with processes. `--fork` forks the processes of the first two, which
takes the imports out of the time and shows the agreement of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

WORST = ("failed", "passed", "skipped")
BODIES = """
from torch.testing._internal.distributed import distributed_test as bodies


class TestBodies(bodies.TestDistBackend, bodies.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""
STEP = """
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def step(rank, size):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29507", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(8, 64) * rank).sum().backward()
    optimizer.step()
    dist.destroy_process_group()


@pytest.mark.parametrize("time", range(3))
def test_step(time):
    mp.spawn(step, (4,), nprocs=4)
"""
FORKED = """
import torch.multiprocessing as mp

context, start = mp.get_context, mp.start_processes
mp.get_context = lambda method=None: context("fork")
mp.spawn = lambda fn, args=(), nprocs=1, **more: start(fn, args, nprocs, start_method="fork")
"""
Outcomes = dict[str, str]


def outcomes_of(
    folder: Path, pytest: Sequence[str], before: Sequence[str] = ()
) -> tuple[Outcomes, float, float]:
    """Run pytest; return the outcome of each test (the worst of all processes), the seconds, and those in tests."""
    report = folder / "report"
    report.mkdir(exist_ok=True)
    for old in report.iterdir():
        old.unlink()
    line = f'exec {sys.executable} -m pytest -q -p no:cacheprovider --tb=native --junitxml={report}/$PMI_RANK.xml "$@"'
    began_s = time.perf_counter()
    subprocess.run([*before, "sh", "-c", line, "sh", *pytest], cwd=folder, check=False)
    whole_s = time.perf_counter() - began_s
    found: Outcomes = {}
    tests_s = 0.0
    for file in sorted(report.iterdir()):
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            kinds = {each.tag for each in case}
            outcome = (
                "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            )
            name = f"{case.get('classname')}::{case.get('name')}"
            found[name] = min(found.get(name, outcome), outcome, key=WORST.index)
            tests_s += float(case.get("time", 0)) / len([*report.iterdir()])
    return found, whole_s, tests_s


def compared(name: str, real: tuple[Outcomes, float, float], virtual: tuple[Outcomes, float, float]) -> None:
    """Print one line of the table."""
    passed = [test for test, outcome in real[0].items() if outcome == "passed"]
    alike = [test for test in passed if virtual[0].get(test) == "passed"]
    for test in sorted({*passed} - {*alike}):
        print(f"  passes with processes alone: {test}")
    print(
        f"| {name} | {len(real[0])} | {len(alike)} of {len(passed)} | {real[1]:.1f} | {virtual[1]:.1f} "
        f"(tests: {real[2]:.1f}, {virtual[2]:.1f})",
        flush=True,
    )


def torch_bodies(folder: Path, every: int, fork: bool) -> None:
    (folder / "test_bodies.py").write_text(BODIES)
    os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "4", "TEMP_DIR": str(folder)}
    chosen = ["test_bodies.py", "-k", "TestBodies and not cuda and not nccl"]
    whole = outcomes_of(folder, [*chosen, *VIRTUAL])
    counts = {each: [*whole[0].values()].count(each) for each in WORST}
    print(f"all bodies on virtual ranks: {counts}, {whole[1]:.1f} s, in tests {whole[2]:.1f} s", flush=True)
    run = [name for name, outcome in whole[0].items() if outcome != "skipped"][::every]
    nodes = [f"test_bodies.py::TestBodies::{name.rpartition('::')[2]}" for name in run]
    processes = outcomes_of(folder, [*nodes, *(FORK if fork else ())])
    compared("PyTorch's own bodies", processes, outcomes_of(folder, [*nodes, *VIRTUAL]))


def spawned(folder: Path, fork: bool) -> None:
    (folder / "test_step.py").write_text(STEP)
    processes = outcomes_of(folder, ["test_step.py", *(FORK if fork else ())])
    compared("a step of DDP, three times", processes, outcomes_of(folder, ["test_step.py", *VIRTUAL]))


def with_mpiexec(folder: Path, ranks: str, files: Sequence[str]) -> None:
    real = outcomes_of(folder, files, ["mpiexec", "-n", ranks])
    compared(
        f"{folder.name}, {len(files)} files", real,
        outcomes_of(folder, [*files, "-p", "spawnsim.testing", "--spawnsim-ranks", ranks]),
    )  # fmt: skip


VIRTUAL, FORK = ("-p", "spawnsim.testing", "--spawnsim"), ("-p", "forked")

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("PMI_RANK", "0")
    words = [word for word in sys.argv[1:] if word != "--fork"]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "forked.py").write_text(FORKED)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(scratch), os.environ.get("PYTHONPATH")]))
        if words[0] == "torch":
            torch_bodies(scratch, int((*words[1:], 1)[0]), "--fork" in sys.argv)
        elif words[0] == "spawn":
            spawned(scratch, "--fork" in sys.argv)
        else:
            with_mpiexec(Path.cwd(), words[1], words[2:])
