"""Jobs that go wrong on real MPI end soon, all together, with one message and a non-zero status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spawnsim.errors import reported_place

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

PROGRAM = """
comm = world(deadline_s={deadline_s})
rank = comm.rank
with guarded(comm):
    {body}
    comm.Barrier()
"""


def program(body: str, deadline_s: float = 30.0) -> str:
    """Return a program in which the ranks run `body` and then meet in a Barrier.

    A short deadline is for those who test what happens behind it.
    """
    return PROGRAM.format(body=body, deadline_s=deadline_s)


def test_an_exception_on_one_rank_ends_the_job_with_one_traceback(job):
    """One traceback, the rank is named, the status is that of a program that raised."""
    found = job(program("if rank == 2: raise ValueError('wrong step')"))
    assert found.status == 1
    assert found.err.count("Traceback") == 1
    first = found.err.splitlines()[found.err.splitlines().index("Traceback (most recent call last):") + 1]
    assert "program.py" in first  # not how it was started
    assert "wrong step" in found.err
    assert "rank 2 of 4 raised" in found.err


def test_the_same_exception_on_all_ranks_is_shown_once(job):
    """Rank 0 grants the floor to one speaker. Of an error of ours the program's own lines are shown, and no others.

    The status is that of a program that raised, as on virtual ranks: no option was wrong.
    """
    found = job(program("__import__('spawnsim').AverageAllPolicy(0)"))
    assert found.status == 1
    assert found.err.count("Traceback") == 1
    assert "average_every=0" in found.err
    assert [line for line in found.err.splitlines() if 'File "' in line and "program.py" not in line] == []


def test_sys_exit_with_a_status_ends_the_job_with_it(job):
    """A rank that leaves with a status takes the others along."""
    found = job(program("if rank == 1: sys.exit(7)"), n=2)
    assert found.status == 7
    assert "rank 1 called sys.exit" in found.err


def test_a_quiet_deserter_is_named(job):
    """A rank that exits early with status 0 hangs both MPIs for ever; here the others' deadline names it."""
    found = job(program("if rank == 1: sys.exit(0)", deadline_s=1.0), n=2)
    assert found.status == 122
    assert re.search(
        r"Barrier number \d+ on world missed its deadline of [\d.]+ s \(program\.py:\d+\)", found.err
    )
    assert "missing: rank 1" in found.err
    assert "has ended its program" in found.err


def test_an_error_of_a_compiled_library_is_reported_with_the_programs_line():
    """Cython's frames name source files by paths of their own, numpy's and mpi4py's do: none is the program's."""
    with pytest.raises(ValueError, match="cannot be empty") as caught:
        np.random.default_rng().choice([])
    assert re.search(rf"\({Path(__file__).name}:\d+\)$", reported_place(caught.value))


def test_a_rank_that_computes_too_long_is_named(job):
    """The message says who is missing and what that rank is doing."""
    found = job(program("if rank == 1:\n        with comm.compute(): time.sleep(20)", deadline_s=1.0), n=2)
    assert found.status == 122
    assert "missing: rank 1\n" in found.err
    assert "rank 1: computing for" in found.err
    assert found.err.count("missed its deadline") == 1


def test_a_stopped_rank_is_named_as_silent(job):
    """A rank that does not even answer is told apart from one that computes."""
    found = job(
        program("if rank == 1: import signal; os.kill(os.getpid(), signal.SIGSTOP)", deadline_s=1.0), n=2
    )
    assert found.status != 0
    assert "rank 1: no answer" in found.err


def test_different_collectives_are_reported_with_lines_and_where_to_see_more(job):
    """The line of a rank that waits, and that of the one which is elsewhere."""
    found = job(program("if rank == 1: comm.allgather(1)", deadline_s=1.0), n=2)
    assert found.status == 122
    assert re.search(r"Barrier number \d+ on world missed its deadline of 1 s \(program.py:\d+\)", found.err)
    assert re.search(r"rank 1: in allgather number \d+ on world for \d\.\d s \(program.py:\d+\)", found.err)
    assert "on virtual ranks (spawnsim run FILE --ranks N)" in found.err


