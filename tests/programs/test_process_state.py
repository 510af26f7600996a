"""Every virtual rank has the process state that a process has, and what the ranks share is reported."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import spawnsim
from spawnsim.errors import RankError, UsageError
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.scripts import run_program

HEAD = "import os, sys\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\nrank, size = comm.rank, comm.size\n"


@pytest.fixture
def lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what runs a program and gives the lines that each rank prints, in the order of ranks."""

    def run(text: str, ranks: int = 3, **options: Any) -> list[str]:
        path = tmp_path / "program.py"
        path.write_text(HEAD + textwrap.dedent(text))
        totals = run_program(path, [], Scenario(ranks), recorder=Recorder(), **options)
        run.mistakes = totals.mistakes  # type: ignore[attr-defined]
        return [line.removeprefix("[rank ") for line in sorted(capsys.readouterr().out.splitlines())]

    return run


def test_children_inherit_the_environment_of_their_rank(lines: Any) -> None:
    """Also by os.system, os.popen and fork, what mpiexec sets, what was deleted, and what os.putenv sets."""
    before = dict(os.environ)
    assert lines("""
        import subprocess
        os.environ["PART"], os.environ["GONE"] = str(rank), "x"
        os.putenv("HIDDEN", f"h{rank}")
        comm.Barrier()
        if rank == 1:
            del os.environ["GONE"]
        comm.Barrier()
        command = "echo $PART $HIDDEN $GONE $PMI_RANK"
        shell = subprocess.run(command, shell=True, capture_output=True, text=True).stdout.strip()
        piped = os.popen(command).read().strip()
        os.system(f"{command} > {rank}.system")
        child = os.fork()
        if not child:
            os.execv("/bin/sh", ["sh", "-c", f"{command} > {rank}.forked"])
        os.waitpid(child, 0)
        read = {open(f"{rank}.{name}").read().strip() for name in ("system", "forked")}
        print({shell, piped, *read})
        """) == [f"{rank}] {{'{rank} h{rank}{' x' * (rank != 1)} {rank}'}}" for rank in range(3)]
    assert dict(os.environ) == before
    seen = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert "PART=" not in seen
    assert "PMI_RANK=" not in seen


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_each_rank_has_its_working_directory_and_umask(lines: Any, tmp_path: Path) -> None:
    """Files of relative names and children are there, too."""
    mask = os.umask(0o022)
    os.umask(mask)
    assert lines("""
        import subprocess
        os.mkdir(str(rank)); os.chdir(str(rank)); os.umask(0o10 * rank)
        comm.Barrier()
        open("result", "w").write(str(rank))
        comm.Barrier()
        mask = os.umask(0)
        there = subprocess.run("pwd", capture_output=True, text=True).stdout.strip()
        print(open("result").read(), os.path.basename(there), os.path.basename(os.getcwd()), oct(mask))
        """) == [f"{rank}] {rank} {rank} {rank} {oct(8 * rank)}" for rank in range(3)]
    assert Path.cwd() == tmp_path
    assert os.umask(mask) == mask


def test_a_run_is_kept_where_it_began(tmp_path: Path) -> None:
    """A rank that changes its working directory changes no relative path of the run, nor `__file__`."""
    path = Path("program.py")
    path.write_text(
        HEAD + "os.mkdir(str(rank)); os.chdir(str(rank))\ncomm.Barrier()\nassert os.path.exists(__file__)\n"
    )
    assert spawnsim.run(path, ranks=2, out="runs/a").totals["ranks"] == 2
    assert (tmp_path / "runs" / "a" / "run.json").exists()
    assert [*(tmp_path / "1").iterdir()] == []


def test_a_working_directory_that_is_gone_is_reported(lines: Any) -> None:
    """The rank goes on elsewhere, as it cannot be put back."""
    lines("""
        os.mkdir(str(rank)); os.chdir(str(rank))
        comm.Barrier()
        if rank == 0:
            os.rmdir("../1")
        comm.Barrier()
        comm.Barrier()
        """)
    assert any("the working directory cannot be restored" in each for each in lines.mistakes)


