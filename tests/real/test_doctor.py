"""`spawnsim doctor`: what this machine can run, and what to change."""

from __future__ import annotations

import json
import time

import pytest

from spawnsim.cli import serve
from spawnsim.real.launch import doctor, launchers
from spawnsim.real.launch.doctor import examine


@pytest.mark.mpi
def test_the_report_covers_machine_mpi_and_torch(capsys):
    """Every topic of the report has a state and says what was found."""
    assert serve("doctor", ["--json"]) == 0
    report = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"cores", "launcher", "MPI", "MPI threads", "one-sided progress", "ULFM", "torch", "GPUs"} <= set(
        report
    )
    assert report["MPI threads"]["found"] == "multiple"
    assert "CUDA-aware" in report["MPI and GPU memory"]["found"]
    assert all(finding["found"] for finding in report.values())


def test_what_is_missing_is_a_finding_with_advice(monkeypatch, capsys):
    """No MPI and no torch: the report says what to install, and the status is 1."""
    monkeypatch.setattr(launchers.importlib.util, "find_spec", lambda name: None)
    assert serve("doctor", []) == 1
    said = capsys.readouterr().out
    assert "pip install 'spawnsim[mpi]'" in said
    assert "pip install torch" in said


@pytest.mark.parametrize(("vendor", "word"), [("MPICH", "MPIR_CVAR_ENABLE_GPU"), ("Open MPI", "--with-cuda")])
def test_an_mpi_without_gpu_memory_is_no_fault_but_advice(vendor, word):
    """What is staged works; the report says what would save the copies, by library."""
    near = doctor._gpu_memory({"vendor": vendor, "cuda_aware": False})
    aware = doctor._gpu_memory({"vendor": vendor, "cuda_aware": True})
    assert (near.state, aware.state, aware.advice) == ("note", "good", "")
    assert word in near.advice


@pytest.mark.parametrize(
    ("cards", "said"), [(["A"], "all ranks share it"), (["A", "B"], "rank r uses GPU r mod 2")]
)
def test_the_report_says_which_gpu_a_rank_takes(cards, said):
    """One card is shared, several are taken in turn."""
    finding = doctor._gpus(cards)
    assert said in finding.found
    assert f"more than {len(cards)} per node" in finding.advice


def test_half_a_launcher_is_reported_not_raised(monkeypatch):
    """The doctor must not fall ill itself."""
    monkeypatch.setattr(doctor, "_mpi", list)
    monkeypatch.setattr(doctor, "_torch", list)
    monkeypatch.setenv("PMI_RANK", "0")
    assert next(f for f in examine() if f.topic == "launcher").state == "lacking"


def test_only_the_first_rank_reports(monkeypatch, capsys):
    """`srun -n 64 spawnsim doctor` is one report, by one probe."""
    for name, value in {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert serve("doctor", []) == 0
    assert capsys.readouterr().out == ""


def test_a_probe_that_hangs_is_ended_with_all_that_it_started(monkeypatch):
    """What an mpiexec leaves behind holds its output open; waiting for that output would be for ever."""
    monkeypatch.setattr(doctor, "PROBE_LIMIT_S", 0.5)
    begin = time.perf_counter()
    assert doctor._probe(["sh", "-c", "sleep 30 & sleep 30"])[0] is None
    assert time.perf_counter() - begin < 10.0
    assert doctor._probe(["sh", "-c", "echo ------ >&2; echo 'no slots' >&2; exit 3"]) == (3, "", "no slots")


def test_ranks_that_mpi_will_not_join_are_lacking(monkeypatch):
    """Under `srun --mpi=none` each rank would be alone: the report says so before a run does."""
    for name, value in {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    found = doctor._launcher()[0]
    assert (found.state, "--mpi=pmi2" in found.advice) == ("lacking", True)
