"""The all-reduce of one group without any communicator: cutting, sending ahead, reducing, and the whole protocol.

Partitions and reducers are checked by the numbers of hivemind's `test_allreduce.py`; the programs are ours.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from policies.averaging.averagers import flat
from support.effort import tried

from spawnsim.policies.averaging.butterfly import (
    AHEAD,
    AHEAD_EACH,
    Butterfly,
    Group,
    Limits,
    Member,
    PartReducer,
    PartSender,
    ReducedPart,
    Role,
)
from spawnsim.policies.averaging.interface import result_of, why_no_average
from spawnsim.policies.averaging.vector import Part, Vector, average, whole_shares
from spawnsim.policies.exchange.messages import Kind
from spawnsim.policies.state.codecs import NAMED, Codec, pack

SHAPES = ((33,), (5, 3), (), (2, 2, 2))


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return tensors of several shapes with normal values."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


class Ring:
    """The members of one group, and a network that delivers at once; `mute` ranks are silent."""

    def __init__(
        self, vectors: list[Vector], *, roles: dict[int, Role] | None = None, weights: list[float] | None = None,
        limits: Limits | None = None, bandwidths: list[float | None] | None = None,
    ) -> None:  # fmt: skip
        count = len(vectors)
        roles, rates = roles or {}, bandwidths or [None] * count
        group = Group(1, tuple(Member(r, roles.get(r, Role.NODE), rates[r]) for r in range(count)))
        self.members = [
            Butterfly(
                r, group, vectors[r], weight=weights[r] if weights else 1.0,
                limits=limits or Limits(part_size_bytes=64), now_s=0.0,
            )
            for r in range(count)
        ]  # fmt: skip
        self.vectors, self.mute, self.now_s = vectors, set[int](), 0.0

    def deliver(self) -> None:
        """Deliver all messages."""
        moved = True
        while moved:
            moved = False
            for rank, member in enumerate(self.members):
                while member.out:
                    dest, message = member.out.popleft()
                    moved = True
                    if rank not in self.mute and dest not in self.mute:
                        self.members[dest].handle(rank, message, self.now_s)

    def run(self) -> None:
        """Let everyone send all that it may, and deliver it, until nobody sends any more."""
        self.deliver()
        while any(member.sending.can_send for member in self.members):
            for member in self.members:
                member.send_some(10**6, self.now_s)
            self.deliver()

    def average(self) -> None:
        """Run to the end, and apply what has come."""
        self.run()
        for member, vector in zip(self.members, self.vectors, strict=True):
            vector.add(member.deltas)


def vector_of(seed: int, codec: Codec, dtype: torch.dtype = torch.float32) -> Vector:
    """Return a vector of `tensors` that are all compressed alike."""
    values = tensors(seed, dtype)
    return Vector(values, [codec] * len(values))


@tried(40)
@given(
    st.integers(0, 7), st.integers(0, 3), st.integers(0, 4), st.sampled_from(["equal", "any", "some 0"]),
    st.sampled_from([19, 64, 256, 2**20]), st.integers(0, 99),
)  # fmt: skip
def test_the_weighted_mean(
    nodes: int, clients: int, auxiliaries: int, weighted: str, part_size_bytes: int, seed: int
) -> None:
    """Nodes and clients end with the mean of their values to 1e-6; auxiliaries keep theirs."""
    clients = clients if nodes or auxiliaries else 0
    averaging, count = nodes + clients, nodes + clients + auxiliaries
    roles = dict.fromkeys(range(nodes, averaging), Role.CLIENT)
    roles |= dict.fromkeys(range(averaging, count), Role.AUX)
    vectors = [Vector(tensors(seed + rank)) for rank in range(count)]
    rng = np.random.default_rng(seed)
    weights = np.ones(count) if weighted == "equal" else rng.uniform(0.1, 3, count)
    if weighted == "some 0":
        weights[1::2] = 0.0
    before = [flat(vector.tensors) for vector in vectors]
    bandwidths = list(rng.uniform(0.5, 2, count) * (rng.random(count) > 0.3))
    ring = Ring(
        vectors, roles=roles, weights=weights.tolist(), bandwidths=bandwidths, limits=Limits(part_size_bytes)
    )
    ring.average()
    assert all(member.finished and member.received == 1 for member in ring.members)
    if averaging:
        expected = np.average(before[:averaging], axis=0, weights=weights[:averaging])
    for rank, vector in enumerate(vectors):
        wanted = expected if rank < averaging else before[rank]
        np.testing.assert_allclose(flat(vector.tensors), wanted, atol=1e-6)


@pytest.mark.parametrize("name", NAMED)
def test_equal_inputs_stay_bit_for_bit(name: str) -> None:
    """Deltas of equal values are zero, however much the compression loses."""
    vectors = [vector_of(5, NAMED[name]) for _ in range(5)]
    before = flat(vectors[0].tensors)
    ring = Ring(vectors)
    ring.average()
    assert all((flat(vector.tensors) == before).all() for vector in vectors)


@pytest.mark.parametrize(("name", "bound"), [("float16", 1e-5), ("uniform8", 1e-2), ("blockwise8", 1e-2)])
def test_compression_errors(name: str, bound: float) -> None:
    """Mean squared error of the average under lossy compression."""
    vectors = [vector_of(rank, NAMED[name]) for rank in range(4)]
    expected = np.mean([flat(vector.tensors) for vector in vectors], axis=0)
    ring = Ring(vectors)
    ring.average()
    assert np.mean([(flat(vector.tensors) - expected) ** 2 for vector in vectors]) <= bound


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64, torch.bool]
)
def test_any_dtype(dtype: torch.dtype) -> None:
    """Whole numbers round, truth values follow the majority, complex numbers are pairs."""
    values = [[0, 4, 8], [2, 4, 1], [4, 4, 0]]
    vectors = [Vector([torch.tensor(row).to(dtype), torch.tensor(1.5).double()]) for row in values]
    ring = Ring(vectors)
    ring.average()
    expected = torch.tensor([2, 4, 3]).to(dtype)
    assert all(torch.equal(vector.tensors[0], expected) for vector in vectors)


def test_values_that_are_not_finite_harm_nobody() -> None:
    """They count with weight 0 where they stand, and stay where they are."""
    vectors = [
        Vector([torch.tensor([1.0, 2.0])]),
        Vector([torch.tensor([3.0, math.nan])]),
        Vector([torch.tensor([5.0, 6.0])]),
    ]
    ring = Ring(vectors)
    ring.average()
    assert [vector.tensors[0].tolist() for vector in (vectors[0], vectors[2])] == [[3.0, 4.0]] * 2
    assert vectors[1].tensors[0][0] == 3.0
    assert average([np.ones(2), np.ones(2)], [0.0, 0.0])[1] == 0.0


def test_a_silent_sender_is_banned() -> None:
    """The others end with their own mean when its time is over; not a moment before."""
    vectors = [Vector(tensors(rank, torch.float64)) for rank in range(4)]
    before = [flat(vector.tensors) for vector in vectors]
    ring = Ring(vectors, limits=Limits(64, sender_timeout_s=2.0, reducer_timeout_s=5.0))
    ring.mute = {3}
    ring.run()
    for now_s in (1.999, 2.0, 4.999, 5.0):
        ring.now_s = now_s
        for member in ring.members:
            member.tick(now_s)
        ring.deliver()
        finished = [member.finished for member in ring.members[:3]]
        assert finished == [now_s >= 5.0] * 3
    ring.average()
    mine = np.mean(before[:3], axis=0)
    for rank in range(3):
        changed = flat(vectors[rank].tensors) != before[rank]
        np.testing.assert_allclose(flat(vectors[rank].tensors)[changed], mine[changed], atol=1e-12)
        assert changed.mean() == pytest.approx(ring.members[rank].received, abs=0.05)
        assert changed.mean() > 0.5
    assert (flat(vectors[3].tensors) == before[3]).sum() > 0


def test_what_was_sent_before_a_ban_counts() -> None:
    """Parts that came in time are averaged with the others'; later ones without."""
    vectors = [Vector([torch.arange(64.0) + rank]) for rank in range(2)]
    ring = Ring(
        vectors, limits=Limits(32, sender_timeout_s=1.0, reducer_timeout_s=9.0), bandwidths=[1.0, 0.0]
    )
    ring.members[0].send_some(100, 0.0)
    ring.members[1].send_some(4, 0.0)
    ring.deliver()
    ring.members[0].tick(1.0)
    assert ring.members[0].finished
    ring.vectors[0].add(ring.members[0].deltas)
    assert (vectors[0].tensors[0] - torch.arange(64.0)).tolist() == [0.5] * 32 + [0.0] * 32


