"""The defects of the original policies and toolkit, each with the test that would notice it here.

A1 to A30: asynchronous selective averaging; B1 to B7: averaging all; C1 to C22: the one-sided variants; D1 to D14: the
toolkit. Those that cannot exist here by design say why.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from torchgfn.toolkit_defects import DEFECTS as TOOLKIT

TESTS = Path(__file__).parent

# defect, file test_….py under tests/policies/, test; a defect may have several
POLICIES = """
A1  selective   who_is_replaced_by_whom
A1  selective   best_only_copies_the_best_of_any_number
A2  selective   who_is_replaced_by_whom
A2  buildings   a_real_run_replayed_on_virtual_ranks_takes_the_same_decisions
A3  endpoint    sends_and_their_buffers_are_kept_until_complete
A4  endpoint    messages_to_oneself_take_no_wire
A4  selective   who_is_replaced_by_whom
A5  selective   who_is_replaced_by_whom
A5  donors      rank_0_is_an_ordinary_rank
A6  selective   nobody_waits_for_anybody
A7  mixing      weighted_mean_of_1_2_4_prefers_4
A7  mixing      weights_are_a_distribution
A8  selection   selections
A8  selective   a_nan_rank_is_replaced_and_never_gives
A9  donors      a_nan_rank_triggers_nothing_where_it_is_excluded
A10 selection   worst_count
A10 selective   ratio_0_and_an_infinite_threshold_replace_nobody
A10 selective   ratio_1_leaves_a_survivor
A11 donors      nobody_is_replaced_when_all_are_nan
A11 faults      faults_cost_messages_never_models_or_time
A12 donors      donors_are_never_replaced_and_weights_are_a_distribution
A12 selective   ratio_1_leaves_a_survivor
A13 protocol    cooldown_holds_with_and_without_threshold
A14 selection   selections
A15 selective   donors_give_their_current_model_also_after_a_rebuild
A16 selective   counts_and_ranks_come_from_the_group
A18 protocol    when_a_round_is_decided
A18 selective   a_dead_rank_costs_only_itself
A19 protocol    iterations_are_whole_numbers
A20 protocol    late_foreign_and_duplicate_parts_are_dropped
A20 protocol    parts_of_two_snapshots_never_mix
A21 mixing      blend_divides_by_the_weights_that_arrived
A22 state       a_snapshot_comes_back_bit_for_bit
A23 state       all_of_a_state_dict_travels_and_nothing_else
A23 state       optimizer_state_is_reset_kept_copied_or_averaged
A24 state       momentum_and_delta_enter_a_replacement
A25 selective   info_tells_what_happened
A26 selective   shutdown_may_come_first_twice_and_early
A28 seeds       calls_have_the_seeds_arguments_in_their_order
A29 selective   bad_parameters_are_refused_in_the_constructor
A30 selection   selections
B1  average_all averaging_equal_models_over_a_subgroup_changes_nothing
B2  seeds       raw_mpi4py_groups_and_the_default_world
B2  average_all a_group_that_is_none_is_refused
B3  average_all every_dtype_is_averaged
B3  average_all whole_numbers_are_averaged_exactly
B4  average_all one_collective_per_dtype_however_many_parameters
B4  average_all optimizer_state_is_averaged_or_reset_on_demand
B5  average_all iteration_0_averages_too_so_that_ranks_begin_together
B5  average_all iteration_0_averages_too_so_that_ranks_begin_together
B6  average_all subgroups_average_apart
C1  one_sided   the_worst_rank_takes_over_from_its_donors
C2  one_sided   a_read_that_was_overtaken_is_repeated
C3  one_sided   every_dtype_is_read_as_it_was_written
C4  one_sided   every_dtype_is_read_as_it_was_written
C5  one_sided   models_of_different_shapes_are_matched_by_name
C6  one_sided   a_model_that_outgrows_its_window_is_kept_back_not_torn
C7  one_sided   half_of_the_group_gives_by_default_but_eight_at_most
C8  one_sided   never
C9  one_sided   nan_ranks_are_replaced_and_never_give
C9  donors      busy_ranks_neither_give_nor_take
C10 one_sided   the_worst_rank_takes_over_from_its_donors
C11 one_sided   info_reports_how_often_it_really_checks
C12 one_sided   nan_ranks_are_replaced_and_never_give
C12 one_sided   cooldown_stops_thrashing
C13 one_sided   ranks_may_differ_in_iterations
C14 one_sided   ages_differ_between_ranks_and_repeat_with_the_seed
C15 one_sided   shutdown_never_hangs_and_may_be_called_early_and_twice
C16 one_sided   windows_are_made_explicitly_or_in_the_first_call
C17 one_sided   models_are_laid_out_at_the_cadence_not_in_every_call
C18 one_sided   a_reader_waits_a_poll_not_the_donors_whole_computation
C19 one_sided   counts_come_from_the_group
C20 one_sided   the_originals_counters_mean_something
C21 seeds       nothing_else_prints
"""

BY_DESIGN = {
    "A17": "no thread touches the books: a rank's side of the protocol moves only in its own calls",
    "A27": "ruff's BLE forbids blanket handlers; what cannot be read is counted (protocol::test_foreign_bytes_are_…)",
    "C22": "both variants are one class, whose docstring describes both layouts",
}


def _of_policies() -> dict[str, tuple[str, ...]]:
    places: dict[str, tuple[str, ...]] = {}
    for row in POLICIES.strip().splitlines():
        defect, file, name = row.split()
        found = (
            TESTS / "policies" / folder / f"test_{file}.py" for folder in ("", "rules", "state", "exchange")
        )
        (path,) = (each for each in found if each.exists())
        places[defect] = (*places.get(defect, ()), f"{path.relative_to(TESTS.parent)}::test_{name}")
    return places


PLACES = _of_policies() | TOOLKIT


@cache
def _tests_in(path: Path) -> frozenset[str]:
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in found if isinstance(node, ast.FunctionDef))


def test_every_defect_of_the_originals_has_its_place() -> None:
    """A1 to A30, B1 to B7, C1 to C22 and D1 to D14: 73 of them, none twice."""
    numbered = {"A": 30, "B": 7, "C": 22, "D": 14}
    wanted = {f"{letter}{number}" for letter, last in numbered.items() for number in range(1, last + 1)}
    assert len(wanted) == 73
    assert set(PLACES) | set(BY_DESIGN) == wanted
    assert not set(PLACES) & set(BY_DESIGN)


@pytest.mark.parametrize("defect", PLACES)
def test_the_test_of_each_defect_exists(defect: str) -> None:
    """A renamed or deleted test does not leave a hole."""
    for place in PLACES[defect]:
        file, _, name = place.partition("::")
        assert name.partition("[")[0] in _tests_in(TESTS.parent / file), place
