"""The contract of communicators: held by the real MPI, which keeps it true, and by both buildings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spawnsim.errors import ParameterError
from spawnsim.testing import every_case, find_cases, run_contract, run_real, run_virtual
from spawnsim.testing.cases import ABSENT, FAILED, PASSED, SKIPPED, Case, Outcome, cases_by_id

assert torch  # loaded, so that its integers serve as ranks and tags here, too
THEMES = sorted({case.theme for case in every_case()})
OPTIONAL = {"requests.partitioned_messages"}
"""Calls that a building may refuse by name."""
NOT_YET: dict[str, set[str]] = {
    "virtual": set(),
    "real": {"locks.accumulating_through_a_derived_type"},
    "torch": {
        f"environment.{name}"
        for name in (
            "integers_in_messages",
            "integers_as_roots",
            "integers_as_colors_and_keys",
            "integers_in_lists",
            "integers_in_one_sided_calls",
            "what_is_no_integer",
        )
    },
}
"""Cases that a building does not keep yet. Strike a case out when it passes: the lists may only shrink."""


def broken(outcomes: list[Outcome], backend: str = "mpi") -> list[str]:
    """Return what did not pass although it should, with what its ranks said."""
    tolerated = {PASSED, SKIPPED, ABSENT} if backend in ("real", "torch") else {PASSED, SKIPPED}
    due = [one for one in outcomes if one.case not in NOT_YET.get(backend, ())]
    return [
        f"{one.status} {one.case}: {one.text}"
        for one in due
        if one.status not in tolerated and not (one.status == ABSENT and one.case in OPTIONAL)
    ]


@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("theme", THEMES)
def test_virtual_ranks_keep_the_contract(theme: str, ranks: int) -> None:
    """Every case of a theme passes on virtual ranks."""
    cases = [case for case in find_cases(ranks) if case.theme == theme]
    assert broken(list(run_virtual(cases, ranks)), "virtual") == []


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_real_mpi_keeps_the_contract(ranks: int) -> None:
    """Every case passes on bare mpi4py: the suite claims nothing that MPI does not do."""
    outcomes = list(run_contract("mpi", ranks))
    assert broken(outcomes) == []
    assert len(outcomes) == len(find_cases(ranks))


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["real", "torch"])
def test_wrapped_ranks_keep_the_contract(backend: str) -> None:
    """What spawnsim's communicators over MPI and torch offer at all, they do as MPI does."""
    assert broken(list(run_contract(backend, 4)), backend) == []


def test_what_virtual_ranks_do_not_keep_yet_is_up_to_date() -> None:
    """No case that passes on virtual ranks is listed as one that does not."""
    outcomes = run_virtual(cases_by_id(sorted(NOT_YET["virtual"])), 4)
    assert [one.case for one in outcomes if one.status == PASSED] == []


def test_the_suite_is_large() -> None:
    """There are more than 300 cases, each with a name of its own and a sentence."""
    cases = every_case()
    assert len({case.id for case in cases}) == len(cases) > 300
    assert [case.id for case in cases if not case.claim.endswith(".")] == []


def test_cases_are_found_by_words() -> None:
    """Words choose cases by theme or name; a word that chooses none is an error."""
    assert {case.theme for case in find_cases(4, "objects. locks.exc")} == {"objects", "locks"}
    with pytest.raises(ParameterError, match=r"themes: .*locks"):
        find_cases(4, "no-such-case")


def test_cases_need_their_ranks() -> None:
    """Cases that make sense between ranks are left out on one."""
    assert len(find_cases(1)) < len(find_cases(3))


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [("raises", FAILED, "on purpose"), ("waits", FAILED, "Deadlock"), ("fine", PASSED, "")],
)
def test_failures_of_virtual_ranks_are_outcomes(name: str, status: str, said: str) -> None:
    """A case that raises or waits for ever fails, and the run goes on."""
    case = Case("made_up", name, globals()[name])
    (outcome,) = run_virtual([case], 2)
    assert outcome.status == status
    assert said in outcome.text


def raises(MPI: object, comm: object) -> None:
    """Raise on one rank, while the other waits."""
    if comm.Get_rank() == 0:  # type: ignore[attr-defined]
        raise ValueError("on purpose")
    comm.recv(source=0)  # type: ignore[attr-defined]


def waits(MPI: object, comm: object) -> None:
    """Wait for what nobody sends."""
    comm.recv(source=0)  # type: ignore[attr-defined]


def fine(MPI: object, comm: object) -> None:
    """Do nothing."""


STUBBORN = """
import os
def fine(MPI, comm): pass
def waits(MPI, comm):
    if comm.Get_rank() == 0:
        raise ValueError("on purpose")
    comm.recv(source=0)
def dies(MPI, comm):
    os._exit(3)
"""


@pytest.mark.mpi
def test_a_real_job_goes_on_behind_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that stops or kills the job fails; the next one runs in a new job."""
    (tmp_path / "stubborn.py").write_text(STUBBORN, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("spawnsim.testing.runners.GRACE_S", 0.5)
    cases = cases_by_id(["stubborn.fine", "stubborn.waits", "stubborn.dies", "stubborn.fine"])
    outcomes = list(run_real(cases, 2))
    assert [one.status for one in outcomes] == [PASSED, FAILED, FAILED, PASSED]
    assert "still inside: rank 1" in outcomes[1].text
    assert "on purpose" in outcomes[1].text
    assert "ended the job" in outcomes[2].text
