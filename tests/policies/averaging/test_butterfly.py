"""The all-reduce of one group without any communicator."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried

from spawnsim.policies.averaging.butterfly import Butterfly, Group, Limits, Member, Role
from spawnsim.policies.averaging.vector import Vector, average
from spawnsim.policies.exchange.messages import Kind
from spawnsim.policies.state.codecs import NAMED, Codec

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

    def apply(self) -> None:
        for member, vector in zip(self.members, self.vectors, strict=True):
            vector.add(member.deltas)


def vector_of(seed: int, codec: Codec, dtype: torch.dtype = torch.float32) -> Vector:
    """Return a vector of `tensors` that are all compressed alike."""
    values = tensors(seed, dtype)
    return Vector(values, [codec] * len(values))


def flat(vector: Vector) -> np.ndarray:
    """Return all values as one array."""
    return np.concatenate([tensor.double().reshape(-1).numpy() for tensor in vector.tensors])


@tried(24)
@given(st.integers(1, 7), st.integers(0, 3), st.integers(0, 4), st.booleans(), st.integers(0, 99))
def test_the_weighted_mean(nodes: int, clients: int, auxiliaries: int, weighted: bool, seed: int) -> None:
    """Nodes and clients end with the mean of their values to 1e-6; auxiliaries keep theirs."""
    count = nodes + clients + auxiliaries
    roles = dict.fromkeys(range(nodes, nodes + clients), Role.CLIENT)
    roles |= dict.fromkeys(range(nodes + clients, count), Role.AUX)
    vectors = [Vector(tensors(seed + rank)) for rank in range(count)]
    rng = np.random.default_rng(seed)
    weights = list(rng.uniform(0.1, 3, count)) if weighted else [1.0] * count
    before = [flat(vector) for vector in vectors]
    ring = Ring(vectors, roles=roles, weights=weights, bandwidths=list(rng.uniform(0.5, 2, count)))
    ring.run()
    assert all(member.finished and member.received == 1 for member in ring.members)
    ring.apply()
    averaging = nodes + clients
    expected = np.average(before[:averaging], axis=0, weights=weights[:averaging])
    for rank, vector in enumerate(vectors):
        np.testing.assert_allclose(flat(vector), expected if rank < averaging else before[rank], atol=1e-6)


@pytest.mark.parametrize("name", NAMED)
def test_equal_inputs_stay_bit_for_bit(name: str) -> None:
    """Deltas of equal values are zero, however much the compression loses."""
    vectors = [vector_of(5, NAMED[name]) for _ in range(5)]
    before = flat(vectors[0])
    ring = Ring(vectors)
    ring.run()
    ring.apply()
    assert all((flat(vector) == before).all() for vector in vectors)


@pytest.mark.parametrize(("name", "bound"), [("float16", 1e-5), ("uniform8", 1e-2), ("blockwise8", 1e-2)])
def test_compression_errors(name: str, bound: float) -> None:
    """Mean squared error of the average under lossy compression."""
    vectors = [vector_of(rank, NAMED[name]) for rank in range(4)]
    expected = np.mean([flat(vector) for vector in vectors], axis=0)
    ring = Ring(vectors)
    ring.run()
    ring.apply()
    assert np.mean([(flat(vector) - expected) ** 2 for vector in vectors]) <= bound


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.complex64, torch.bool]
)
def test_any_dtype(dtype: torch.dtype) -> None:
    """Whole numbers round, truth values follow the majority, complex numbers are pairs."""
    values = [[0, 4, 8], [2, 4, 1], [4, 4, 0]]
    vectors = [Vector([torch.tensor(row).to(dtype), torch.tensor(1.5).double()]) for row in values]
    ring = Ring(vectors)
    ring.run()
    ring.apply()
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
    ring.run()
    ring.apply()
    assert [vector.tensors[0].tolist() for vector in (vectors[0], vectors[2])] == [[3.0, 4.0]] * 2
    assert vectors[1].tensors[0][0] == 3.0
    assert average([np.ones(2), np.ones(2)], [0.0, 0.0])[1] == 0.0


def test_a_silent_sender_is_banned() -> None:
    """The others end with their own mean when its time is over; not a moment before."""
    vectors = [Vector(tensors(rank, torch.float64)) for rank in range(4)]
    before = [flat(vector) for vector in vectors]
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
    ring.apply()
    mine = np.mean(before[:3], axis=0)
    for rank in range(3):
        changed = flat(vectors[rank]) != before[rank]
        np.testing.assert_allclose(flat(vectors[rank])[changed], mine[changed], atol=1e-12)
        assert changed.mean() == pytest.approx(ring.members[rank].received, abs=0.05)
        assert changed.mean() > 0.5
    assert (flat(vectors[3]) == before[3]).sum() > 0


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


def test_who_was_not_averaged_is_told_to_all() -> None:
    """A part that was damaged on its way to one reducer: its sender keeps local values there, and everybody knows."""
    vectors = [Vector(tensors(rank, torch.float64)) for rank in range(4)]
    before = [flat(vector) for vector in vectors]
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
    ring.run()
    ring.apply()
    share = damaged / vectors[0].count
    assert share > 0
    assert all(member.finished for member in ring.members)
    assert [member.received for member in ring.members] == [1.0, 1.0, 1.0, pytest.approx(1 - share)]
    assert [member.missing() for member in ring.members] == [{3: pytest.approx(share)}] * 3 + [{}]
    everyone, without = np.mean(before, axis=0), np.mean(before[:3], axis=0)
    for rank in range(3):
        after = flat(vectors[rank])
        of_all, of_rest = np.isclose(after, everyone), np.isclose(after, without)
        assert (of_all | of_rest).all()
        assert (~of_all).mean() == pytest.approx(share)
    assert (flat(vectors[3]) == before[3]).mean() == pytest.approx(share)


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
    ring.apply()
    own = ring.members[2].parts[2]
    assert asleep.received == pytest.approx(sum(part.stop - part.start for part in own) / 64)
    assert [set(member.missing()) for member in ring.members] == [{2}, {2}, set()]
