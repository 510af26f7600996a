"""How the ranks that are left are ended when a run has failed: `finally` blocks run, and nothing can go on for ever."""

import re
import subprocess
import sys

import pytest
from support.virtual_run import Notes, platform

import spawnsim
from spawnsim.errors import Deadlock
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate


def stuck(main, on_error=lambda error: None):
    """Run a main that ends in a deadlock on three ranks."""
    with pytest.raises(Deadlock):
        simulate(main, Scenario(3, platform()), recorder=Notes(), on_error=on_error)


def wait(comm):
    """Wait for a word that nobody sends."""
    comm.recv(source=(comm.rank + 1) % comm.size)


def test_finally_blocks_run_and_their_calls_are_refused():
    """All of them, one around the other; a send is refused like a receive."""
    log = []

    def main(comm):
        try:
            wait(comm)
        finally:
            log.append("first")
            try:
                comm.send("too late", 0)
                log.append("sent")
            finally:
                log.append("second")

    stuck(main)
    assert log == ["first", "second"] * 3


def test_the_error_is_reported_before_anything_is_ended():
    """What programs do in `finally` may hang, or end the process."""
    log = []

    def main(comm):
        try:
            wait(comm)
        finally:
            log.append("finally")

    stuck(main, lambda error: log.append(type(error)))
    assert log == [Deadlock, "finally", "finally", "finally"]


@pytest.mark.parametrize("call", ["recv", "Iprobe", "Barrier", "send"])
def test_a_program_that_takes_no_notice_is_left_behind(call):
    """It catches everything and calls again, for ever."""
    calls = []

    def main(comm):
        try:
            wait(comm)
        finally:
            while True:
                calls.append(comm.rank)
                try:
                    getattr(comm, call)(*([1, 0] if call == "send" else []))
                except BaseException:  # noqa: BLE001
                    continue

    stuck(main)
    assert sorted(set(calls)) == [0, 1, 2]
    assert len(calls) < 300


PROGRAM = """
from mpi4py import MPI
import torch, unittest
comm = MPI.COMM_WORLD

class Tests(unittest.TestCase):
    def test_a_waits(self):
        comm.recv(source=(comm.rank + 1) % comm.size)
    def test_b_raises(self):
        with self.assertRaises(IndexError):
            torch.zeros(2, 3).permute(0, 3)
    def test_c_goes_on(self):
        comm.Barrier()

print("begun")
unittest.main()
"""


def test_torch_may_raise_while_a_run_ends(tmp_path):
    """It unwinds the stack of a rank, down to the hub's. It was a segmentation fault, without a word."""
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, "-m", "spawnsim", "run", str(path), "--ranks", "3"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 121, found.stderr
    assert found.stdout.splitlines() == [f"[rank {rank}] begun" for rank in range(3)]
    assert "deadlock: 3 of 3 ranks wait" in found.stderr
    assert found.stderr.count("deadlock") == 1
    assert "GreenletExit" not in found.stderr
    assert "InternalError" not in found.stderr


def test_ranks_that_stand_alike_share_a_line():
    """Of 40 ranks that wait in one call, whose ring is two others, one has a row and a line counts the rest."""

    def main(comm):
        if comm.rank in (0, 41):
            comm.ssend("x", 41 - comm.rank)
        comm.barrier()

    with pytest.raises(Deadlock) as caught:
        spawnsim.run(main, ranks=42)
    text = str(caught.value)
    assert text.count("\n  rank ") == 4  # the head, the ring, and the first that waits for it
    assert re.search(r"\n  39 more in Barrier at test_ending_tasks\.py:\d+\n", text)
    assert len(caught.value.causes) == 1
    assert caught.value.causes[0].startswith("ssend test_ending_tasks.py:")
