"""Data races of one-sided programs: which are found, what the report says, and what the search changes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim import cli
from spawnsim.errors import DataRace, UnsupportedError
from spawnsim.virtual.races.accesses import merged, overlap
from spawnsim.virtual.races.loads import reporting
from spawnsim.virtual.races.memory import Watched, runs_of_array

spec = importlib.util.spec_from_file_location("race_cases", Path(__file__).with_name("cases.py"))
assert spec is not None and spec.loader is not None
made: Any = importlib.util.module_from_spec(spec)
sys.modules["race_cases"] = made
spec.loader.exec_module(made)

HEAD = made.HEAD
TAIL = made.TAIL


@pytest.mark.parametrize("category", ["conflict", "sync", "atomic", "misc", "shared"])
def test_every_race_is_found_and_no_other(
    category: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All programs of one category."""
    cases = [case for case in made.cases() if case.category == category]
    wrong = [case.name for case in cases if made.judged(case, tmp_path)[0] is not case.racy]
    capsys.readouterr()
    assert wrong == []


def test_there_are_as_many_cases_as_in_the_published_suite() -> None:
    """It has 72 with a race and 53 without."""
    racy = [case.racy for case in made.cases()]
    assert racy.count(True) >= 72
    assert racy.count(False) >= 53


def report(tmp_path: Path, body: str, ranks: int = 3) -> str:
    """Return the report of a program with a race."""
    path = tmp_path / "program.py"
    path.write_text(HEAD + body + TAIL)
    with pytest.raises(DataRace) as caught:
        spawnsim.run(path, ranks=ranks, races=True)
    assert len(caught.value.races) == 1
    return caught.value.races[0]


def test_the_report_names_both_accesses_the_bytes_and_the_missing_call(tmp_path: Path) -> None:
    """An end of the accesses is missing, or what orders the ranks, or both."""
    put = "win.Lock_all()\nif rank == 0:\n    win.Put(value, 1, [1, 1])\n"
    assert report(tmp_path, f"{put}comm.Barrier()\nif rank == 1:\n    mem[1] = 2\nwin.Unlock_all()\n") == (
        "Put of rank 0 (program.py:14) and a store of rank 1 (program.py:17) access bytes 8 to 15 of the part of rank "
        "1 in window on MPI_COMM_WORLD, in an epoch of Lock_all, and nothing orders them; missing: Flush or "
        "Unlock_all of rank 0, then a Barrier or a message, between them"
    )
    both = report(tmp_path, f"{put}if rank == 2:\n    win.Get(result, 1, [1, 1])\nwin.Unlock_all()\n")
    assert both.endswith("missing: a Barrier or a message between them, or exclusive locks around both")
    fence = report(tmp_path, "win.Fence()\nif rank != 1:\n    win.Put(value, 1)\nwin.Fence()\n")
    assert fence.endswith("in an epoch of a fence, and nothing orders them; missing: Fence between them")
    own = report(
        tmp_path,
        "win.Lock_all()\nif rank == 0:\n    win.Get(result, 1)\n    print(result)\nwin.Unlock_all()\n",
    )
    assert own.startswith(
        "Get of rank 0 (program.py:14) and a load of rank 0 (program.py:15) access the buffer"
    )
    assert own.endswith("missing: Flush or Unlock_all before the second")


def test_a_rank_does_not_race_with_its_own_stores(tmp_path: Path) -> None:
    """`mem[2:4] += 1` loads and stores; only another rank, or a pending call, can be in conflict with both."""
    path = tmp_path / "program.py"
    sums = "for step in range(3):\n    mem[2:4] += 1\n    win.Fence()\n    mem[0:2] += mem[2:4]\n    win.Fence()\n"
    path.write_text(HEAD + sums + TAIL)
    spawnsim.run(path, ranks=12, races=True)
    path.write_text(HEAD + f"win.Fence()\nif rank == 11:\n    win.Put(value, 3, [2, 1])\n{sums}" + TAIL)
    with pytest.raises(DataRace) as caught:
        spawnsim.run(path, ranks=12, races=True)
    found = caught.value.races
    assert len(found) == 2
    assert all("Put of rank 11" in each and "of rank 3 (program.py:" in each for each in found)


def test_a_store_before_a_call_to_the_same_rank_is_no_race(tmp_path: Path) -> None:
    """It is noticed in the call, and lies before it; a Get of another rank is in conflict with it."""
    store = "win.Fence()\nmem[2:4].fill(17.25)\nwin.Accumulate(value, rank, [2, 1], op=MPI.REPLACE)\n"
    path = tmp_path / "program.py"
    path.write_text(HEAD + store + "win.Fence()\n" + TAIL)
    spawnsim.run(path, ranks=12, races=True)
    text = report(tmp_path, f"{store}if rank == 1:\n    win.Get(result, 0, [3, 1])\nwin.Fence()\n", ranks=12)
    assert "a store after program.py:12 of rank 0 and Get of rank 1" in text


