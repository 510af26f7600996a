"""What forks the ranks of torch.distributed: they find what processes of their own would, and deaths are told truly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from spawnsim.real.launch.launchers import forked

PROGRAM = """
import multiprocessing, os, random, sys
import numpy, torch
import torch.distributed as dist

class Made:
    def __init__(self, value): self.value = value

def made(value): return Made(value)

def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    told = [None] * size
    dist.all_gather_object(told, (random.random(), numpy.random.random(), float(torch.rand(()))))
    if rank == 1:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("pool", pool.map(made, [4])[0].value)
    if rank == 0:
        print("file", __file__, "path", sys.path[0], "arguments", *sys.argv[1:])
        print("differ", *[len({each[place] for each in told}) for place in range(3)])
        print("variables", *[os.getenv(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 2: sys.exit(7)

if __name__ == "__main__":
    main()
"""


def run(line: list[str], **how: object) -> tuple[int, str, str]:
    """Return status, output and errors of a command."""
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False, **how)  # type: ignore[call-overload]
    return done.returncode, done.stdout, done.stderr


def surroundings(**more: str) -> dict[str, str]:
    """Return the environment without what decides of threads."""
    return {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | more


def test_a_file_runs_as_python_runs_it(tmp_path: Path) -> None:
    """Its path, arguments, module, workers; generators of Python and numpy differ, torch's is the same on all."""
    (tmp_path / "program.py").write_text(PROGRAM)
    status, out, err = run([*forked(3), "program.py", "--its-own", "3"], cwd=tmp_path)
    assert status == 7, err
    lines = dict(line.split(" ", 1) for line in out.splitlines())
    file = tmp_path / "program.py"
    assert lines["file"] == f"{file} path {tmp_path} arguments --its-own 3"
    assert lines["differ"] == "3 3 1"
    assert lines["variables"] == "0 0 3 3"
    assert lines["pool"] == "4"


def test_a_program_that_sets_variables_is_loaded_by_each_rank(tmp_path: Path) -> None:
    """Libraries read them once, as they are loaded."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint(torch.get_num_threads())\n"
    )
    status, out, err = run([*forked(1), str(program)], env=surroundings())
    assert (status, out.split()) == (0, ["2"]), err


WAITING = """
import os, time
def main(comm):
    comm.Barrier()
    with open(f"FOLDER/{comm.rank}.new", "w") as file: file.write(f"{os.getpid()} {os.getppid()}")
    os.rename(file.name, file.name[:-4])
    time.sleep(60)
"""


def started(tmp_path: Path, ranks: int) -> tuple[subprocess.Popen[str], list[tuple[int, int]]]:
    """Start a job; return it, and the processes of its ranks with their monitors, once all are in main."""
    program = tmp_path / "waiting.py"
    program.write_text(WAITING.replace("FOLDER", str(tmp_path)))
    line = [sys.executable, *f"-m spawnsim run {program} --backend torch -n {ranks} --quiet".split()]
    job = subprocess.Popen(
        line, stderr=subprocess.PIPE, text=True, env=surroundings(), start_new_session=True
    )
    files, due_s = [tmp_path / str(rank) for rank in range(ranks)], time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < due_s and job.poll() is None
        time.sleep(0.05)
    return job, [(int(one), int(other)) for one, other in (file.read_text().split() for file in files)]


def test_a_rank_whose_monitor_is_killed_is_named(tmp_path: Path) -> None:
    """The launcher alone sees that death; `test_workers` kills a rank."""
    job, processes = started(tmp_path, 2)
    os.kill(processes[1][1], signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 137, err
    assert "rank 1 (process" in err and "was killed by signal 9 (SIGKILL)" in err, err


def test_a_job_dies_with_the_process_that_has_started_it(tmp_path: Path) -> None:
    """Also where numpy is not told how many threads to begin."""
    job, processes = started(tmp_path, 2)
    job.kill()
    job.communicate(timeout=60)
    due_s = time.monotonic() + 20
    while any(Path(f"/proc/{process}").exists() for pair in processes for process in pair):
        assert time.monotonic() < due_s
        time.sleep(0.05)
