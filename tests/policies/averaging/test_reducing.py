"""Who counts in an average and who does not, part by part; how far senders run ahead."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried

from spawnsim.policies.averaging.butterfly import AHEAD, AHEAD_EACH, PartReducer, PartSender, ReducedPart
from spawnsim.policies.averaging.vector import Part

SENDERS = (4, 2, 9)


def reducer_of(parts: int) -> PartReducer:
    """Return a reducer of so many parts of two elements, for three senders."""
    return PartReducer(SENDERS, [Part(0, 2 * index, 2 * index + 2) for index in range(parts)])


def give(reducer: PartReducer, sender: int, index: int, value: float, weight: float = 1.0) -> bool:
    """Hand one part over."""
    return reducer.take(sender, index, np.full(2, value), weight)


def means(reduced: list[ReducedPart], sent: dict[int, float]) -> list[dict[int, float]]:
    """Return, for each part, the mean that each averaged sender ends with."""
    return [{sender: sent[sender] + delta[0] for sender, delta in each.deltas.items()} for each in reduced]


def test_late_parts_of_a_banned_sender_are_not_averaged() -> None:
    """What it had sent before counts; what comes later is refused, though the part is still open for others."""
    reducer, sent = reducer_of(3), {4: 0.0, 2: 3.0, 9: 30.0}
    for index in range(3):
        assert give(reducer, 4, index, 0.0)
    assert give(reducer, 9, 0, 30.0)
    reducer.live.discard(9)
    assert not give(reducer, 9, 1, 30.0)
    assert not give(reducer, 9, 2, 30.0)
    assert list(reducer.ready()) == []  # sender 2 is awaited
    for index in range(3):
        assert give(reducer, 2, index, 3.0)
    done = list(reducer.ready())
    assert means(done, sent) == [{4: 11.0, 2: 11.0, 9: 11.0}, {4: 1.5, 2: 1.5}, {4: 1.5, 2: 1.5}]
    assert [each.missing for each in done] == [(), (9,), (9,)]
    assert reducer.finished


def test_a_part_that_was_passed_over_or_damaged_is_averaged_without_its_sender() -> None:
    """The parts of a rank come in order, so nobody waits for one that is passed over; others count as before."""
    reducer, sent = reducer_of(3), {4: 0.0, 2: 3.0, 9: 30.0}
    for sender in (4, 2):
        for index in range(3):
            give(reducer, sender, index, sent[sender])
    assert reducer.take(9, 0, None, 1.0)  # damaged
    assert give(reducer, 9, 2, 30.0)  # part 1 was lost
    assert not give(reducer, 9, 1, 30.0)
    done = list(reducer.ready())
    assert [each.missing for each in done] == [(9,), (9,), ()]
    assert means(done, sent) == [{4: 1.5, 2: 1.5}, {4: 1.5, 2: 1.5}, {4: 11.0, 2: 11.0, 9: 11.0}]


def test_nobody_counts_twice() -> None:
    """A part that comes twice is refused the second time."""
    reducer = reducer_of(1)
    assert give(reducer, 4, 0, 1.0)
    assert not give(reducer, 4, 0, 5.0)


def test_without_any_part_or_weight_there_is_no_average() -> None:
    """All are missing."""
    reducer = reducer_of(2)
    for sender in SENDERS:
        give(reducer, sender, 0, 1.0, weight=0.0)
        reducer.live.discard(sender)
    assert [(each.deltas, each.weight, each.missing) for each in reducer.ready()] == [({}, 0.0, SENDERS)] * 2


@tried(40)
@given(st.integers(1, 12), st.integers(0, 40), st.randoms(use_true_random=False))
def test_everything_is_sent_in_order_and_not_too_far_ahead(reducers: int, parts: int, random: object) -> None:
    """Whichever reducer answers next: each gets all its parts in order, and never more than the window is open."""
    counts = {rank: (parts * (rank + 1)) // reducers for rank in range(reducers)}
    sending = PartSender(tuple(range(reducers)), counts)
    wires: dict[int, deque[int]] = {rank: deque() for rank in range(reducers)}
    got: dict[int, list[int]] = {rank: [] for rank in range(reducers)}
    while not sending.finished:
        while (found := sending.next()) is not None:
            wires[found[0]].append(found[1])
        assert not sending.can_send
        assert sum(map(len, wires.values())) <= max(AHEAD, AHEAD_EACH * reducers) + AHEAD
        rank = random.choice([rank for rank, wire in wires.items() if wire])  # type: ignore[attr-defined]
        assert sending.awaits(rank)
        index = wires[rank].popleft()
        got[rank].append(index)
        assert sending.answered(rank, index)
        assert not sending.answered(rank, index)
    assert got == {rank: list(range(count)) for rank, count in counts.items()}


def test_a_slow_reducer_holds_up_no_other() -> None:
    """Parts for the others go on while its window is full; when it is given up, all is over."""
    sending = PartSender((1, 2), {1: 100, 2: 100})
    sent: list[tuple[int, int]] = []
    while (found := sending.next()) is not None:
        sent.append(found)
        if found[0] == 2:
            sending.answered(2, found[1])
    assert [index for rank, index in sent if rank == 2] == list(range(100))
    assert len(sent) == 100 + sending.window
    assert not sending.finished
    assert sending.fail(1)
    assert not sending.fail(1)
    assert sending.finished
    assert not sending.can_send


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_an_answer_to_a_part_that_was_not_sent_yet(sent: int) -> None:
    """A reducer that has averaged without this sender says so; it then gets no part of these any more."""
    sending = PartSender((1,), {1: 5})
    for _ in range(sent):
        sending.next()
    assert sending.answered(1, 3)  # the answers before were lost, or are told by it
    assert sending.next() == (1, 4)
    assert sending.next() is None
    assert not sending.answered(1, 2)
    assert not sending.answered(1, 5)
    assert not sending.answered(7, 0)
    assert sending.answered(1, 4)
    assert sending.finished
