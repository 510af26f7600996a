"""Whether a job must end, and why it has: by its ranks' records first, then their monitors', then the launcher's."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from spawnsim.real.launch import supervisor
from spawnsim.real.launch.supervisor import JobEnd, JobState
from spawnsim.real.runtime.registry import (
    BEGUN,
    ENDED,
    ProcessRegistry,
    record_first_end,
    register,
    register_stage,
)

BANNER = b"""--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 2449 on node here exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""
SHORT = b"""YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Return what ranks find the registry by."""
    return {"SPAWNSIM_REGISTRY": str(tmp_path)}


def test_the_first_end_is_the_one_that_counts(tmp_path: Path, environ: dict[str, str]) -> None:
    """Whatever the launcher says; a rank that has said all itself is not told of again."""
    job = JobState(ProcessRegistry(tmp_path), 3, survive=False)
    job.filters[1](BANNER)
    assert not job.doomed()
    assert record_first_end(1, "", environ)
    assert record_first_end(137, "rank 1 was killed", environ) is False
    assert job.ended(9) == JobEnd(1, "")


def test_a_stop_request_may_be_the_launchers_work(tmp_path: Path, environ: dict[str, str]) -> None:
    """Open MPI's names the rank that it had seen dying before."""
    job = JobState(ProcessRegistry(tmp_path), 3, survive=False)
    record_first_end(143, "rank 0 was asked to stop (SIGTERM)", environ)
    assert job.ended(143) == JobEnd(143, "rank 0 was asked to stop (SIGTERM)")
    job.filters[1](BANNER)
    assert job.ended(143) == JobEnd(137, "rank 2 (process 2449 on here) was killed by signal 9 (SIGKILL)")


@pytest.mark.parametrize(
    ("status", "survive", "kept", "wanted"),
    [
        (0, False, range(3), JobEnd(0, "")),
        (0, True, range(3), JobEnd(122, "no rank survived to the end")),
        (
            255,
            False,
            range(3),
            JobEnd(255, "the launcher has ended with status 255: no rank reported a reason"),
        ),
        (
            -9,
            False,
            range(3),
            JobEnd(137, "the launcher was killed by signal 9 (SIGKILL): no rank reported a reason"),
        ),
        (9, True, (0, 1), JobEnd(9, "the launcher has ended with status 9: rank 2 died at its start")),
        (9, True, (1,), JobEnd(9, "the launcher has ended with status 9: ranks 0 and 2 died at their start")),
    ],
)
def test_a_job_never_ends_without_a_word(
    tmp_path: Path, environ: dict[str, str], status: int, survive: bool, kept: range, wanted: JobEnd
) -> None:
    """Where nobody has said why, what the launcher did is said."""
    for rank in kept:
        register(rank, environ, 1000 + rank)
    job = JobState(ProcessRegistry(tmp_path), 3, survive=survive)
    assert job.ended(status) == wanted
    if status == 0:
        register_stage(ENDED, 1, environ)
        assert job.ended(0) == JobEnd(0, "")


@pytest.mark.parametrize(
    ("kept", "who"),
    [
        ((0, 1), "rank 2, at its start, was killed by signal 9 (SIGKILL): no job survives that"),
        (
            (1,),
            "one of ranks 0 and 2, at their start, was killed by signal 9 (SIGKILL): no job survives that",
        ),
        ((0, 1, 2), "a rank's monitor was killed by signal 9 (SIGKILL)"),
    ],
)
def test_a_signal_without_a_process_is_reported_as_such(
    tmp_path: Path, environ: dict[str, str], kept: tuple[int, ...], who: str
) -> None:
    """MPICH's launcher says no more of it in a job that survives its ranks, and ends it with that number as status."""
    for rank in kept:
        register(rank, environ, 1000 + rank)
    register("", environ, 999)
    job = JobState(ProcessRegistry(tmp_path), 3, survive=True)
    job.filters[0](SHORT)
    assert job.ended(9) == JobEnd(137, who)


def test_a_job_that_has_lost_a_rank_is_doomed_when_all_have_had_their_last_words(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all programs have begun there are none."""
    now_s = [100.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now_s[0])
    early, late = (
        JobState(ProcessRegistry(tmp_path), 3, survive=False),
        JobState(ProcessRegistry(tmp_path), 1, survive=False),
    )
    register_stage(BEGUN, 0, environ)
    record_first_end(137, "rank 1 was killed", environ)
    found = []
    for now_s[0] in (100.0, 100.0 + supervisor.UNBEGUN_S + 0.1, 100.0 + supervisor.DOOMED_S + 0.1):
        found.append((early.doomed(), late.doomed()))
    assert found == [(False, False), (True, False), (True, True)]


def test_a_rank_that_nobody_keeps_is_missed_in_time(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the launcher may still be starting others, nor while one that has not signed runs."""
    now_s = [100.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now_s[0])
    job = JobState(ProcessRegistry(tmp_path), 3, survive=True)
    running = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    register("", environ, os.getpid())
    register(0, environ, running[0].pid)
    for now_s[0] in (100.0, 200.0):
        assert not job.doomed()  # one more runs than has signed
    register(2, environ, running[1].pid)
    others = len(supervisor.children(os.getpid())) - 2  # of this test's own process
    job.ranks += others
    for rank in range(3, 3 + others):
        register(rank, environ, 2**22 + rank)
    for now_s[0] in (200.0, 200.0 + supervisor.STARTING_S / 2):
        assert not job.doomed()
    assert job.ended(1).status == 1
    now_s[0] = 200.0 + supervisor.STARTING_S + 0.1
    assert job.doomed()  # nobody has anything to save, and the launcher has had the time to end by itself
    for each in running:
        each.kill()
        each.wait()
    assert job.ended(143) == JobEnd(122, "rank 1 died at its start: no job survives that")


def test_a_process_that_registers_again_can_be_read_meanwhile(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    """The launcher looks at any time: a file that was being written made it raise ValueError."""
    registry, done = ProcessRegistry(tmp_path), threading.Event()
    register(3, environ, 1000)

    def again() -> None:
        while not done.is_set():
            register(3, environ, 1000)

    writer = threading.Thread(target=again)
    writer.start()
    try:
        assert all(registry.ranks == {3} for _ in range(1000))
    finally:
        done.set()
        writer.join()
