"""Scripts that start their own ranks: `spawnsim run FILE` without a number of ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spawnsim
from spawnsim.errors import ParameterError, ProgramError, SpawnsimError, UsageError
from spawnsim.run.program import ProgramFile

SPAWNED = """
import os, sys, time
import torch, torch.distributed as dist, torch.multiprocessing as mp
import beside

def work(rank, size, how):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.ones(1) * rank
    dist.all_reduce(total)
    beside.count += rank
    print(rank, int(total), how, beside.count, __name__, torch.rand(1).item() == FIRST, flush=True)

torch.manual_seed(3)
FIRST = torch.rand(1).item()
torch.manual_seed(3)
if __name__ == "__main__":
    for size in map(int, sys.argv[1:]):
        mp.spawn(work, args=(size, "spawn"), nprocs=size)
    print("all done", beside.count, time.time() > 0)
"""
FORKED = """
import sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp

class Worker(mp.Process):
    def __init__(self, rank, results):
        super().__init__(name=f"worker {rank}")
        self.rank, self.results = rank, results

    def run(self):
        dist.init_process_group("gloo", rank=self.rank, world_size=SIZE, init_method="file://" + FILE)
        total = torch.ones(1) * self.rank
        dist.all_reduce(total)
        SEEN.append(self.rank)
        self.results.put((self.rank, int(total), SEEN, mp.current_process().name))
        go.wait()
        if self.rank == 1:
            sys.exit(4)
        if self.rank == 2:
            raise ValueError("an error of worker 2")

SIZE, SEEN, FILE = 11, [], __file__ + ".store"
results, go = mp.Queue(), mp.Event()
workers = [Worker(rank, results) for rank in range(SIZE)]
for each in workers:
    each.start()
for each in sorted(results.get() for _ in workers):
    print(each)
go.set()
for each in workers:
    each.join()
print([each.exitcode for each in workers], SEEN, mp.current_process().name)
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Any]:
    """Write a script and run it; return its run."""

    def run(text: str, *argv: str, **keywords: Any) -> Any:
        (tmp_path / "beside.py").write_text("count = 0")
        path = tmp_path / "script.py"
        path.write_text(text)
        return spawnsim.run(path, argv=argv, **keywords)

    return run


def _lines(text: str) -> list[str]:
    return sorted(line.partition("] ")[2] if line.startswith("[rank") else line for line in text.splitlines())


