"""The contract of communicators: kept by the MPI library itself, by virtual ranks, and by both real backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from contract.cases import (
    ABSENT,
    FAILED,
    PASSED,
    SKIPPED,
    Case,
    Outcome,
    cases_by_id,
    every_case,
    find_cases,
)  # fmt: skip
from contract.runners import run_contract, run_real, run_virtual
from spawnsim.errors import ParameterError

assert torch  # loaded, so that its integers serve as ranks and tags here too
THEMES = sorted({case.theme for case in every_case()})
OPTIONAL = {"requests.partitioned_messages"}  # MPI libraries may lack it


def _listed(themes: dict[str, str]) -> set[str]:
    return {f"{theme}.{name}" for theme, names in themes.items() for name in names.split()}


NOT_YET = {
    "torch": _listed(
        {
            "environment": "integers_in_messages integers_as_roots integers_in_one_sided_calls what_is_no_integer",
        }
    ),
}
"""Cases that fail on a backend today. Remove a case when it passes: the lists may only shrink."""
ABSENT_ON = {
    "real": OPTIONAL | {"locks.accumulating_through_a_derived_type"},
    "torch": _listed(
        {
            "collective_forms": "alltoallw_of_addresses alltoallw_of_addresses_nonblocking",
            "collectives": "operations_refuse_types",
            "communicators": "comm_self duplicates_in_other_ways attributes attributes_of_duplicates "
            "predefined_attributes error_handlers infos_of_communicators kinds disconnect "
            "sizes_and_groups_of_intercomms messages_across barrier_across merge_of_intercomms "
            "duplicates_and_splits_of_intercomms",
            "datatypes": "absolute_addresses",
            "environment": "time_moves_forward the_library_is_up versions_and_names allocated_memory buffer_objects "
            "own_pickle errors_return_by_default keyvals_are_checked integers_in_persistent_messages integers_in_grids",
            "locks": "calls_with_requests accumulating_through_a_derived_type",
            "matching": "a_matched_message_is_taken nowhere_has_a_message_always",
            "objects": "scatter_of_a_wrong_number",
            "point_to_point": "isendrecv the_largest_tag buffered_sends a_buffered_send_without_room",
            "requests": "freed_receives_go_on persistent_messages "
            "an_inactive_request_is_done persistent_send_modes persistent_and_plain_ends_meet persistent_collectives "
            "partitioned_messages",
            "windows": "attributes names targets_with_derived_types exposing_nothing allocated_windows shared_windows "
            "dynamic_windows",
        }
    )
    | {case.id for case in every_case() if case.theme == "topologies" or case.form == "persistent"},
}
"""Cases that ask for calls which a backend refuses by name. A call that is refused and not listed here was lost."""


def broken(outcomes: list[Outcome], backend: str = "mpi") -> list[str]:
    """Return what did not pass although it should, with what its ranks said."""
    absent = ABSENT_ON.get(backend, OPTIONAL)
    return [
        f"{one.status} {one.case}: {one.text}"
        for one in outcomes
        if one.case not in NOT_YET.get(backend, ())
        and one.status not in (PASSED, SKIPPED)
        and not (one.status == ABSENT and one.case in absent)
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
    """Each case passes over MPI and torch, but for calls that are listed as absent; and none of those has come back."""
    outcomes = list(run_contract(backend, 4))
    assert broken(outcomes, backend) == []
    offered = {one.case for one in outcomes if one.status == PASSED} - OPTIONAL
    assert sorted(offered & (ABSENT_ON[backend] | NOT_YET.get(backend, set()))) == []


def test_the_suite_is_large() -> None:
    """There are more than 350 cases, each with a name of its own and a sentence."""
    cases = every_case()
    assert len({case.id for case in cases}) == len(cases) > 350
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
    monkeypatch.setattr("contract.runners.GRACE_S", 0.5)
    cases = cases_by_id(["stubborn.fine", "stubborn.waits", "stubborn.dies", "stubborn.fine"])
    outcomes = list(run_real(cases, 2))
    assert [one.status for one in outcomes] == [PASSED, FAILED, FAILED, PASSED]
    assert "still inside: rank 1" in outcomes[1].text
    assert "on purpose" in outcomes[1].text
    assert "ended the job" in outcomes[2].text
