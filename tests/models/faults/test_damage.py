"""Damage on the way: what a collective hears of it is what really moving the data along the schedule would give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.collective_plans import calls
from support.effort import tried

from spawnsim.models.collectives.faulty import Damage
from spawnsim.models.faults import Verdict
from spawnsim.virtual.engine.injection import can_be_damaged, damaged, with_damaged_member

REDUCING = ("reduce", "allreduce", "reduce_scatter")
WHOLE = ("bcast", "allreduce", "allgather")  # all ranks end with all blocks
MARK = 1 << 40


class OneMessage:
    """A judge that damages one message: so many lanes in, so far into the lane."""

    def __init__(self, lane, index, place):
        self.lane, self.index, self.place = lane, index, place

    def strikes(self, source, dest, sent_s, numbers):
        for index, number in enumerate(numbers.tolist()):
            if number == self.lane and index == self.index % len(source):
                yield index, Verdict(corrupt=True), self.place


def blocks_of(values, index):
    """Return one message's entry of what a lane says of all."""
    return int(values[index]) if isinstance(values, np.ndarray) else int(values)


def move(one, operation, hit=None):
    """Carry blocks (whole numbers) along a schedule, rank 0 being the root; mark the block that `hit` says.

    `hit` is (lane, message in the lane, block). Returns the blocks of each rank, an int array (P, blocks).
    """
    schedule = one.schedule
    total = schedule.parts if schedule.cut == "vector" else schedule.size
    ranks = np.arange(schedule.size)
    have = np.zeros((schedule.size, total), np.int64)
    if operation in REDUCING:
        have[:] = (ranks[:, None] + 1) * 1000 + np.arange(total)
    elif operation in ("bcast", "scatter"):
        have[0] = 7000 + np.arange(total)
    else:
        have[ranks, ranks] = 7000 + ranks
    number = -1
    for each in schedule.rounds:
        flying = []
        for lane in each.lanes:
            number += 1
            for index, (source, dest) in enumerate(zip(lane.pattern.source, lane.pattern.dest, strict=True)):
                first, count = blocks_of(lane.first, index), blocks_of(lane.blocks, index)
                places = (first + np.arange(count)) % total
                load = have[source, places].copy()
                if hit and hit[:2] == (number, index):
                    load[places == hit[2]] += MARK
                flying.append((dest, places, load))
        for dest, places, load in flying:
            have[dest, places] = have[dest, places] + load if each.reduces else load
    return have


def results(one, operation):
    """Return which blocks belong to the result of each rank, bool (P, blocks), relative to the root."""
    size = one.schedule.size
    total = one.schedule.parts if one.schedule.cut == "vector" else size
    if operation in WHOLE:
        return np.ones((size, total), bool)
    if operation in ("gather", "reduce"):
        return np.broadcast_to(np.arange(size)[:, None] == 0, (size, total))
    return np.eye(size, dtype=bool)  # scatter, reduce_scatter: its own


@tried(45)
@given(calls(), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1, exclude_max=True))
def test_damage_is_where_moving_the_data_puts_it(call, lane, index, place):
    """Exactly those blocks of exactly those ranks are damaged that data carried along the schedule would show."""
    one, network, arrivals, ranks = call
    assume(one.operation in (*REDUCING, *WHOLE, "gather", "scatter") and len(arrivals) > 1)
    lanes = [lane for each in one.schedule.rounds for lane in each.lanes]
    lane %= len(lanes)
    index %= len(lanes[lane].pattern.source)
    assume(np.broadcast_to(one.amounts.of(lanes[lane]), len(lanes[lane].pattern.source))[index] > 0)
    first, count = blocks_of(lanes[lane].first, index), blocks_of(lanes[lane].blocks, index)
    mine, clean = results(one, one.operation), move(one, one.operation)
    block = (first + int(place * count)) % mine.shape[1]
    struck = one.struck(arrivals, network, ranks, judge=OneMessage(lane, index, place))
    there = move(one, one.operation, (lane, index, block)) != clean
    assert {damage.block for damages in struck.damage.values() for damage in damages} <= {block}
    for rank in range(len(arrivals)):
        said = bool(struck.damage.get(rank)) and bool(mine[rank][block])
        assert (there[rank] & mine[rank]).any() == said, (rank, block)


@tried(15)
@given(calls())
def test_schedules_move_what_the_operation_means(call):
    """Carried along the schedule, the blocks end as the operation has it: the yardstick of the test above is right."""
    one, _, arrivals, _ = call
    assume(one.operation in (*REDUCING, *WHOLE, "gather", "scatter"))
    mine, got = results(one, one.operation), move(one, one.operation)
    blocks = np.arange(got.shape[1])
    if one.operation in REDUCING:
        size = len(arrivals)
        expected = 1000 * size * (size + 1) // 2 + size * blocks
    else:
        expected = 7000 + blocks
    assert (got[mine] == np.broadcast_to(expected, got.shape)[mine]).all()


@pytest.mark.parametrize(
    "payload",
    [np.zeros(9, np.float32), np.zeros((2, 3), np.int64), np.array(1.5), b"abc", [np.zeros(2), b"xy"]],
)
@pytest.mark.parametrize("place", [0.0, 0.4, 0.999])
def test_one_bit_is_flipped_in_a_copy(payload, place):
    """Whatever carries the bytes; the sender's own stay as they are."""

    def raw(each):
        return b"".join(map(raw, each)) if isinstance(each, list) else bytes(each)

    before = raw(payload)
    changed = np.unpackbits(
        np.frombuffer(before, np.uint8) ^ np.frombuffer(raw(damaged(payload, place)), np.uint8)
    )
    assert changed.sum() == 1
    assert raw(payload) == before


def test_what_has_no_bytes_cannot_be_damaged():
    """Empty payloads, and what the library tells itself."""
    assert not any(map(can_be_damaged, (None, b"", np.zeros(0), 3, (np.zeros(3), 1), [b"", None])))
    assert all(map(can_be_damaged, (b"x", np.zeros(1), [b"", b"x"], {(1, 0): b"x"})))
    assert damaged((1, 2)) == (1, 2)
    assert damaged(np.zeros(0)).size == 0
    assert with_damaged_member({1: b"\0", 2: b"\0"}, 2, 0.0) == {1: b"\0", 2: b"\x80"}
    assert Damage(0, 1, 0, 0, 0.5) < Damage(0, 1, 0, 1, 0.0)