def test_a_store_in_a_function_that_is_not_instrumented_lies_between_two_calls(tmp_path: Path) -> None:
    """Numpy stores by itself: the bytes have changed."""
    text = report(
        tmp_path,
        "win.Fence()\nif rank == 0:\n    win.Get(result, 1)\nif rank == 1:\n    mem.fill(2)\nwin.Fence()\n",
    )
    assert (
        "Get of rank 0 (program.py:14) and a store after program.py:12 of rank 1 access bytes 7 to 7" in text
    )


SHARED = """
import time
import numpy as np
from mpi4py import MPI

def store(at, value):
    np.copyto(whole[at : at + 1], value)  # not seen when it happens

comm = MPI.COMM_WORLD
win = MPI.Win.Allocate_shared(64, 8, comm=comm)
whole = np.frombuffer(win.Shared_query(0)[0], "d")
other = MPI.Win.Allocate(64, 8, comm=comm)
win.Fence()
other.Lock_all()
"""


@pytest.mark.parametrize("compute", [None, "5us"])
@pytest.mark.parametrize(
    "between", ["comm.Iprobe()", "time.sleep(1e-5)", "other.Put(one, comm.rank, [number, 1])"]
)
def test_a_store_in_shared_memory_is_that_of_its_rank(
    between: str, compute: str | None, tmp_path: Path
) -> None:
    """Whatever lets another rank run before the next call of its own: each rank stores in bytes of its own."""
    path = tmp_path / "program.py"
    own = f"one = np.ones(1)\nfor number in range(4):\n    store(comm.rank, 1.0 + number)\n    {between}\n"
    path.write_text(f"{SHARED}{own}other.Unlock_all()\nwin.Fence()\nother.Free()\nwin.Free()\n")
    spawnsim.run(path, ranks=3, races=True, compute=compute)


def test_a_store_that_is_overwritten_before_the_next_call_is_seen(tmp_path: Path) -> None:
    """The Put arrives while the rank sleeps."""
    body = (
        "import time\nwin.Lock_all()\nif rank == 1:\n    mem.fill(2)\n    time.sleep(1e-3)\n"
        "if rank == 0:\n    time.sleep(1e-4)\n    win.Put(value, 1)\nwin.Unlock_all()\n"
    )
    assert "a store after program.py:13 of rank 1 and Put of rank 0" in report(tmp_path, body, ranks=12)


def test_the_last_stores_of_a_program_are_seen(tmp_path: Path) -> None:
    """No call follows them."""
    path = tmp_path / "program.py"
    path.write_text(SHARED + "if comm.rank > 9:\n    store(3, comm.rank)\n")
    with pytest.raises(
        DataRace, match=r"of rank 10 and a store .* of rank 11 access bytes 30 to 30 of shared"
    ):
        spawnsim.run(path, ranks=12, races=True)


def test_spawned_ranks_are_refused(tmp_path: Path) -> None:
    """The vector clocks have the size of the world at its start: an IndexError named a line of the engine."""
    path = tmp_path / "program.py"
    path.write_text(
        "import sys\nfrom mpi4py import MPI\nMPI.COMM_WORLD.Spawn(sys.executable, [__file__], 2)\n"
    )
    with pytest.raises(UnsupportedError, match=r"Spawn: not with .*\(--races\)"):
        spawnsim.run(path, ranks=2, races=True)


def test_the_search_changes_no_result(tmp_path: Path) -> None:
    """Times, digest and rows are the same."""
    [case] = [case for case in made.cases() if case.name == "counter-11-ranks"]
    path = tmp_path / "program.py"
    path.write_text(case.text)
    plain, searched = (spawnsim.run(path, ranks=11, races=races) for races in (False, True))
    assert plain.totals["digest"] == searched.totals["digest"]


def test_programs_with_main_show_their_stores(tmp_path: Path) -> None:
    """They are not instrumented, so their loads are not seen."""

    def main(comm: Any, store: bool) -> None:
        mine = np.zeros(4)
        window = comm.Win.Create(mine, 8)
        window.Fence()
        if comm.rank == 0:
            window.Put(np.ones(1), 1)
        if comm.rank == 1 and store:
            mine[0] = 3
        window.Fence()
        window.Free()

    with pytest.raises(DataRace, match=r"Put of rank 0 .* and a store after .* of rank 1"):
        spawnsim.run(main, ranks=2, races=True, parameters={"store": True})
    spawnsim.run(main, ranks=2, races=True, parameters={"store": False})


