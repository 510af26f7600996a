"""Programs that spawn others: new virtual ranks, their output, their errors, and executors of mpi4py.futures."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from support.virtual_run import run

from spawnsim import errors
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.scripts import run_program

PARENT = """
    import sys
    from mpi4py import MPI
    inter = MPI.COMM_WORLD.Spawn(sys.executable, [sys.argv[1]], maxprocs=3)
"""


def _program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(dedent(text))
    return path


def _start(parent: Path, *argv: str, ranks: int = 2, **how: object) -> object:
    return run_program(parent, argv, Scenario(ranks, **how), recorder=Recorder())  # type: ignore[arg-type]


def test_spawned_ranks_are_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its own modules, arguments, environment and COMM_WORLD, which can be pickled; runs repeat."""
    _program(tmp_path, "kid/beside.py", "seen = []")
    child = _program(
        tmp_path,
        "kid/child.py",
        """
        import os, pickle, sys
        import beside
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        beside.seen.append(comm.rank)
        assert pickle.loads(pickle.dumps(comm)) is MPI.COMM_WORLD
        assert pickle.loads(pickle.dumps(MPI.COMM_SELF)) is MPI.COMM_SELF
        assert (int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"])) == (comm.rank, comm.size)
        print(comm.rank, comm.size, beside.seen, len(sys.argv), MPI.Wtime() > 1)
        MPI.Comm.Get_parent().Disconnect()
        """,
    )
    text = "import time\nfrom mpi4py import MPI\ntime.sleep(1 + MPI.COMM_WORLD.rank)" + dedent(PARENT)
    parent = _program(tmp_path, "parent.py", text + "inter.Disconnect()\n")
    totals = _start(parent, str(child), ranks=12)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"[rank {12 + rank}] {rank} 3 [{rank}] 1 True" for rank in range(3)]
    assert _start(parent, str(child), ranks=12).digest == totals.digest  # type: ignore[attr-defined]


def test_an_error_of_a_spawned_rank_names_it(tmp_path: Path) -> None:
    """Spawned ranks are numbered behind the others."""
    child = _program(tmp_path, "child.py", "1 / 0")
    parent = _program(tmp_path, "parent.py", PARENT + "    inter.Barrier()")
    with pytest.raises(errors.RankError, match=r"rank 2 raised ZeroDivisionError.*child.py:1"):
        _start(parent, str(child))


def test_a_deadlock_of_both_programs_is_explained(tmp_path: Path) -> None:
    """The cycle goes over both groups."""
    child = _program(
        tmp_path, "child.py", "from mpi4py import MPI\nMPI.Comm.Get_parent().recv(source=0, tag=1)"
    )
    parent = _program(tmp_path, "parent.py", PARENT + "    inter.recv(source=0, tag=2)")
    with pytest.raises(errors.Deadlock, match="5 of 5 ranks wait"):
        _start(parent, str(child))


@pytest.mark.parametrize(
    "command", ["'ls', ['-l']", "sys.executable, ['missing.py']", "sys.executable, ['-c', 'x']"]
)
def test_what_is_no_file_of_python_is_an_error_on_all_ranks(command: str, tmp_path: Path) -> None:
    """A program may catch it."""
    parent = _program(
        tmp_path,
        "parent.py",
        f"""
        import sys
        from mpi4py import MPI
        try:
            MPI.COMM_WORLD.Spawn({command}, root=1)
        except MPI.Exception as error:
            assert error.Get_error_class() == MPI.ERR_SPAWN, error
        else:
            raise AssertionError
        """,
    )
    _start(parent, ranks=3)


def test_a_main_does_not_spawn() -> None:
    """Its ranks are functions."""
    with pytest.raises(errors.UsageError, match="only unmodified programs spawn"):
        run(lambda comm: comm.Spawn("python", [__file__]), 2)
    assert MPI.Comm.Get_parent() == MPI.COMM_NULL


def test_spawning_is_refused_where_ranks_are_counted(tmp_path: Path) -> None:
    """A fault plan names ranks of the start."""
    child = _program(tmp_path, "child.py", "")
    parent = _program(tmp_path, "parent.py", PARENT)
    with pytest.raises(errors.UnsupportedError, match="fault plan"):
        _start(parent, str(child), faults="slow:0@1s+1s,2")


def test_a_pool_spawns_its_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With and without a `with`; each worker knows the program's functions."""
    program = _program(
        tmp_path,
        "pool.py",
        """
        from mpi4py import MPI
        from mpi4py.futures import MPIPoolExecutor

        def where(number):
            return number, MPI.COMM_WORLD.size

        if __name__ == "__main__":
            with MPIPoolExecutor(max_workers=11) as executor:
                found = list(executor.map(where, range(30)))
            assert found == [(number, 11) for number in range(30)], found
            executor = MPIPoolExecutor(2, initializer=print, initargs=("ready",))
            assert executor.submit(pow, 2, 5).result() == 32
            print(executor.num_workers)
        """,
    )
    _start(program, ranks=1)
    assert capsys.readouterr().out.splitlines() == ["[rank 12] ready", "[rank 13] ready", "[rank 0] 2"]