def test_strangers_and_rubbish_are_refused() -> None:
    """They are counted and change nothing."""
    ring = Ring([Vector(tensors(rank)) for rank in range(2)])
    member = ring.members[0]
    message = member._message(member.parts[1][0], 0)
    member.handle(7, message, 0.0)
    member.handle(1, replace(message, part=5), 0.0)
    ring.run()
    member.handle(1, message, 0.0)
    assert (member.counts["strangers"], member.counts["refused parts"]) == (1, 2)
    assert member.finished


def test_ranks_that_were_not_averaged_are_reported_to_all() -> None:
    """A part that was damaged on its way to one reducer: its sender keeps local values there, and everybody knows."""
    vectors = [Vector(tensors(rank, torch.float64)) for rank in range(4)]
    before = [flat(vector.tensors) for vector in vectors]
    ring = Ring(vectors)
    damaged = 0
    for member in ring.members:
        member.send_some(10**6, 0.0)
    for dest, message in ring.members[3].out:
        if dest == 1 and not damaged:
            damaged = (
                ring.members[1].reducer.parts[message.part].stop
                - ring.members[1].reducer.parts[message.part].start
            )
            ring.members[1].handle(3, replace(message, body=message.body[:0], damaged=True), 0.0)
    ring.members[3].out = deque(
        item for item in ring.members[3].out if not (item[0] == 1 and item[1].part == 0)
    )
    ring.average()
    share = damaged / vectors[0].count
    assert share > 0
    assert all(member.finished for member in ring.members)
    assert [member.received for member in ring.members] == [1.0, 1.0, 1.0, pytest.approx(1 - share)]
    assert [member.missing() for member in ring.members] == [{3: pytest.approx(share)}] * 3 + [{}]
    everyone, without = np.mean(before, axis=0), np.mean(before[:3], axis=0)
    for rank in range(3):
        after = flat(vectors[rank].tensors)
        of_all, of_rest = np.isclose(after, everyone), np.isclose(after, without)
        assert (of_all | of_rest).all()
        assert (~of_all).mean() == pytest.approx(share)
    assert (flat(vectors[3].tensors) == before[3]).mean() == pytest.approx(share)


