"""Shared memory that a job has left is removed; that of other jobs and users is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spawnsim.real.launch import supervisor
from spawnsim.real.launch.supervisor import shared_memory_removed

HOLDING = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in the place of the system's."""
    monkeypatch.setattr(supervisor, "SHM_FOLDER", tmp_path)
    return tmp_path


def test_what_nobody_uses_is_removed(folder: Path) -> None:
    """Whatever library has named it; also when the block raises."""
    with pytest.raises(KeyError), shared_memory_removed():
        for name in (
            "mpich_shm_1a_0",
            "mpich_shar_tmpOvrDPG",
            "sm_segment.here.0.1",
            "osc_rdma.here.1",
            "torch_7",
        ):
            (folder / name).write_bytes(bytes(100))
        raise KeyError
    assert [file.name for file in folder.iterdir()] == ["torch_7"]


def test_another_jobs_is_left_alone(folder: Path) -> None:
    """One that a process has mapped; one that was there before; one of another user."""
    used, older, foreign = (folder / f"mpich_shm_{name}_0" for name in "abc")
    older.write_bytes(bytes(100))
    time.sleep(supervisor.FILE_TIME_S + 0.1)
    with shared_memory_removed():
        used.write_bytes(bytes(100))
        foreign.write_bytes(bytes(100))
        if os.getuid() == 0:
            os.chown(foreign, 12345, 12345)
        line = [sys.executable, "-c", HOLDING, str(used)]
        holder = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mapped\n"
    left = {file for file in (used, older, foreign) if file.exists()}
    holder.kill()
    holder.communicate()
    assert left == ({used, older, foreign} if os.getuid() == 0 else {used, older})