@pytest.mark.parametrize("backend", ["mpi", "torch"])
def test_a_library_that_aborts_as_calls_do_not_fit_is_helped_out(tmp_path, backend):
    """MPI and gloo say that a message is too long, and neither the call nor its line."""
    program = tmp_path / "counts.py"
    program.write_text(
        "import numpy as np\n\ndef main(comm):\n    n = 5000 if comm.rank == 3 else 10\n"
        "    comm.Allreduce(np.ones(n), np.ones(n))\n    comm.Allreduce(np.ones(n), np.ones(n))\n"
    )
    line = [sys.executable, "-m", "spawnsim", "run", program, "-n", "4"]
    found = subprocess.run([*line, "--backend", backend], capture_output=True, text=True, timeout=60)
    assert found.returncode != 0
    last = (
        f"spawnsim: calls do not fit: `spawnsim run {program} --ranks 4` shows them and their lines; "
        "--check-calls shows collective calls\n"
    )
    assert found.stderr.endswith(last)
    if backend == "torch":
        return
    reported = subprocess.run(line, capture_output=True, text=True, timeout=60).stderr
    assert "rank 3 calls Allreduce(op=SUM, count=5000" in reported
    assert "and waits at counts.py:5" in reported


def test_an_error_in_a_background_task_ends_the_job(job):
    """A thread's exception has no caller: it ends the job like one of the rank's own."""
    found = job(program("if rank == 1: comm.background(lambda: 1 / 0); time.sleep(9)"), n=2)
    assert found.status == 1
    assert "ZeroDivisionError" in found.err


def test_last_words_are_said_on_every_rank(job):
    """What ranks have recorded is saved before the job is aborted."""
    found = job(
        program(
            "comm.runtime.on_abort(lambda text: os.write(1, f'{rank}: {text}\\n'.encode()))\n"
            "    comm.Barrier()\n    if rank == 2: raise ValueError('late')"
        )
    )
    assert sorted(found.out.splitlines()) == [f"{rank}: ValueError: late" for rank in range(4)]


def test_a_signal_to_one_rank_ends_the_job_with_one_line(job):
    """A rank that is inside MPI runs no Python, and still the whole job ends at once, and saves what it has."""
    found = job(
        program(
            "comm.runtime.on_abort(lambda text: os.write(1, f'{rank}: {text}\\n'.encode()))\n"
            "    import signal\n"
            "    comm.Barrier()\n"
            "    if rank == 1: time.sleep(0.5); os.kill(os.getpid(), signal.SIGTERM)"
        )
    )
    assert found.status == 143
    assert sorted(found.out.splitlines()) == [f"{rank}: stopped by SIGTERM" for rank in range(4)]
    assert found.err.count("spawnsim: rank 1 was asked to stop (SIGTERM); the job ends") == 1
    assert "Traceback" not in found.err


def test_a_program_keeps_its_own_handler(job):
    """Whoever handles a signal is not stopped by it."""
    found = job(
        program(
            "import signal\n"
            "    signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))\n"
            "    if rank == 1: os.kill(os.getpid(), signal.SIGTERM)\n"
            "    time.sleep(0.3)"
        ),
        n=2,
    )
    assert (found.status, found.out) == (0, "handled\n"), found.err


@pytest.mark.parametrize(("count", "nbytes"), [(3, 400_000), (2000, 8)])
def test_messages_that_nobody_received_do_not_delay_the_end(job, count, nbytes):
    """They are taken from the library on all communicators, whether their requests were kept or dropped."""
    body = (
        "other = comm.Dup()\n    began = time.perf_counter()\n"
        f"    if rank == 0: [other.Isend(np.zeros({nbytes // 8}), 1, 3) for _ in range({count})]\n"
        "    if rank == 2: comm.Irecv(np.zeros(3), 3, 9); comm.irecv(source=1)\n"
        "    import atexit; atexit.register(lambda: print(time.perf_counter() - began < 30) if not rank else 0)"
    )
    found = job(program(body, deadline_s=50))
    assert (found.status, found.err) == (0, "")
    assert found.out == "True\n"


PLAIN = """
import torch
from mpi4py import MPI
from spawnsim import DecentralizedAverager

world = MPI.COMM_WORLD
averager = DecentralizedAverager(
    [torch.full((1000,), float(world.rank))], world, start=False, prefix="t", target_group_size=world.size,
    min_matchmaking_time=1.0, request_timeout=0.5,
)
assert averager.step(timeout=10.0) is not None
for turn in range(world.size):  # whoever goes later tells those that have gone
    if turn == world.rank:
        averager.shutdown()
    world.Barrier()
"""


def test_messages_of_policies_in_a_program_of_plain_mpi4py_do_not_break_its_end(job):
    """What `shutdown` tells ranks that have ended is taken from the library, or MPICH would end with status 9."""
    found = job(PLAIN, head="", n=3)
    assert (found.status, found.out, found.err) == (0, "", "")
