"""The asynchronous protocol without a communicator: any order, losses, duplicates, lateness."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried

from spawnsim.errors import ParameterError
from spawnsim.policies.exchange.coordinator import Coordinator, Inbox
from spawnsim.policies.exchange.messages import (
    Kind,
    Message,
    assign_message,
    assignment_of,
    decode,
    encode,
)
from spawnsim.policies.rules.cadence import Adaptive, Fixed
from spawnsim.policies.rules.donors import Assignment, Decision, Rules, Uniform
from spawnsim.policies.rules.selection import Expired, Report, WorstRatio

RULES = Rules(WorstRatio(0.25), Uniform())
BIG = 2**24 + 1  # float32 cannot hold it


def coordinator(size: int = 4, rules: Rules = RULES, **how: object) -> Coordinator:
    """Return a coordinator with a deadline of one second."""
    rng = np.random.default_rng(1)
    return Coordinator(size, rules, rng, deadline=Fixed(1.0), **how)


def tell(books: Coordinator, round_: int, ranks: object, now_s: float = 0.0, settled: int = -1) -> None:
    """Let ranks report their own number as metric."""
    for rank in ranks:
        books.report(round_, Report(rank, float(rank)), now_s, settled)


def replaced(decisions: list[Decision]) -> list[tuple[int, list[int]]]:
    """Return (round, replaced ranks) of decisions."""
    return [(decision.round, sorted(decision.assignments)) for decision in decisions]


# ------------------------------------------------------------------------------------------------ rounds
@pytest.mark.parametrize(
    ("how", "reported", "at_s", "decided"),
    [
        ({}, [0, 1, 2], 0.5, []),
        ({}, [0, 1, 2, 3], 0.5, [(10, [0])]),
        ({}, [0, 1, 3], 1.0, [(10, [0])]),  # at its deadline: a dead rank costs its own contribution
        ({"quorum": 0.5}, [1, 2], 0.0, [(10, [1])]),
    ],
)
def test_when_a_round_is_decided(
    how: dict[str, float], reported: list[int], at_s: float, decided: object
) -> None:
    """When all have reported, a quorum has, or the deadline has passed; the metrics' range is that of all reports."""
    books = coordinator(**how)
    tell(books, 10, reported)
    decisions = books.due(at_s)
    assert replaced(decisions) == decided
    assert all((each.low, each.high) == (min(reported), max(reported)) for each in decisions)
    assert books.counts["deadline"] == (at_s == 1.0)


def test_late_and_duplicate_reports_are_counted_and_dropped() -> None:
    """What comes for a closed round, or twice, changes nothing."""
    books = coordinator()
    tell(books, 10, [0, 1, 1, 3])
    books.due(1.0)
    tell(books, 10, [2], 1.1)
    tell(books, 5, [2], 1.1)
    assert not books.due(9.0)
    assert (books.counts["late"], books.counts["duplicate"]) == (2, 1)


def test_rounds_close_in_order() -> None:
    """Deciding a round closes the older ones: nothing piles up."""
    books = coordinator(quorum=2)
    tell(books, 10, [0])
    tell(books, 20, [1, 2])
    assert replaced(books.due(0.0)) == [(20, [1])]
    assert not books.waiting


def test_iterations_are_whole_numbers() -> None:
    """An iteration beyond 2^24 keeps its round (float32 merged it with its neighbour)."""
    message = decode(encode(Message(Kind.REPORT, BIG, BIG, value=1.0)))
    assert (message.number, message.iteration) == (BIG, BIG)


@pytest.mark.parametrize("threshold", [None, 100.0])
def test_cooldown_holds_with_and_without_threshold(threshold: float | None) -> None:
    """No round replaces within `cooldown` iterations of the last that did."""
    rules = Rules(WorstRatio(0.25, threshold=threshold), Uniform())
    books = coordinator(rules=rules, cooldown=20)
    found = []
    for round_ in range(0, 60, 10):
        tell(books, round_, range(4), settled=max((done for done, ranks in found if ranks), default=-1))
        found += replaced(books.due(0.0))
    assert found == [(0, [0]), (10, []), (20, [0]), (30, []), (40, [0]), (50, [])]


