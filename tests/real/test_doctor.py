"""`spawnsim doctor`: what this machine can run, and what to change."""

from __future__ import annotations

import json

import pytest

from spawnsim.real import doctor, launch
from spawnsim.real.doctor import examine, main


@pytest.mark.mpi
def test_the_report_covers_machine_mpi_and_torch(capsys):
    """Every topic of the report has a state and says what was found."""
    assert main(["--json"]) == 0
    report = {finding["topic"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {"cores", "launcher", "MPI", "MPI threads", "one-sided progress", "ULFM", "torch", "GPUs"} <= set(
        report
    )
    assert report["MPI threads"]["found"] == "multiple"
    assert all(finding["found"] for finding in report.values())


def test_what_is_missing_is_a_finding_with_advice(monkeypatch, capsys):
    """No MPI and no torch: the report says what to install, and the status is 1."""
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    assert main([]) == 1
    said = capsys.readouterr().out
    assert "pip install 'spawnsim[mpi]'" in said
    assert "pip install torch" in said


def test_half_a_launcher_is_reported_not_raised(monkeypatch):
    """The doctor must not fall ill itself."""
    monkeypatch.setattr(doctor, "_mpi", list)
    monkeypatch.setattr(doctor, "_torch", list)
    monkeypatch.setenv("PMI_RANK", "0")
    assert next(f for f in examine() if f.topic == "launcher").state == "lacking"
