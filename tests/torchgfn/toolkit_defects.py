"""Which test holds which defect of the original toolkit: rows for the table of all defects."""

from __future__ import annotations

CHECKS = "tests/torchgfn/test_toolkit.py::test_on_virtual_ranks[{}]"  # and test_on_processes
TIMINGS = "tests/torchgfn/test_timings.py::{}"

DEFECTS: dict[str, tuple[str, ...]] = {
    "B7": (CHECKS.format("models_are_averaged_over_the_group"),),
    "D1": (CHECKS.format("bytes_travel_unchanged"),),
    "D2": (CHECKS.format("both_backends_send_the_same_bytes"),),
    "D3": (CHECKS.format("a_ring_of_isends_does_not_deadlock"),),
    "D4": (CHECKS.format("completion_shows_without_waiting"),),
    "D5": (CHECKS.format("several_receivers_on_one_rank_get_whole_messages"),),
    "D6": (CHECKS.format("groups_have_their_own_ranks"),),
    "D7": (CHECKS.format("broadcast_counts_in_the_group"),),
    "D8": (CHECKS.format("collectives_take_every_dtype"), CHECKS.format("reductions_take_every_dtype")),
    "D9": (CHECKS.format("gradients_are_averaged_where_there_are_some"),),
    "D10": (CHECKS.format("rows_of_any_dtype_and_number_are_gathered"),),
    "D11": (TIMINGS.format("test_imbalance_covers_every_step_of_every_rank"),),
    "D12": (CHECKS.format("a_job_is_divided_and_cleaned_up"),),
    "D13": (CHECKS.format("a_job_is_divided_and_cleaned_up"),),
    "D14": ("tests/torchgfn/test_toolkit.py::test_on_processes",),
}