def test_each_rank_has_its_handlers_and_levels_of_logging(lines: Any, tmp_path: Path) -> None:
    """Configured by hand or by a dictionary, which closes all handlers that its process has."""
    handlers, level = [*logging.root.handlers], logging.root.level
    text = """
        import logging, logging.config
        if {by_hand}:
            logging.basicConfig(filename=f"{{rank}}.log", level=logging.INFO + rank, format=f"{{rank}} %(message)s")
        else:
            logging.config.dictConfig({{
                "version": 1, "root": {{"handlers": ["file"], "level": logging.INFO + rank}},
                "formatters": {{"own": {{"format": f"{{rank}} %(message)s"}}}},
                "handlers": {{"file": {{"class": "logging.FileHandler", "filename": f"{{rank}}.log", "mode": "w",
                    "formatter": "own"}}}},
            }})
        comm.Barrier()
        logging.log(logging.INFO + 1, "hello")
        comm.Barrier()
        print(open(f"{{rank}}.log").read().split(), len(logging.root.handlers), logging.root.level)
        """
    for by_hand in (True, False):
        logging.root.handlers[:] = []
        try:
            found = lines(text.format(by_hand=by_hand))
        finally:
            logging.root.handlers[:] = handlers
        assert found == [
            "0] ['0', 'hello'] 1 20", "1] ['1', 'hello'] 1 21", "2] [] 1 22",
        ]  # fmt: skip
    assert logging.root.level == level


def test_handlers_are_flushed_at_the_end(lines: Any, tmp_path: Path) -> None:
    """As `logging.shutdown` does in every process."""
    lines("""
        import logging, logging.handlers
        logger = logging.getLogger(f"a logger of {rank}")
        logger.addHandler(logging.handlers.MemoryHandler(100, target=logging.FileHandler("log")))
        logger.warning("kept")
        comm.Barrier()
        """)
    assert (tmp_path / "log").read_text() == "kept\n" * 3


def test_each_rank_has_small_state_of_the_interpreter(lines: Any) -> None:
    """Filters of warnings, also within catch_warnings; timeouts, locale, temporary files, and a silenced print."""
    filters, content = warnings.filters, [*warnings.filters]
    assert lines("""
        import builtins, locale, multiprocessing, socket, tempfile, warnings
        out = print
        if rank != 1:
            builtins.print = lambda *args: None
        warnings.simplefilter("always" if rank else "ignore")
        socket.setdefaulttimeout(rank + 1.0)
        locale.setlocale(locale.LC_ALL, "C.UTF-8" if rank == 1 else "C")
        sys.set_int_max_str_digits(1000 + rank)
        multiprocessing.set_start_method("spawn" if rank else "fork")
        tempfile.tempdir, os.environ["TMPDIR"] = None, os.path.abspath(f"tmp{rank}")
        os.mkdir(os.environ["TMPDIR"])
        comm.Barrier()
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("one")
            comm.Barrier()
            warnings.warn("two")
            comm.Barrier()
        print("only rank 1")
        out(len(caught), warnings.filters[0][0], socket.getdefaulttimeout(), locale.setlocale(locale.LC_ALL),
            sys.get_int_max_str_digits(), os.path.basename(tempfile.gettempdir()), multiprocessing.get_start_method())
        """) == [
        "0] 0 ignore 1.0 C 1000 tmp0 fork",
        "1] 2 always 2.0 C.UTF-8 1001 tmp1 spawn",
        "1] only rank 1",
        "2] 2 always 3.0 C 1002 tmp2 spawn",
    ]
    assert warnings.filters is filters
    assert [*filters] == content
    assert socket.getdefaulttimeout() is None
    assert sys.get_int_max_str_digits() == 4300


