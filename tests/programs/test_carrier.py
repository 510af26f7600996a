"""What makes a virtual rank look like a process, and how programs end."""

from __future__ import annotations

import atexit
import dataclasses
import json
import math
import os
import random
import re
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import spawnsim
from spawnsim import cli
from spawnsim.errors import Deadlock, MismatchError, ParameterError, RankError, UnsupportedError
from spawnsim.record import Recorder
from spawnsim.run.program import ProgramFile
from spawnsim.scenario import Scenario
from spawnsim.virtual.cluster import Totals
from spawnsim.virtual.mpi.comm import ProgramAbort
from spawnsim.virtual.scripts import run_program

HEAD = "import sys\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\nrank, size = comm.rank, comm.size\n"


@pytest.fixture
def script(tmp_path: Path) -> Any:
    """Return what writes a program that knows comm, rank and size."""

    def write(text: str, name: str = "program.py") -> Path:
        path = tmp_path / name
        path.write_text(HEAD + dedent(text))
        return path

    return write


def _run(path: Path, *argv: str, ranks: int = 4, **options: Any) -> Totals:
    names = {each.name for each in dataclasses.fields(Scenario)} & set(options)
    scenario = Scenario(ranks, **{"deadline_s": math.inf} | {name: options.pop(name) for name in names})
    return run_program(path, argv, scenario, recorder=Recorder(), **options)


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


# -- streams -------------------------------------------------------------------------------------------------


