"""The table of backends: one entry makes a backend known to all that read the table."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import spawnsim
from spawnsim.backends import BACKENDS, Backend, backend_of, real_backends
from spawnsim.comm.backends import as_comm, world
from spawnsim.errors import ParameterError
from spawnsim.real.launch.launchers import command_line
from spawnsim.scenario import Scenario
from spawnsim.study import Cell
from spawnsim.virtual import simulate


@pytest.fixture
def shout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Add a backend over a library that is called shout."""
    package: Any = ModuleType("shout_backend")
    package.wrap = lambda group: SimpleNamespace(compute=None, clock=None, of=group)
    library: Any = ModuleType("shout")
    library.Group = type("Group", (), {})
    library.everyone = library.Group()
    monkeypatch.setitem(sys.modules, "shout_backend", package)
    monkeypatch.setitem(sys.modules, "shout", library)
    entry = Backend("shout", "shout_backend", "shout:Group", "shout:everyone", "shoutrun")
    monkeypatch.setitem(BACKENDS, "shout", entry)
    return library


def test_one_entry_is_enough(shout: Any, tmp_path: Path) -> None:
    """Its groups are wrapped, its world is found, and studies take its name."""
    assert as_comm(shout.everyone).of is shout.everyone  # type: ignore[attr-defined]
    assert world("shout").of is shout.everyone  # type: ignore[attr-defined]
    assert real_backends() == ("mpi", "torch", "shout")
    program = tmp_path / "program.py"
    program.write_text("def main(comm): pass\n")
    assert Cell(file=program, ranks=2, backend="shout").name == "program-n2-shout-s0"
    with pytest.raises(
        ParameterError, match="Unknown backend 'whisper': choose one of virtual, mpi, torch, shout"
    ):
        Cell(file=program, ranks=2, backend="whisper")


def test_a_group_is_known_by_its_class_or_by_what_it_says(shout: Any) -> None:
    """A program's subclass is wrapped like its base; an object with `as_comm` is asked; a name decides nothing."""
    mine: Any = type("Mine", (shout.Group,), {"__module__": "program"})()
    assert as_comm(mine).of is mine  # type: ignore[attr-defined]
    assert as_comm(SimpleNamespace(as_comm=lambda: "its own")) == "its own"
    with pytest.raises(ParameterError, match="pass a spawnsim Comm"):
        as_comm(type("Group", (), {"__module__": "shout.groups"})())


def test_the_named_one_of_two_backends_wraps_its_world(shout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two may wrap one library; what is passed as a group goes to the first."""
    package: Any = ModuleType("second_backend")
    package.wrap = lambda group: "second"
    monkeypatch.setitem(sys.modules, "second_backend", package)
    entry = Backend("second", "second_backend", "shout:Group", "shout:everyone", "shoutrun")
    monkeypatch.setitem(BACKENDS, "second", entry)
    assert world("second") == "second"
    assert as_comm(shout.everyone).of is shout.everyone  # type: ignore[attr-defined]


def test_the_table_names_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further backend over torchrun is started with it."""
    monkeypatch.setitem(
        BACKENDS,
        "torch2",
        Backend("torch2", "spawnsim.real.torch", "torch.distributed:ProcessGroup", launcher="torchrun"),
    )
    assert "spawnsim.real.launch.forked" in command_line("train.py", 2, ["--backend", "torch2"])


def test_on_a_virtual_rank_the_world_is_its_own() -> None:
    """Whatever kind of world a program asks for; a kind that no real backend has is refused there as well."""
    found = []

    def main(comm: Any) -> None:
        assert all(world(kind) is comm for kind in real_backends())
        with pytest.raises(ParameterError, match=r"^Unknown backend .*choose one of mpi, torch"):
            world("virtual")
        found.append(comm.Get_rank())

    simulate(main, Scenario(11), recorder=None)  # type: ignore[arg-type]
    assert sorted(found) == list(range(11))


def test_an_unknown_backend_names_those_there_are() -> None:
    """As all bad parameters do."""
    with pytest.raises(ParameterError, match="Unknown backend 'mpj': choose one of virtual, mpi, torch"):
        backend_of("mpj")


def test_the_layer_of_comm_names_nothing_above_it() -> None:
    """No import by name either, which import-linter does not see."""
    folder = Path(spawnsim.__file__).parent / "comm"
    above = re.compile(r"import_module|[\"']spawnsim\.(real|virtual)")
    assert [path.name for path in folder.glob("*.py") if above.search(path.read_text(encoding="utf-8"))] == []