def test_an_instrumented_program_does_what_it_did(tmp_path: Path) -> None:
    """Docstring, future imports, annotations, slices, masks and deletions."""
    path = tmp_path / "program.py"
    path.write_text(
        '"""Text."""\nfrom __future__ import annotations\nimport numpy as np\nx: dict[str, int] = {"a": 1}\n'
        "del x['a']\na = np.arange(6).reshape(2, 3)\na[a > 3] = 0\na[:, [0, 2]] += 1\n"
        "out = a.tolist(), f'{a[1, ::2]!r:>20}', sum(a[0]), not a[0, 0], [v for v in a[1]], __doc__\n"
    )
    plain: dict[str, Any] = {}
    exec(compile(path.read_text(), "p", "exec"), plain)
    shown: dict[str, Any] = {}
    exec(compile(reporting(path.read_bytes()), "p", "exec"), shown)
    assert shown["out"] == plain["out"]


@pytest.mark.parametrize("load", ["tensor.sum()", "tensor[::2] + 1", "tensor.T.clone()", "f'{tensor}'"])
def test_loads_of_tensors_are_seen(load: str, tmp_path: Path) -> None:
    """A tensor shares its memory with a window, or is a view of it."""
    body = (
        "import torch\ntensor = torch.from_numpy(mem).view(4, 2)\nwin.Fence()\nif rank == 0:\n    win.Put(value, 1)\n"
        f"if rank == 1:\n    {load}\nwin.Fence()\ntensor.sum(), torch.zeros(0).sum(), tensor.to_sparse().sum()\n"
    )
    text = report(tmp_path, body, ranks=12)
    assert "Put of rank 0 (program.py:16) and a load of rank 1 (program.py:18) access bytes 0 to 7" in text


def test_tensors_without_memory_are_let_pass(tmp_path: Path) -> None:
    """The arguments of functions that torch transforms, nested tensors, and tensors on no device."""
    path = tmp_path / "program.py"
    body = (
        "import warnings\nimport torch\n\ndef square(x):\n    return (x * x).sum()\n\n"
        "x = torch.arange(6.0).view(2, 3)\n"
        "assert torch.func.vmap(square)(x).tolist() == [5, 50]\n"
        "assert torch.func.grad(square)(x[0]).tolist() == [0, 2, 4]\n"
        "with warnings.catch_warnings(action='ignore'):  # nested tensors are a prototype\n"
        "    torch.nested.nested_tensor([x[0], x[1, :2]]) * 2\n"
        "torch.empty(3, device='meta') + 1\n"
    )
    path.write_text(HEAD + body + TAIL)
    spawnsim.run(path, ranks=12, races=True)


def test_bytes_of_arrays() -> None:
    """Rows are one run, columns are one for each element, and neighbours are joined."""
    array = np.zeros((3, 4))
    first = array.ctypes.data
    assert runs_of_array(array[1]) == ((first + 32, first + 64),)
    assert runs_of_array(array[:, 1]) == tuple(
        (first + 32 * row + 8, first + 32 * row + 16) for row in range(3)
    )
    assert runs_of_array(array[:2, 1:]) == ((first + 8, first + 32), (first + 40, first + 64))
    assert merged([(0, 4), (4, 8), (9, 10)]) == ((0, 8), (9, 10))
    assert overlap(((0, 4), (8, 12)), ((4, 8), (11, 20))) == (11, 12)
    assert overlap(((0, 4), (8, 12)), ((4, 8), (12, 20))) is None
    watched = Watched(array.view(np.uint8).reshape(-1))
    array[1, 1:3] = -1.0
    assert all(first + 40 <= low < high <= first + 56 for low, high in watched.changes())
    assert watched.changes() == ()


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A race is an error of the run, and a failure of a case under fuzz, whose command searches again."""
    path = tmp_path / "program.py"
    path.write_text(f"{HEAD}win.Fence()\nif rank != 1:\n    win.Put(value, 1)\nwin.Fence()\n{TAIL}")
    assert cli.main(["run", str(path), "--ranks", "3"]) == 0
    assert cli.main(["run", str(path), "--ranks", "3", "--races"]) == 1
    assert "1 data race:\nPut of rank" in capsys.readouterr().err
    assert cli.main(["run", str(path), "--ranks", "3", "--races", "--backend", "mpi"]) == 2
    assert "--races is for virtual ranks" in capsys.readouterr().err
    one = ["fuzz", str(path), "--runs", "2", "--ranks", "3-5", "--faults", "none", "--jobs", "0"]
    assert cli.main([*one, "--races"]) == 1
    found = capsys.readouterr().out
    assert "DataRace at program.py:14: 2 of 2 cases" in found
    assert "--ranks 3 --faults none --ties fifo" in found
    assert "--alive none --races" in found