def test_a_lost_answer_leaves_local_values() -> None:
    """The next answer shows that one was lost: nobody waits for it."""
    vectors = [Vector(tensors(rank, torch.float64)) for rank in range(2)]
    ring = Ring(vectors, limits=Limits(16))
    for member in ring.members:
        member.send_some(10**6, 0.0)
    ring.members[0].handle(1, ring.members[1].out.popleft()[1], 0.0)
    lost = ring.members[0].out.pop()
    assert lost[1].kind is Kind.DELTA
    ring.run()
    assert all(member.finished for member in ring.members)
    size = 2 / vectors[0].count
    assert [member.received for member in ring.members] == [1.0, pytest.approx(1 - size)]


def test_a_banned_sender_learns_it_at_once() -> None:
    """It gets an answer to each part, also to those that it has not sent: it never waits for who does not for it."""
    vectors = [Vector([torch.arange(64.0) + rank]) for rank in range(3)]
    ring = Ring(vectors, limits=Limits(32, sender_timeout_s=1.0, reducer_timeout_s=9.0))
    asleep = ring.members[2]
    for member in ring.members[:2]:
        member.send_some(100, 0.0)
    ring.deliver()
    assert not any(member.finished for member in ring.members)
    for member in ring.members[:2]:
        member.tick(1.0)
    ring.deliver()
    assert [member.counts["banned"] for member in ring.members] == [1, 1, 0]
    assert asleep.sending.finished or asleep.sending.can_send  # nothing but its own range is left to it
    asleep.send_some(100, 1.0)
    ring.deliver()
    assert all(member.finished for member in ring.members)
    ring.average()
    own = ring.members[2].parts[2]
    assert asleep.received == pytest.approx(sum(part.stop - part.start for part in own) / 64)
    assert [set(member.missing()) for member in ring.members] == [{2}, {2}, set()]


def test_from_when_silence_counts() -> None:
    """A sender's from the last average, until which its reducer waited for others; a reducer's from what it was sent.

    Lost members get no answers.
    """
    vectors = [Vector([torch.arange(64.0) + rank]) for rank in range(3)]
    ring = Ring(vectors, limits=Limits(32, sender_timeout_s=1.0, reducer_timeout_s=9.0))
    reducer, parts = ring.members[0], ring.members[0].reducer.parts
    reducer.send_some(100, 0.0)
    for sender, now_s in ((1, 0.0), (2, 0.9)):
        reducer.handle(sender, ring.members[sender]._message(parts[0], 0), now_s)
    assert reducer.wake_s() == pytest.approx(1.9)
    reducer.tick(1.5)
    assert reducer.counts["banned"] == 0
    reducer.out.clear()
    reducer.lost(2, 1.5)
    reducer.handle(1, ring.members[1]._message(parts[1], 1), 1.6)
    assert [dest for dest, message in reducer.out if message.kind is Kind.DELTA] == [1]
    [idle, *_] = Ring(vectors, limits=Limits(32, reducer_timeout_s=9.0)).members
    idle.send_some(1, 5.0)
    assert idle.wake_s() == 14.0


def test_ones_own_values_are_no_average() -> None:
    """All elements came back, but from a sender that nobody else has joined."""
    vectors = [Vector([torch.arange(64.0) + rank]) for rank in range(2)]
    alone, _ = Ring(vectors, limits=Limits(32, sender_timeout_s=1.0), bandwidths=[1.0, 0.0]).members
    alone.send_some(100, 0.0)
    alone.tick(1.0)
    assert (alone.finished, alone.received, alone.missing()) == (True, 1.0, {1: 1.0})
    assert why_no_average(alone) == "no values of other members arrived"
    assert dict(result_of(alone)) == {0: None}


