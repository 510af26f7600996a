"""Which distributions are installed, by the names of their folders."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

from spawnsim.installed import versions
from spawnsim.record.manifest import PACKAGES


def test_versions_are_those_that_python_itself_finds() -> None:
    """Of all packages that a run's manifest names."""
    found = versions(PACKAGES)
    for name in PACKAGES:
        try:
            assert found.get(name) == metadata.version(name)
        except metadata.PackageNotFoundError:
            assert name not in found


def test_the_first_folder_counts_and_names_are_whole(tmp_path: Path) -> None:
    """Wheels and eggs, local versions, and no package whose name only begins alike."""
    first, second = tmp_path / "a", tmp_path / "b"
    for place in (
        first / "torch-2.9.1+cpu.dist-info", second / "torch-1.0.dist-info", second / "SimPy-4.1-py3.11.egg-info",
        second / "numpy_financial-1.0.dist-info",
    ):  # fmt: skip
        place.mkdir(parents=True)
    path = [str(first), str(second), str(tmp_path / "nowhere")]
    assert versions(["simpy", "torch", "numpy"], path) == {"simpy": "4.1", "torch": "2.9.1+cpu"}


def test_a_launcher_loads_nothing_heavy() -> None:
    """Neither numpy nor torch nor MPI, and not what reads metadata; a rank none of what starts processes for others."""
    program = "import sys; from importlib import import_module; [import_module(n) for n in {0!r}]; print(*sys.modules)"
    shown = ["spawnsim.cli.run", "spawnsim.cli.real", "spawnsim.real.launching.launch"]
    launcher = ["spawnsim.real.launching.attending"]
    for names, heavy in (
        (shown, {"subprocess", "tempfile"}),
        (shown + launcher, {"numpy", "torch", "mpi4py", "importlib.metadata", "email", "hashlib", "html"}),
    ):
        line = [sys.executable, "-c", program.format(names)]
        loaded = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
        assert not heavy & set(loaded)