def test_a_successor_keeps_its_predecessors_cooldown() -> None:
    """A new coordinator learns of the rounds before its time from what the ranks have settled."""
    books = coordinator(cooldown=20)
    found = []
    for round_, settled in ((20, 10), (30, 10), (40, 30)):
        tell(books, round_, [0, 1, 2], settled=-1)
        tell(books, round_, [3], settled=settled)
        found += replaced(books.due(0.0))
    assert found == [(20, []), (30, [0]), (40, [])]


def test_a_rank_under_replacement_neither_gives_nor_goes_again() -> None:
    """Until it says that it has settled, an assigned rank is left alone, and nobody goes in its place."""
    books = coordinator()
    tell(books, 10, range(4))
    books.due(0.0)
    tell(books, 20, range(4), settled=-1)
    assert replaced(books.due(0.0)) == [(20, [])]
    tell(books, 30, range(4), settled=20)
    assert replaced(books.due(0.0)) == [(30, [0])]


def test_a_lost_assignment_does_not_bar_a_rank_for_ever() -> None:
    """After some deadlines the coordinator gives the assignment up."""
    books = coordinator()
    tell(books, 10, range(4))
    books.due(0.0)
    tell(books, 20, range(4), now_s=10.0)
    assert replaced(books.due(10.0)) == [(20, [0])]


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """Goodbyes lower the quorum, and nobody is sent to a rank that has gone."""
    books = coordinator()
    books.leave(3)
    tell(books, 10, [0, 1, 2])
    (decision,) = books.due(0.0)
    assert decision.assignments[0].donors == (1, 2)


def test_age_takes_those_whose_life_is_over() -> None:
    """In mode age the report says whether the age has run out."""
    books = coordinator(rules=Rules(Expired(), Uniform(1)))
    for rank in range(4):
        books.report(10, Report(rank, 1.0, expired=rank == 2), 0.0)
    assert replaced(books.due(0.0)) == [(10, [2])]


# ------------------------------------------------------------------------------------------------ inbox
def snapshot(round_: int, part: int = 0, parts: int = 1, iteration: int = 7) -> Message:
    """Return one part of a snapshot."""
    return Message(Kind.SNAPSHOT, round_, iteration, part, parts)


def asked(*donors: int, round_: int = 10) -> Inbox:
    """Return an inbox that waits for donors."""
    inbox = Inbox(Fixed(1.0))
    assert inbox.assign(Assignment(round_, donors, (1 / len(donors),) * len(donors)), 0.0)
    return inbox


def test_an_assignment_ends_when_all_donors_have_given_all_parts() -> None:
    """Parts may come in any order."""
    inbox = asked(1, 2)
    assert [part.part for part in inbox.part(2, snapshot(10))] == [0]
    assert inbox.part(1, snapshot(10, 1, 2)) == []
    assert inbox.outcome(0.2) is None
    assert [part.part for part in inbox.part(1, snapshot(10, 0, 2))] == [0, 1]
    outcome = inbox.outcome(0.3)
    assert outcome is not None
    assert list(outcome.given) == [2, 1]
    assert (inbox.settled, inbox.waiting) == (10, False)


def test_an_incomplete_donor_is_left_out_at_the_deadline() -> None:
    """Half a snapshot is none."""
    inbox = asked(1, 2)
    inbox.part(1, snapshot(10, 0, 2))
    inbox.part(2, snapshot(10))
    outcome = inbox.outcome(1.0)
    assert outcome is not None
    assert list(outcome.given) == [2]
    assert inbox.counts["missing"] == 1


def test_late_foreign_and_duplicate_parts_are_dropped() -> None:
    """Other rounds, other ranks, the same part twice: counted, not taken."""
    inbox = asked(1)
    inbox.part(1, snapshot(5))
    inbox.part(3, snapshot(10))
    inbox.part(1, snapshot(10, 0, 2))
    inbox.part(1, snapshot(10, 0, 2))
    assert inbox.outcome(0.1) is None
    assert (inbox.counts["late"], inbox.counts["duplicate"]) == (2, 1)


def test_parts_of_two_snapshots_never_mix() -> None:
    """A second answer replaces the first, unfinished one."""
    inbox = asked(1)
    inbox.part(1, snapshot(10, 0, 2, iteration=7))
    inbox.part(1, snapshot(10, 1, 2, iteration=8))
    assert inbox.outcome(0.2) is None
    whole = inbox.part(1, snapshot(10, 0, 2, iteration=8))
    assert [part.iteration for part in whole] == [8, 8]
    assert inbox.outcome(0.2) is not None


