"""Words from and to ranks over a communicator of lists: order, damage, deaths."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried

from spawnsim.errors import RankFailed
from spawnsim.policies.averaging.messages import Foreign, Kind, Message, Unreadable, decode, encode
from spawnsim.policies.averaging.progress import AT_ONCE_NBYTES, Endpoint

LARGE = AT_ONCE_NBYTES + 1


class Landing:
    """A receive that is over after so many tests; it raises if its sender has died."""

    def __init__(self, tests: int, fill: Any) -> None:
        self.tests, self._fill = tests, fill

    def Test(self) -> bool:
        self.tests -= 1
        if self.tests > 0:
            return False
        self._fill()
        return True


class Wire:
    """A communicator of rank 0 with messages that have arrived: (source, bytes, tests until a receive is over)."""

    def __init__(self, messages: list[tuple[int, np.ndarray, int]], dead: tuple[int, ...] = ()) -> None:
        self.arrived, self.dead = deque(messages), dead

    def Get_rank(self) -> int:
        return 0

    def Iprobe(self, _source: int, _tag: int, status: Any) -> bool:
        if self.arrived:
            status.Set_source(self.arrived[0][0])
            status.Get_count = lambda: self.arrived[0][1].size
            self._status = status
        return bool(self.arrived)

    def Recv(self, buffer: np.ndarray, source: int, _tag: int) -> None:
        assert source == self.arrived[0][0]
        buffer[:] = self.arrived.popleft()[1]

    def Irecv(self, buffer: np.ndarray, source: int, _tag: int) -> Landing:
        assert source == self.arrived[0][0]
        _, message, tests = self.arrived.popleft()

        def fill() -> None:
            if source in self.dead:
                raise RankFailed([source])
            buffer[:] = message

        return Landing(tests, fill)


class Glance:
    """A status."""

    def Set_source(self, source: int) -> None:
        self.source = source

    def Get_source(self) -> int:
        return self.source


def post_on(wire: Wire, **parameters: Any) -> Endpoint:
    """Return a post on a wire."""
    post = Endpoint(wire, 1, **parameters)  # type: ignore[arg-type]
    post._status = Glance()  # type: ignore[assignment]
    return post


def word(number: int, nbytes: int) -> Message:
    """Return a word of so many bytes and some more."""
    return Message(Kind.PART, number, body=np.full(nbytes, number % 251, np.uint8))


@tried(60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([0, 8, LARGE, 3 * LARGE]), st.integers(1, 5)),
        max_size=25,
    )
)
def test_words_of_a_rank_never_overtake(sent: list[tuple[int, int, int]]) -> None:
    """Whatever completes first: each rank's words come in the order in which it sent them, none is lost."""
    wire = Wire([(source, encode(word(n, nbytes)), tests) for n, (source, nbytes, tests) in enumerate(sent)])
    post = post_on(wire)
    came: list[tuple[int, Message]] = []
    for _ in range(sum(tests for _, _, tests in sent) + 1):
        came += post.poll()
    for source in (1, 2, 3):
        numbers = [each.number for rank, each in came if rank == source]
        assert numbers == [n for n, (rank, _, _) in enumerate(sent) if rank == source]
    assert all(each.body.size == sent[each.number][1] for _, each in came)


def test_a_small_word_waits_for_the_large_one_before_it() -> None:
    """And not for those of other ranks."""
    messages = [(1, word(0, LARGE), 3), (1, word(1, 0), 1), (2, word(2, 0), 1)]
    post = post_on(Wire([(source, encode(each), tests) for source, each, tests in messages]))
    assert [[each.number for _, each in post.poll()] for _ in range(4)] == [[2], [], [0, 1], []]


def test_a_sender_that_dies_on_the_way_harms_no_other() -> None:
    """Its half message is dropped, and the rank is known to be dead."""
    messages = [(1, word(0, LARGE), 2), (2, word(1, LARGE), 2)]
    post = post_on(Wire([(source, encode(each), tests) for source, each, tests in messages], dead=(1,)))
    post.poll()
    assert [(source, each.number) for source, each in post.poll()] == [(2, 1)]
    assert post.failed == {1}
    assert post.counts["unreadable"] == 0


@pytest.mark.parametrize("nbytes", [0, 5, 4096, 70_000])
@pytest.mark.parametrize("meta", [None, ("key", 3)])
def test_words_come_back_as_they_were(nbytes: int, meta: Any) -> None:
    """In every size, with and without an object."""
    sent = Message(Kind.DELTA, 2**60, 7, 0.25, True, meta, np.arange(nbytes).astype(np.uint8))
    came = decode(encode(sent, 9), 9)
    assert (came.kind, came.number, came.part, came.value, came.raw, came.meta) == (
        sent.kind, sent.number, sent.part, sent.value, sent.raw, sent.meta,
    )  # fmt: skip
    assert not came.damaged
    np.testing.assert_array_equal(came.body, sent.body)


@tried(80)
@given(st.sampled_from([0, 64, 5000]), st.booleans(), st.integers(0, 2**20), st.integers(0, 7))
def test_every_flipped_bit_is_noticed(nbytes: int, with_meta: bool, place: int, bit: int) -> None:
    """In the head: nothing can be read. In the body: the word comes without it."""
    buffer = encode(
        Message(Kind.PART, 5, 1, 2.0, meta=(1, "x") if with_meta else None, body=np.ones(nbytes, np.uint8))
    )
    place %= buffer.size
    buffer[place] ^= 1 << bit
    head_nbytes = buffer.size - nbytes
    try:
        came = decode(buffer)
    except Unreadable:
        assert place < head_nbytes
    else:
        padding = with_meta and place >= 48  # bytes between object and body mean nothing
        assert place >= head_nbytes or padding
        assert came.damaged == (place >= head_nbytes)
        assert (came.kind, came.number, came.part, came.value) == (Kind.PART, 5, 1, 2.0)
        assert came.body.size == (0 if came.damaged else nbytes)


def test_damage_and_strangers_are_counted() -> None:
    """Words of another channel, torn ones and other programs' bytes are dropped; a damaged body is told."""
    torn = encode(word(1, 64))
    torn[3] ^= 1
    damaged = encode(word(2, 64))
    damaged[-1] ^= 1
    others = [encode(word(3, 0), 77), np.zeros(200, np.uint8), np.zeros(3, np.uint8)]
    post = post_on(Wire([(1, buffer, 1) for buffer in (torn, damaged, *others)]))
    assert [(each.number, each.damaged) for _, each in post.poll()] == [(2, True)]
    assert (post.counts["unreadable"], post.counts["damaged"], post.counts["foreign"]) == (3, 1, 1)
    with pytest.raises(Foreign):
        decode(others[0])