def test_each_rank_has_options_of_mpi4py(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The environment is read when the rank first asks for MPI."""
    path = tmp_path / "rc.py"
    path.write_text(
        "import os, mpi4py\n"
        "rank = os.environ['PMI_RANK']\n"
        "os.environ['MPI4PY_RC_INITIALIZE'] = 'no' if rank == '1' else 'yes'\n"
        "os.environ['MPI4PY_RC_IRECV_BUFSZ'] = f'{rank}64'\n"
        "os.environ['MPI4PY_PICKLE_PROTOCOL'] = '3'\n"
        "from mpi4py import MPI\n"
        "print(MPI.Is_initialized(), mpi4py.rc.irecv_bufsz, MPI.pickle.PROTOCOL)\n"
    )
    run_program(path, [], Scenario(3), recorder=Recorder())
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "[rank 0] True 64 3", "[rank 1] False 164 3", "[rank 2] True 264 3",
    ]  # fmt: skip


def test_atexit_functions_are_called_after_an_exception(
    lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that communicates ends, for the error would be lost in a deadlock."""
    with pytest.raises(RankError, match="rank 0 raised ValueError: x"):
        lines("""
            import atexit
            atexit.register(print, "closed")
            atexit.register(comm.Barrier)
            if rank == 0:
                raise ValueError("x")
            comm.recv()
            """)
    assert capsys.readouterr().out == "[rank 0] closed\n"


def test_what_ranks_share_is_reported_with_its_line(lines: Any) -> None:
    """Once for each function; packages are left alone."""
    lines("""
        import signal, tempfile
        with tempfile.TemporaryDirectory():
            os.getpid()
        old = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, old)
        fd = os.dup(1)
        os.dup2(1, fd)
        os.close(fd)
        """)
    assert [each.partition(":")[0] + each.partition(":")[2][:25] for each in lines.mistakes] == [
        "rank 0 at 0 s (program.py8) called os.getpid: the ",
        "rank 0 at 0 s (program.py9) called signal.signal: ",
    ]


def test_ranks_in_threads_may_set_handlers_of_signals(lines: Any) -> None:
    """Python refuses it outside the main thread; one of torchrun's processes may."""
    lines("import signal\nassert signal.signal(signal.SIGUSR1, print) == signal.SIG_DFL\n", carrier="threads")
    assert "signal.signal" in lines.mistakes[0]


def test_torchs_switches_are_each_ranks(lines: Any) -> None:
    """Anomaly mode, precision of products, number of threads; what is set once a process may be set by each rank."""
    import torch

    assert lines("""
        import torch
        if rank == 0:
            torch.autograd.set_detect_anomaly(True)
            torch.set_float32_matmul_precision("high")
        torch.set_num_threads(rank + 1)
        torch.set_num_interop_threads(2)
        comm.Barrier()
        print(torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads())
        """) == ["0] True high 1", "1] False highest 2", "2] False highest 3"]
    assert not torch.is_anomaly_enabled()


def test_a_program_that_changes_nothing_is_not_asked(lines: Any) -> None:
    """Nothing is swapped then."""
    assert lines("""
        asked = len(comm._world.kernel.on_resume)
        comm.Barrier()
        os.chdir(".")
        print(len(comm._world.kernel.on_resume) - asked)
        """, ranks=1) == ["0] 1"]  # fmt: skip


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN], ids=["heard", "ignored"])
@pytest.mark.parametrize("call", ["comm.recv(source=MPI.ANY_SOURCE)", "own.send(1, 0)", "MPI.Wtime()"])
def test_a_thread_of_a_greenlet_that_calls_mpi_ends_the_run(
    lines: Any, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], call: str, ctrl_c: Any
) -> None:
    """Also while its rank waits for it in real time; the error names the carrier under which it may call.

    Also where Ctrl-C is ignored, as in the background of a shell and in the workers of a search.
    """
    request.addfinalizer(partial(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, ctrl_c)))
    with pytest.raises(
        UsageError, match=r"a thread of rank \d called MPI \(program.py:\d+\).*--carrier threads"
    ):
        lines(f"""
            import contextlib, queue, threading
            own, results = comm.Dup(), queue.Queue()
            def serve():
                with contextlib.suppress(SystemExit):  # which ends the thread: pytest would report it
                    results.put({call})
            threading.Thread(target=serve).start()
            try:
                results.get(timeout=60)
            except queue.Empty:
                print("in vain")
            """)
    assert capsys.readouterr().out == ""


def test_threads_of_a_greenlet_that_compute_are_left_alone(lines: Any) -> None:
    """They see no MPI."""
    assert lines("""
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(2) as pool:
            comm.Barrier()
            print(sum(pool.map(abs, range(10))))
            comm.Barrier()
        """) == [f"{rank}] 45" for rank in range(3)]


@pytest.mark.parametrize(("carrier", "level"), [("greenlets", "FUNNELED"), ("threads", "MULTIPLE")])
def test_the_level_of_threads_is_that_of_the_carrier(lines: Any, carrier: str, level: str) -> None:
    """Programs with threads leave at once where it is too low; a thread is not the main one."""
    assert lines(
        f"""
        import threading
        levels = MPI.Query_thread(), MPI.Init_thread()
        main = []
        thread = threading.Thread(target=lambda: main.append(MPI.Is_thread_main()))
        thread.start()
        thread.join()
        print({{*levels}} == {{MPI.THREAD_{level}}}, MPI.Is_thread_main(), *main)
        """,
        carrier=carrier,
    ) == [f"{rank}] True True False" for rank in range(3)]