def test_one_assignment_at_a_time_and_none_twice() -> None:
    """While one is open others are refused; one that has ended is not taken again."""
    inbox = asked(1)
    assert not inbox.assign(Assignment(20, (1,), (1.0,)), 0.0)
    inbox.part(1, snapshot(10))
    assert inbox.outcome(0.1) is not None
    assert not inbox.assign(Assignment(10, (1,), (1.0,)), 0.2)
    assert inbox.assign(Assignment(20, (1,), (1.0,)), 0.2)


# --------------------------------------------------------------------------------------------- messages
def test_assignments_come_back_as_they_were() -> None:
    """Donors, weights and the metrics' range survive."""
    sent = Assignment(4, (0, 7), (0.25, 0.75), -1.5, 2.5)
    assert assignment_of(decode(encode(assign_message(sent, 12)))) == sent


# --------------------------------------------------------------------------------------------- deadlines
def test_adaptive_deadline_learns_from_arrivals() -> None:
    """Slack · (median + k · MAD), once half have come; before that, and before enough was seen, the initial limit."""
    limit = Adaptive(k=3.0, initial_s=30.0, slack=2.0, enough=4)
    for late_s in (1.0, 1.0, 1.2, 0.8):
        assert limit.limit_s(1.0) == 30.0
        limit.observe(late_s)
    assert limit.limit_s(1.0) == pytest.approx(2 * (1.0 + 3 * 1.4826 * 0.1))
    assert limit.limit_s(0.4) == 30.0


def test_adaptive_deadline_is_no_shorter_than_the_pace() -> None:
    """Who polls rarely sees all arrivals at once, and must not take that for punctuality."""
    limit = Adaptive(enough=1)
    limit.observe(0.0)
    limit.paced(0.5)
    assert limit.limit_s(1.0) == 0.5


def test_bad_deadlines_are_refused() -> None:
    """Seconds are above 0."""
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ParameterError):
            Fixed(bad)


# ------------------------------------------------------------------------------------- a network from hell
@tried(60)
@given(st.data())
def test_losses_duplicates_and_any_order_break_no_promise(data: st.DataObject) -> None:
    """Four ranks, ten rounds; each message may be lost, doubled or delayed by up to five rounds.

    Donors are never replaced in the same round, nobody mixes rounds, every open state ends, and memory stays bounded.
    """
    books, intakes = coordinator(), [Inbox(Fixed(1.0)) for _ in range(4)]
    mail: list[tuple[int, Callable[[float], object]]] = []

    def post(step: int, deliver: Callable[[float], object]) -> None:
        copies = data.draw(st.sampled_from([0, 1, 1, 1, 2]))
        mail.extend((step + data.draw(st.integers(0, 5)), deliver) for _ in range(copies))

    def give(rank: int, donor: int, part: Message) -> None:
        assert all(each is part for each in intakes[rank].part(donor, part))

    def take(rank: int, assignment: Assignment, step: int) -> Callable[[float], object]:
        def deliver(now_s: float) -> None:
            if intakes[rank].assign(assignment, now_s):
                part = snapshot(assignment.round, iteration=step)
                for donor in assignment.donors:
                    post(step, lambda at_s, donor=donor, part=part: give(rank, donor, part))

        return deliver

    for step in range(25):
        now_s = 0.3 * step
        if step < 10:
            for rank in range(4):
                report, settled = Report(rank, float(rank)), intakes[rank].settled
                post(step, lambda at_s, r=report, s=settled, i=step: books.report(i, r, at_s, s))
        for _, deliver in [entry for entry in mail if entry[0] <= step]:
            deliver(now_s)
        mail[:] = [entry for entry in mail if entry[0] > step]
        for decision in books.due(now_s):
            for rank, assignment in decision.assignments.items():
                assert not set(assignment.donors) & decision.assignments.keys()
                post(step, take(rank, assignment, step))
        for inbox in intakes:
            outcome = inbox.outcome(now_s)
            if outcome is not None:
                assert outcome.given.keys() <= set(outcome.assignment.donors)
    assert not books.due(1e9)
    assert not books.waiting
    for inbox in intakes:
        inbox.outcome(1e9)
        assert not inbox.waiting