# ------------------------------------------------------------------------------------------------------- cutting
LARGE = [
    (3000, 128), (128,), (1, 1, 1, 1, 1, 1, 8), (1, 0), (0,), (), (65536,), (512, 204), (102, 1024), (1020,), (4096,),
]  # fmt: skip
FRACTIONS = [(1, 1), (0.333, 0.1667, 0.5003), (1.0, 0.0), (0.0, 0.4, 0.6, 0.0)]
EDGES = [(0.33, 0.44, 0.23), (0.5, 0.5), (0.1, 0.0, 0.9), (1.0,), (0.1,) * 9]


def apply_part_by_part(vector: Vector, fractions: Sequence[float], part_size_bytes: int) -> None:
    """Send each reducer its parts as bytes, take the sine there, and add what it makes of each part."""
    deltas, values = vector.zeros(), vector.read()
    counts = (
        whole_shares(vector.count, np.asarray(fractions, float)) if vector.count else [0] * len(fractions)
    )
    assert sum(counts) == vector.count
    for count, parts in zip(counts, vector.cut(counts, part_size_bytes), strict=True):
        assert sum(part.stop - part.start for part in parts) == count
        for part in parts:
            raw, body = pack(NAMED["none"], values[part.segment][part.start : part.stop])
            assert body.nbytes <= max(part_size_bytes, 8)
            came = vector.unpacked(part, raw, body)
            deltas[part.segment][part.start : part.stop] = np.sin(came) - came
    vector.add(deltas)


@pytest.mark.parametrize("part_size_bytes", [31337, 10**10])
@pytest.mark.parametrize("fractions", FRACTIONS)
def test_partitioning(part_size_bytes: int, fractions: Sequence[float]) -> None:
    """Each element is in one part of one reducer, and comes back to its place."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in LARGE]
    expected = [tensor.sin() for tensor in tensors]
    apply_part_by_part(Vector(tensors), fractions, part_size_bytes)
    for tensor, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fractions", EDGES)
@pytest.mark.parametrize("sizes", [(0,), (0, 0, 1), (0, 999, 0, 0)])
def test_partitioning_edge_cases(sizes: Sequence[int], fractions: Sequence[float]) -> None:
    """Tensors without elements, reducers without share."""
    tensors = [torch.ones(size) for size in sizes]
    apply_part_by_part(Vector(tensors), fractions, 16)
    assert [tuple(tensor.shape) for tensor in tensors] == [(size,) for size in sizes]
    assert all(torch.allclose(tensor, torch.ones(1).sin()) for tensor in tensors)


# ---------------------------------------------------------------------------------------------- reducing, sending
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


def test_without_any_part_or_weight_there_is_no_average() -> None:
    """All are missing."""
    reducer = reducer_of(2)
    for sender in SENDERS:
        give(reducer, sender, 0, 1.0, weight=0.0)
        reducer.live.discard(sender)
    assert [(each.deltas, each.weight, each.missing) for each in reducer.ready()] == [({}, 0.0, SENDERS)] * 2


@pytest.mark.parametrize("senders", [1, 4, 10])
@pytest.mark.parametrize("parts", [0, 1, 50])
@pytest.mark.parametrize("together", [1.0, 0.1, 0.0])
def test_reducer(senders: int, parts: int, together: float) -> None:
    """Parts of 0, 1, 2, ... elements, from senders that run ahead of each other: the mean of all, for each."""
    rng = np.random.default_rng(senders + parts)
    sent = [[rng.normal(size=size).astype(np.float32) for size in range(parts)] for _ in range(senders)]
    reducer = PartReducer(range(senders), [Part(0, 0, size) for size in range(parts)])
    got: list[dict[int, np.ndarray]] = [{} for _ in range(senders)]

    def take_averages() -> None:
        for reduced in reducer.ready():
            for sender, delta in reduced.deltas.items():
                got[sender][reduced.part] = sent[sender][reduced.part] + delta

    progress = [0] * senders
    while min(progress) < parts:
        sender = int(rng.choice([each for each in range(senders) if progress[each] < parts]))
        while progress[sender] < parts:
            assert reducer.take(sender, progress[sender], sent[sender][progress[sender]], 1.0)
            progress[sender] += 1
            if rng.random() < together:
                break
        take_averages()
    take_averages()
    assert reducer.finished
    for index in range(parts):
        mean = np.mean([each[index] for each in sent], axis=0)
        for sender in range(senders):
            np.testing.assert_allclose(got[sender][index], mean, rtol=1e-3, atol=1e-5)


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