@pytest.mark.parametrize("argv", [("2",), ("8",), ("3", "11")])
def test_spawned_ranks_print_as_processes(
    script: Callable[..., Any], argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its own modules, as spawned processes have; the main program's are unchanged."""
    helper = sys.modules.get("beside")  # of another test
    before = random.getstate(), dict(os.environ), list(sys.path), sys.modules["__main__"]
    run = script(SPAWNED, *argv)
    expected = ["all done 0 True"]
    for size in map(int, argv):
        total = sum(range(size))
        expected += [f"{rank} {total} spawn {rank} __mp_main__ True" for rank in range(size)]
    assert _lines(capsys.readouterr().out) == sorted(expected)
    assert run.totals["ranks"] == max(map(int, argv))
    assert before == (random.getstate(), dict(os.environ), list(sys.path), sys.modules["__main__"])
    assert sys.modules.get("beside") is helper


def test_forked_ranks_print_as_processes(
    script: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An unguarded script with global names, a queue that is read meanwhile, and exit codes; like real processes."""
    run = script(FORKED)
    seen = capsys.readouterr()
    assert not Path(f"{tmp_path / 'script.py'}.store").exists()
    real = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True, timeout=100
    )
    assert _lines(seen.out) == _lines(real.stdout)
    assert "[rank 2] Process worker 2:" in seen.err and "ValueError: an error of worker 2" in seen.err
    assert run.what["reproducible"] and not run.what["warnings"]


def test_a_run_is_recorded_and_repeats(script: Callable[..., Any], tmp_path: Path) -> None:
    """Rows, the number of ranks, faults and stragglers; the digest is the same in a second run."""
    text = SPAWNED.replace(
        "    print(rank",
        "    from spawnsim.comm import as_comm; as_comm(dist.group.WORLD).record(total=int(total))\n    print(rank",
    )
    runs = [script(text, "3", out=tmp_path / str(at), platform="ethernet-10g", seed=5) for at in range(2)]
    assert runs[0].totals["digest"] == runs[1].totals["digest"]
    assert sorted(zip(runs[0].table["rank"].tolist(), runs[0].table["total"].tolist(), strict=True)) == [
        (0, 3), (1, 3), (2, 3)
    ]  # fmt: skip
    what = json.loads((tmp_path / "0" / "run.json").read_text())["what"]
    assert (what["ranks"], what["seed"]) == (3, 5)


def test_a_trace_has_all_groups(script: Callable[..., Any], tmp_path: Path) -> None:
    """Two groups of processes, one after the other in virtual time."""
    script(SPAWNED, "2", "3", out=tmp_path / "traced", trace=True)
    assert subprocess.run(
        [sys.executable, "-m", "spawnsim", "trace", tmp_path / "traced"], check=True, timeout=100
    )


def test_errors_of_the_main_program(script: Callable[..., Any]) -> None:
    """An exception of torch, the status of sys.exit, an endless wait, and an option that does not apply."""
    head = "import sys, torch.multiprocessing as mp\ndef f(rank): 1 / rank\nif __name__ == '__main__':\n    "
    with pytest.raises(ProgramError, match=r"main program raised ProcessRaisedException at 0 s") as caught:
        script(head + "mp.spawn(f, nprocs=2)")
    assert type(caught.value.__cause__).__name__ == "ProcessRaisedException"
    assert "ZeroDivisionError" in str(caught.value.__cause__)
    with pytest.raises(ProgramError, match="main program ended with exit status 5"):
        script(head + "sys.exit(5)")
    with pytest.raises(SpawnsimError, match=r"the main program waits in Queue.get\(\)"):
        script(head + "mp.Queue().get()")
    with pytest.raises(ParameterError, match="threads"):
        script(head + "pass", options={"carrier": "greenlets"})


def test_a_script_without_processes_needs_a_number_of_ranks(script: Callable[..., Any]) -> None:
    """Also one whose main takes a communicator."""
    with pytest.raises(TypeError, match="number of ranks"):
        script("import torch.distributed")
    run = script("import multiprocessing")
    assert any("give --ranks N" in sentence for sentence in run.what["warnings"])
    with pytest.raises(ProgramError) as caught:
        script("import multiprocessing, os; os.environ['RANK_']")
    assert "give --ranks N" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="number of ranks"):
        script("import multiprocessing\ndef main(comm): ...")


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("import torch.multiprocessing as mp", True),
        ("from torch import multiprocessing", True),
        ("from multiprocessing import Process\ndef main(rank, size): ...", True),
        ("import torch\ntorch.multiprocessing.spawn(print)", True),
        ("import torch\ntorch.distributed.init_process_group()", False),
    ],
)
def test_files_that_start_ranks_are_recognised(text: str, starts: bool, tmp_path: Path) -> None:
    """By their imports."""
    (tmp_path / "file.py").write_text(text)
    assert ProgramFile.read(tmp_path / "file.py").starts_ranks is starts


def test_ranks_of_a_program_start_none(script: Callable[..., Any]) -> None:
    """With a number of ranks, the error names the remedy."""
    with pytest.raises(UsageError, match="leave --ranks out"):
        script(SPAWNED.replace("if __name__", "import torch.distributed\nif __name__"), "2", ranks=2)


def test_the_command_line_runs_a_main_program(tmp_path: Path) -> None:
    """Its own options go to the script; its status is the script's."""
    (tmp_path / "beside.py").write_text("count = 0")
    (tmp_path / "script.py").write_text(SPAWNED + "\n    sys.exit(7 if len(sys.argv) > 2 else 0)")
    line = [sys.executable, "-m", "spawnsim", "run", "script.py", "2", "--seed", "1"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        "[rank 1] 1 1 spawn 1 __mp_main__ True\n" in done.stdout and "\nranks            2\n" in done.stdout
    )
    done = subprocess.run(
        [*line, "3"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 7 and "exit status 7" in done.stderr