PRINTING = {
    "pieces of a line between communications, and an unfinished last one": (
        "print('a', end=''); comm.Barrier(); print('b'); comm.Barrier(); sys.stdout.write('c')",
        ["[rank 0] ab", "[rank 0] c", "[rank 1] ab", "[rank 1] c"],
    ),
    "a rank that has redirected its output, and waits, leaves the others' alone": (
        """
        import contextlib, io
        held = io.StringIO()
        with contextlib.redirect_stdout(held) if rank == 0 else contextlib.nullcontext():
            comm.Barrier()
            print("here", rank)
            comm.Barrier()
        assert held.getvalue() == ("here 0\\n" if rank == 0 else "")
        """,
        ["[rank 1] here 1"],
    ),
    "arguments and names are as for `python program.py`": (
        "print(sys.argv[1:], __name__, __file__ == sys.argv[0])",
        [f"[rank {rank}] ['--n', '3'] __main__ True" for rank in range(2)],
    ),
    "functions at the exit of each rank: the last one first, and still able to communicate": (
        "import atexit\natexit.register(print, 'bye')\natexit.register(comm.Barrier)",
        ["[rank 0] bye", "[rank 1] bye"],
    ),
    "Finalize deletes attributes: those of COMM_SELF first, the last one set first; handles can be compared": (
        """
        own, alone, names = comm.Dup(), MPI.COMM_SELF, []
        keys = [MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: names.append((value, comm.size)))
                for _ in range(3)]
        comm.Set_attr(keys[0], "world")
        alone.Set_attr(keys[1], "first")
        alone.Set_attr(keys[2], "last")
        MPI.Finalize()
        print(names, comm == MPI.COMM_WORLD, comm == own, comm != alone, bool(comm), alone == MPI.COMM_NULL,
              comm in (MPI.COMM_NULL, MPI.COMM_WORLD), own == MPI.Intracomm(own))
        try:
            MPI.Finalize()
        except MPI.Exception:
            print("once")
        """,
        [f"[rank {rank}] {line}" for rank in range(2) for line in (
            "[('last', 1), ('first', 1), ('world', 2)] True False True True False True True", "once"
        )],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PRINTING)
def test_ranks_print_as_processes_do(case: str, script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Whole lines, which say whose they are."""
    text, expected = PRINTING[case]
    _run(script(text), "--n", "3", ranks=2)
    assert sorted(_lines(capsys)) == expected


CHECKING = {
    "seeded by one rank, torch's default generator gives that rank what torch alone would give": """
        import torch
        torch.manual_seed(rank)
        first = torch.rand(3)
        comm.Barrier()
        second = torch.randn(3)
        own = torch.Generator().manual_seed(rank)
        assert torch.equal(first, torch.rand(3, generator=own))
        assert torch.equal(second, torch.randn(3, generator=own))
    """,
    "after Finalize MPI is gone and Python goes on": """
        assert MPI.Is_initialized() and not MPI.Is_finalized()
        MPI.Finalize()
        assert MPI.Is_finalized()
        try:
            comm.Barrier()
        except MPI.Exception:
            pass
        else:
            raise AssertionError
    """,
    "MPI.pickle takes other functions": """
        import json
        MPI.pickle.__init__(lambda o: json.dumps(o).encode(), lambda b: json.loads(bytes(b)))
        assert comm.bcast((1, 2), root=0) == [1, 2]  # at the root, too
    """,
    "for that run alone": "assert comm.bcast((1, 2), root=0) == (1, 2)",
}


@pytest.mark.parametrize("case", CHECKING)
def test_ranks_are_processes_of_their_own(case: str, script: Any) -> None:
    """Each program asserts its own results."""
    _run(script(CHECKING[case]))


def test_standard_error_and_bytes_too(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`sys.stderr` and `sys.stdout.buffer` go the same way; the prefix can be left away."""
    _run(script("print('e', file=sys.stderr); sys.stdout.buffer.write(b'x\\n')"), ranks=1, prefix=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("x\n", "e\n")


# -- a process of its own ------------------------------------------------------------------------------------


def test_everything_is_as_before_afterwards(script: Any) -> None:
    """`sys`, `time`, `random`, numpy's generator, the modules and the environment."""
    random.seed(5)
    np.random.seed(5)

    def state() -> tuple[Any, ...]:
        places = (sys.argv, sys.stdout, list(sys.path), set(sys.modules), dict(os.environ))
        return (*places, time.time, random.random, np.random.rand)

    before = state()
    _run(script("import random, numpy as np\nrandom.seed(1); np.random.seed(1); np.random.rand(3)"))
    assert state() == before
    assert random.random() == random.Random(5).random()
    assert np.random.rand() == np.random.RandomState(5).rand()


def test_unseeded_generators_differ_by_rank_and_repeat_by_seed(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """As processes' do; but the same seed of the run gives the same numbers."""
    path = script(
        "import random, numpy as np\n"
        "print(random.random(), np.random.rand(), np.random.default_rng().random(), np.random.randn())"
    )
    _run(path, seed=3)
    first = _lines(capsys)
    _run(path, seed=3)
    assert _lines(capsys) == first
    assert len({line.partition("] ")[2] for line in first}) == 4


def test_packages_beside_the_script_are_each_ranks_own(script: Any, tmp_path: Path) -> None:
    """Relative imports and submodules too; a name that is loaded elsewhere does not stand in the way."""
    package = tmp_path / "solver"
    package.mkdir()
    (package / "__init__.py").write_text("from .state import RANK\n")
    (package / "state.py").write_text("from mpi4py import MPI\nRANK = MPI.COMM_WORLD.rank\n")
    text = """
        comm.Barrier()
        import solver, solver.state
        comm.Barrier()
        assert solver.RANK == solver.state.RANK == rank
        assert sys.modules["solver.state"].RANK == rank
    """
    _run(script(text))
    assert "solver" not in sys.modules


def test_comm_world_captured_in_a_shared_module_means_the_caller(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module imported once for all, with COMM_WORLD in a global, a class body and a default argument."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "installed.py").write_text(
        "from mpi4py import MPI\nCOMM = MPI.COMM_WORLD\nclass A:\n    comm = MPI.COMM_WORLD\n"
        "def who(comm=MPI.COMM_WORLD):\n    return COMM.rank, A.comm.Get_rank(), comm.rank\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    _run(
        script(
            "import installed\nassert installed.who() == (rank,) * 3\nassert isinstance(installed.COMM, MPI.Intracomm)"
        )
    )


def test_time_is_virtual(script: Any) -> None:
    """`time.sleep`, the clocks and `MPI.Wtime` agree; an hour takes no time. With "sleep" `time.time()` is real."""
    text = """
        import time
        t = time.time(), time.perf_counter(), MPI.Wtime()
        time.sleep(3600)
        for before, now in zip(t, (time.time(), time.perf_counter(), MPI.Wtime())):
            assert abs(now - before - 3600) < 1e-6
        start = time.monotonic()
        while time.monotonic() - start < 0.001:
            pass
    """
    began = time.perf_counter()
    assert _run(script(text)).virtual_seconds > 3600
    assert time.perf_counter() - began < 30
    _run(script("import time\nassert time.time() > 1e9\ntime.sleep(100)"), virtual_time="sleep")


# -- computing -----------------------------------------------------------------------------------------------


def test_computing_can_cost_a_constant_or_by_line(script: Any) -> None:
    """Each call pays for what was computed before it; or calls at one line alone do."""
    path = script("comm.Barrier()\ncomm.Barrier()")
    free = _run(path).virtual_seconds
    for compute, cost_s in (
        ("1 ms", 0.002), ({"program.py:6": 2.0}, 2.0), ("program.py:5=1s,program.py:9=5s", 1.0)
    ):  # fmt: skip
        assert _run(path, compute=compute).virtual_seconds == pytest.approx(free + cost_s)
    for text in ("measured*-1", "fast", "-1 s"):
        with pytest.raises(ParameterError):
            _run(path, compute=text)


def test_computing_can_be_measured(script: Any) -> None:
    """Real time between the calls counts, times a factor; time inside other ranks does not."""
    path = script(
        "sum(range(300_000))\ncomm.Barrier()\nt = MPI.Wtime()\nsum(range(300_000))\nassert MPI.Wtime() > t"
    )
    assert 0.001 < _run(path, compute="measured", ranks=2).virtual_seconds < 2
    assert _run(path, compute="measured*1000", ranks=2).virtual_seconds > 1


# -- endings -------------------------------------------------------------------------------------------------


def test_an_exception_or_an_abort_ends_the_run(script: Any) -> None:
    """With the rank, the line, and the exception itself; the error code is the run's."""
    with pytest.raises(RankError, match=r"rank 2 raised ZeroDivisionError.*program.py:5") as caught:
        _run(script("if rank == 2: 1 / 0\ncomm.Barrier()"))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ProgramAbort) as aborted:
        _run(script("if rank == 1: comm.Abort(7)\ncomm.recv(source=1)"))
    assert aborted.value.errorcode == 7


def test_an_excepthook_may_abort(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The common way to end a job under plain mpiexec works."""
    text = """
        def hook(kind, value, trace):
            print("hook", kind.__name__, file=sys.stderr)
            comm.Abort(9)
        sys.excepthook = hook
        if rank == 1: raise RuntimeError
        comm.Barrier()
    """
    with pytest.raises(ProgramAbort):
        _run(script(text))
    assert capsys.readouterr().err == "[rank 1] hook RuntimeError\n"


@pytest.mark.parametrize(("leaving", "status"), [("0", 0), ("", 0), ("3", 3), ("'no'", 1)])
def test_exit_statuses(script: Any, capsys: pytest.CaptureFixture[str], leaving: str, status: int) -> None:
    """`sys.exit` ends one rank; the run's status is the first that is not 0."""
    path = script(f"if rank == 1: sys.exit({leaving})\nprint('on')")
    if status:
        with pytest.raises(RankError, match=f"rank 1 ended with exit status {status}"):
            _run(path)
    else:
        _run(path)
    assert len(_lines(capsys)) == 3


@pytest.mark.parametrize(
    "call",
    [
        "MPI.Register_datarep('x', None, None, None)",
        "MPI.Session.Init()",
        "MPI.Open_port()",
        "comm.Accept('x')",
    ],
)
def test_calls_outside_the_scope(script: Any, call: str) -> None:
    """They refuse by name."""
    with pytest.raises(UnsupportedError, match=call.partition("(")[0].rpartition(".")[2]):
        _run(script(call))


def test_pool_executors_with_a_flag(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """With futures=True the other ranks work for rank 0; without, each rank spawns workers of its own."""
    path = script(
        """
        from mpi4py.futures import MPIPoolExecutor, wait
        def who(x):
            return x, MPI.COMM_WORLD.rank
        if __name__ == "__main__":
            with MPIPoolExecutor() as executor:
                found = list(executor.map(who, range(9)))
                assert [x for x, _ in found] == list(range(9))
                spawned = executor.num_workers == 1 and size > 1
                assert spawned or size == 1 or {worker for _, worker in found} == set(range(1, size))
                done, left = wait([executor.submit(who, 1)])
                assert len(done) == 1 and not left
            print("done")
        """
    )
    for ranks in (1, 4):
        _run(path, ranks=ranks, futures=True)
        assert _lines(capsys) == ["[rank 0] done"]
    _run(path)
    assert sorted(_lines(capsys)) == [f"[rank {rank}] done" for rank in range(4)]


# -- diagnosis -----------------------------------------------------------------------------------------------


def test_large_sends_that_face_each_other(script: Any) -> None:
    """The cycle is named, with call, peer, tag, communicator and line."""
    text = """
        big = bytearray(10**7)
        if rank < 2:
            comm.Send(big, dest=1 - rank, tag=11)
            comm.Recv(big, source=1 - rank, tag=11)
    """
    with pytest.raises(
        Deadlock, match=r"(?s)rank 0 → rank 1 → rank 0.*Send\(dest=1, tag=11\) on .*program.py:8"
    ):
        _run(script(text))
    _run(script(text.replace("10**7", "100")))


def test_a_message_with_another_tag_is_named(script: Any) -> None:
    """The report says which message lies there instead, and who has left."""
    with pytest.raises(Deadlock, match="whose program has ended") as caught:
        _run(
            script(
                "comm.send(1, 0, tag=4) if rank == 1 else comm.recv(source=1, tag=5) if rank == 0 else sys.exit(0)"
            )
        )
    notes = " ".join(caught.value.__notes__)
    assert "rank 1 to rank 0, tag 4" in notes
    assert "sys.exit was called by rank 2" in notes


@pytest.mark.parametrize(
    ("one", "other"),
    [("comm.bcast(1, root=0)", "comm.bcast(1, root=1)"), ("comm.Barrier()", "comm.allreduce(1)")],
)
def test_collectives_that_do_not_fit(script: Any, one: str, other: str) -> None:
    """They are refused at the moment that they meet."""
    with pytest.raises(MismatchError, match="collective number 0 on MPI_COMM_WORLD"):
        _run(script(f"{one} if rank % 2 else {other}"), ranks=2)


def test_what_is_left_open_is_told(script: Any) -> None:
    """Requests, messages, windows and communicators; nothing where all is closed."""
    warnings: list[str] = []
    text = """
        half = comm.Split(0)
        window = MPI.Win.Allocate(8, comm=comm)
        request = comm.irecv(source=0, tag=9)
        comm.isend(5, 0).wait()
    """
    _run(script(text), warn=warnings)
    told = "\n".join(warnings)
    assert "4 requests were never completed" in told
    assert "4 messages were never received" in told
    assert re.search(r"4 windows were never freed: rank 0 at \w+\.py:7, rank 1 at", told)
    assert re.search(r"1 communicator was never freed: created at \w+\.py:6\n", told + "\n")
    clean: list[str] = []
    _run(
        script(
            "c = comm.Dup(); c.isend(1, rank).wait(); c.recv(); c.Free(); w = MPI.Win.Allocate(8, comm=comm); w.Free()"
        ),
        warn=clean,
    )
    assert clean == []


def test_objects_that_are_never_freed_are_reported_with_their_lines(script: Any) -> None:
    """Not those that are predefined, freed by a copy, or made by MPI itself."""
    warnings: list[str] = []
    text = """
        group, kept = comm.group, comm.group
        group.Free()
        MPI.Datatype(MPI.INT.Dup()).Free()
        empty = kept.Incl([])
        window = MPI.Win.Allocate(8, comm=comm); window.group_size; window.Free()
        MPI.DOUBLE.Create_vector(2, 1, 2)
    """
    _run(script(text), warn=warnings)
    assert len(warnings) == 2
    assert re.fullmatch(r"4 datatypes were never freed: created at 4 × \w+\.py:11", warnings[0])
    assert re.fullmatch(r"4 groups were never freed: created at 4 × \w+\.py:6", warnings[1])


# -- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("x = 1\n", False),
        ("from mpi4py import MPI\n", True),
        ("def main():\n    pass\nmain()\n", True),
        ("def main(comm):\n    pass\n", False),
        (
            "from mpi4py import MPI\ndef main(comm):\n    pass\nif __name__ == '__main__':\n    main(MPI.COMM_WORLD)\n",
            True,
        ),
        ("from mpi4py import MPI\ndef main(comm):\n    pass\n", False),
        ("def main(argv):\n    pass\nif __name__ == '__main__':\n    main([])\n", True),
        ("from spawnsim.x import main\n", False),
        ("import torch.distributed\n@app.default\ndef main(lr=1.0):\n    pass\nif x:\n    app()\n", True),
        ("import torch.distributed, fire\ndef main(lr=1.0):\n    pass\nif x:\n    fire.Fire(main)\n", True),
        ("import torch.distributed\n@app.default\ndef main(comm):\n    pass\nif x:\n    app()\n", False),
        ("import torch\n@app.default\ndef main(lr=1.0):\n    pass\n", False),
    ],
)
def test_programs_are_told_from_files_with_a_main(tmp_path: Path, text: str, whole: bool) -> None:
    """A file with main(comm) is spawnsim's, unless it calls it itself."""
    (tmp_path / "file.py").write_text(text)
    assert ProgramFile.read(tmp_path / "file.py").is_whole == whole


def test_a_line_without_calls_that_shall_cost_is_told(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who counts lines wrongly reads that nothing was paid there; one that was met is not named."""
    path = script("comm.Barrier()")
    costs = "program.py:5=1s,program.py:99=1s"
    assert cli.main(["run", str(path), "--ranks", "2", "--compute", costs]) == 0
    assert "warning: no call was made at program.py:99:" in capsys.readouterr().err


def test_a_private_package_that_is_not_there_is_refused(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is wrong: it would do nothing."""
    path = script("comm.Barrier()")
    assert cli.main(["run", str(path), "--ranks", "2", "--set", "private=no_such_package"]) == 2
    assert "no installed package has this name" in capsys.readouterr().err
    for setting, said in (
        ("privat=tqdm", "program.py takes no parameter privat; did you mean private?"),
        ("virtual_time=no", "virtual_time='no': give all, sleep or none"),
    ):
        assert cli.main(["run", str(path), "--ranks", "2", "--set", setting]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["run", str(path), "--ranks", "2", "--set", "private=tqdm"]) == 0


@pytest.mark.parametrize(
    ("package", "ask", "told"),
    [
        (
            "keeps_rank",
            "Get_rank()",
            "rank 0 at 0 s imported keeps_rank, which calls, during its import, Get_rank",
        ),
        (
            "keeps_copy",
            "Dup()",
            "keeps_copy calls, during its import, Dup of COMM_WORLD (keeps_copy.py:2)",
        ),
        ("keeps_world", "Get_size", ""),
        ("keeps_own", "Get_size() + MPI.COMM_SELF.Dup().rank", ""),
    ],
)
def test_a_package_that_asks_for_its_rank_while_it_is_imported_is_told(
    package: str, ask: str, told: str, script: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is imported once for all ranks, which would have the first one's."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / f"{package}.py").write_text(f"from mpi4py import MPI\nKEPT = MPI.COMM_WORLD.{ask}\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    path = script(f"import {package}")
    assert (cli.main(["run", str(path), "--ranks", "11"]) == 0) == (ask != "Dup()")
    errors = capsys.readouterr().err
    assert told in errors
    assert (f"--set private={package}" in errors) == bool(told)
    monkeypatch.delitem(sys.modules, package, raising=False)
    assert cli.main(["run", str(path), "--ranks", "11", "--set", f"private={package}"]) == 0
    assert "during its import" not in capsys.readouterr().err


IMPORTING = """
import threading
over = threading.Event()
if {threads}:  # others could see what the rank does between two calls, so it does not run ahead
    threading.Thread(target=over.wait).start()
if rank == 0:
    comm.send("x", 1)
from {package} import DONE
if rank == 1:
    comm.recv()
over.set()
print(rank, DONE)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
@pytest.mark.parametrize("call", ["time", "sleep"])
def test_a_package_may_look_at_the_clock_or_sleep_while_it_is_imported(
    carrier: str, call: str, script: Any, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The other ranks, which share it, do not run meanwhile: they would find it half made, or wait for its lock."""
    package = f"takes_{call}_in_{carrier}"
    (tmp_path / "lib").mkdir()
    looks = "time.sleep(1.0)" if call == "sleep" else "time.time()"
    (tmp_path / "lib" / f"{package}.py").write_text(f"import time\nBEGAN = {looks}\nDONE = True\n")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    path = script(IMPORTING.format(package=package, threads=carrier == "threads"))
    assert cli.main(["run", str(path), "--ranks", "2", "--carrier", carrier, "--quiet"]) == 0
    assert sorted(_lines(capsys)) == ["[rank 0] 0 True", "[rank 1] 1 True"]


def test_the_command(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`spawnsim run program.py --ranks 3 …`: what is no option goes to the program."""
    path = script("print(sys.argv[1:])\ncomm.isend(1, 0)")
    code = cli.main(
        ["run", str(path), "--ranks", "3", "--out", str(tmp_path / "out"), "x", "--", "--seed", "9"]
    )
    captured = capsys.readouterr()
    assert code == 0
    assert "[rank 2] ['x', '--seed', '9']" in captured.out
    assert "warning: 3 messages were never received" in captured.err
    manifest = json.loads((tmp_path / "out" / "run.json").read_text())
    assert manifest["what"]["warnings"]
    assert manifest["what"]["reproducible"] is True
    assert manifest["totals"]["ranks"] == 3


@pytest.mark.parametrize(
    ("text", "code"),
    [("comm.Abort(5)", 5), ("sys.exit(4)", 4), ("1 / 0", 1), ("comm.recv()", 121), ("comm.send(1, 99)", 1)],
)
def test_exit_codes(script: Any, text: str, code: int) -> None:
    """As under mpiexec; a deadlock has its own."""
    assert cli.main(["run", str(script(text)), "--ranks", "2", "--quiet"]) == code


def test_from_python(script: Any) -> None:
    """`spawnsim.run` takes a program's path and arguments; equal seeds give equal digests."""
    path = script("import random\ncomm.gather(bytes(random.randrange(1000)))")
    runs = [spawnsim.run(path, ranks=5, seed=4, argv=["a"]) for _ in range(2)]
    assert runs[0].totals["digest"] == runs[1].totals["digest"]
    assert spawnsim.run(path, ranks=5, seed=4, compute="measured").what["reproducible"] is False


def test_a_reborn_rank_of_an_unmodified_program_joins_the_others(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs from the top, is told that its communicator is outdated, and goes on at the others' step."""
    path = script("""
        step, times = 0, 0
        while step < 30:
            try:
                time.sleep(0.01)
                total = comm.allreduce(1)
                step += 1
            except Exception as error:
                times += 1
                if times == 1:
                    print(type(error).__name__, comm.Get_failed().size)
                found = comm.recover(step)
                comm, step = found.comm, found.step
        print("over:", comm.rank, comm.size, total, step)
        """)
    path.write_text("import time\n" + path.read_text())
    faults = "crash:3@0.055s; restart:3@0.09s; crash:7@0.06s"
    run = spawnsim.run(path, ranks=12, faults=faults)
    kinds = [event["kind"] for event in run.events if event["kind"] != "recovered"]
    assert kinds == ["crash", "crash", "restart"]
    lines = _lines(capsys)
    members = [rank for rank in range(12) if rank != 7]
    over = {f"[rank {rank}] over: {place} 11 11 30" for place, rank in enumerate(members)}
    assert {line for line in lines if "over" in line} == over
    met = {line for line in lines if "over" not in line}
    assert "[rank 3] Revoked 2" in met
    assert met - {"[rank 3] Revoked 2"} == {f"[rank {rank}] RankFailed 1" for rank in members if rank != 3}


def test_a_file_that_speaks_mpi_through_a_package_runs_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package whose distribution requires mpi4py will do; any other file is run whole on demand."""
    path = tmp_path / "file.py"
    path.write_text("import heat_like\n")
    monkeypatch.setattr(sys.modules[ProgramFile.__module__], "_packages_with_mpi", lambda: {"heat_like"})
    assert ProgramFile.read(path).is_whole
    path.write_text("exec('from mpi4py import MPI; print(MPI.COMM_WORLD.rank)')\n")
    assert not ProgramFile.read(path).is_whole
    assert cli.main(["run", str(path), "-n", "3"]) == 2
    assert "or with --whole" in capsys.readouterr().err
    assert cli.main(["run", str(path), "-n", "3", "--whole"]) == 0
    assert "[rank 2] 2" in capsys.readouterr().out


def test_what_a_package_registers_for_a_rank_runs_in_that_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Any
) -> None:
    """Pools close themselves so: it ran at the interpreter's end, outside of any rank, with a traceback."""
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / "pool_like.py").write_text(
        "import atexit\nENDED = []\n"
        "class Pool:\n"
        "    def __init__(self, comm): atexit.register(self.close, comm)\n"
        "    def close(self, comm): ENDED.append((comm.rank, comm.allreduce(1)))\n"
        "atexit.register(ENDED.append, 'at the interpreter')\n"
    )
    monkeypatch.syspath_prepend(str(installed))
    late: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda _function, *args: late.append(args))
    run_program(script("import pool_like\npool_like.Pool(comm)"), [], Scenario(11), recorder=Recorder())
    assert sorted(sys.modules["pool_like"].ENDED) == [(rank, 11) for rank in range(11)]
    assert late == [("at the interpreter",)]
