"""Programs that run one after another in a process: modules of the same name belong to each program's folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

import spawnsim

SPAWNING = """
from multiprocessing import get_context
import helper
def work():
    assert helper.NAME == "own", helper.NAME
if __name__ == "__main__":
    assert helper.NAME == "own", helper.NAME
    process = get_context("spawn").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
PARENT = """
import sys
from mpi4py import MPI
child = MPI.COMM_SELF.Spawn(sys.executable, ["kid/child.py"], maxprocs=2)
assert child.recv(source=1) == "own"
"""
CHILD = """
import helper
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    MPI.Comm.Get_parent().send(helper.NAME, 0)
"""


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Leave the module `helper` of another program in the process."""
    module = ModuleType("helper")
    module.NAME = "another program's"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "helper", module)
    return module


def test_a_main_program_imports_its_own(tmp_path: Path, earlier: ModuleType) -> None:
    """And so do its processes; afterwards the other is back."""
    (tmp_path / "helper.py").write_text("NAME = 'own'")
    (tmp_path / "starts.py").write_text(SPAWNING)
    assert spawnsim.run(tmp_path / "starts.py").totals["ranks"] == 1
    assert sys.modules["helper"] is earlier


def test_a_spawned_program_imports_its_own(
    tmp_path: Path, earlier: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its folder, which is not its parent's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kid").mkdir()
    (tmp_path / "kid" / "helper.py").write_text("NAME = 'own'")
    (tmp_path / "kid" / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    assert spawnsim.run(tmp_path / "parent.py", ranks=1).outcome == "finished"
    assert sys.modules["helper"] is earlier
