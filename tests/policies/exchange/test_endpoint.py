"""Messages and the endpoint that carries them, over a communicator of lists: order, damage, deaths, buffers."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried

import spawnsim
from spawnsim.errors import RankFailed
from spawnsim.models.network import Hockney, Switch
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncServerPolicy,
    DecoupledDiLoCoPolicy,
    ServerOptions,
    ServerRule,
    SpawnPolicy,
    WAGMAPolicy,
)
from spawnsim.policies.averaging.butterfly import Group, Member, Role
from spawnsim.policies.averaging.directory import chunks, rebuild
from spawnsim.policies.averaging.matchmaking import Search, SearchTerms
from spawnsim.policies.exchange.endpoint import AT_ONCE_NBYTES, Endpoint
from spawnsim.policies.exchange.messages import (
    HEADER_NBYTES,
    Foreign,
    Kind,
    Message,
    Unreadable,
    body_at,
    decode,
    encode,
)
from spawnsim.workloads.mlp import without_data

LARGE = AT_ONCE_NBYTES + 1


class SlowRequest:
    """A request that is over after so many tests; `fill` then completes it, or raises."""

    def __init__(self, tests: int, fill: Any = lambda: None) -> None:
        self.tests, self._fill = tests, fill

    def Test(self) -> bool:
        self.tests -= 1
        if self.tests > 0:
            return False
        self._fill()
        return True


class Wire:
    """A communicator of rank 0 with messages that have arrived: (source, bytes, tests until a receive is over)."""

    def __init__(self, messages: list[tuple[int, np.ndarray, int]] = [], dead: tuple[int, ...] = ()) -> None:  # noqa: B006
        self.arrived, self.dead = deque(messages), dead
        self.calls: list[str] = []
        self.acknowledged, self.clock = False, type("Clock", (), {})()

    def Get_rank(self) -> int:
        return 0

    def capabilities(self) -> Any:
        return type("Capabilities", (), {"survives": True, "backend": "mpi"})

    def Ack_failed(self) -> None:
        self.acknowledged = True

    def Isend(self, _buffer: np.ndarray, dest: int, _tag: int) -> SlowRequest:
        if dest in self.dead:
            raise RankFailed([dest])
        self.calls.append("Isend")
        return SlowRequest(3)

    def Iprobe(self, _source: int, tag: int, status: Any) -> bool:
        if self.dead and not self.arrived and not self.acknowledged:
            raise RankFailed(list(self.dead))
        if self.arrived:
            status.fill(self.arrived[0][0], tag, self.arrived[0][1].size)
        return bool(self.arrived)

    def Recv(self, buffer: np.ndarray, source: int, _tag: int) -> None:
        self.calls.append("Recv")
        assert source == self.arrived[0][0]
        buffer[:] = self.arrived.popleft()[1]

    def Irecv(self, buffer: np.ndarray, source: int, _tag: int) -> SlowRequest:
        self.calls.append("Irecv")
        assert source == self.arrived[0][0]
        _, message, tests = self.arrived.popleft()

        def fill() -> None:
            if source in self.dead:
                raise RankFailed([source])
            buffer[:] = message

        return SlowRequest(tests, fill)


def endpoint_on(wire: Wire, **parameters: Any) -> Endpoint:
    """Return an endpoint on a wire."""
    return Endpoint(wire, 1, **parameters)  # type: ignore[arg-type]


def part(number: int, nbytes: int) -> Message:
    """Return a message with a body of so many bytes."""
    return Message(Kind.PART, number, body=np.full(nbytes, number % 251, np.uint8))


@tried(60)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([0, 8, LARGE, 3 * LARGE]), st.integers(1, 5)),
        max_size=25,
    )
)
def test_messages_of_a_rank_never_overtake(sent: list[tuple[int, int, int]]) -> None:
    """Whatever completes first: each rank's messages come in the order in which it sent them, none is lost."""
    wire = Wire([(source, encode(part(n, nbytes)), tests) for n, (source, nbytes, tests) in enumerate(sent)])
    endpoint = endpoint_on(wire)
    came: list[tuple[int, Message]] = []
    for _ in range(sum(tests for _, _, tests in sent) + 1):
        came += endpoint.poll()
    for source in (1, 2, 3):
        numbers = [each.number for rank, each in came if rank == source]
        assert numbers == [n for n, (rank, _, _) in enumerate(sent) if rank == source]
    assert all(each.body.size == sent[each.number][1] for _, each in came)


def test_a_small_word_waits_for_the_large_one_before_it() -> None:
    """And not for those of other ranks."""
    messages = [(1, part(0, LARGE), 3), (1, part(1, 0), 1), (2, part(2, 0), 1)]
    endpoint = endpoint_on(Wire([(source, encode(each), tests) for source, each, tests in messages]))
    assert [[each.number for _, each in endpoint.poll()] for _ in range(4)] == [[2], [], [0, 1], []]


def test_a_sender_that_dies_on_the_way_harms_no_other() -> None:
    """Its half message is dropped, and the rank is known to be dead."""
    messages = [(1, part(0, LARGE), 2), (2, part(1, LARGE), 2)]
    endpoint = endpoint_on(
        Wire([(source, encode(each), tests) for source, each, tests in messages], dead=(1,))
    )
    endpoint.poll()
    assert [(source, each.number) for source, each in endpoint.poll()] == [(2, 1)]
    assert endpoint.failed == {1}
    assert endpoint.counts["unreadable"] == 0


@pytest.mark.parametrize("nbytes", [0, 5, 4096, 70_000])
@pytest.mark.parametrize("meta", [None, ("key", 3), b"", b"as it is" * 9])
def test_messages_come_back_as_they_were(nbytes: int, meta: Any) -> None:
    """In every size, with and without metadata, with numbers of 64 bits."""
    sent = Message(
        Kind.DELTA, 2**62, -(2**63), 7, 9, 0.25, 2**63 - 1, True, meta, np.arange(nbytes).astype(np.uint8), True
    )  # fmt: skip
    came = decode(encode(sent, 2**32 - 1), 2**32 - 1)
    names = ("kind", "number", "iteration", "part", "parts", "value", "settled", "expired", "meta", "raw")
    assert [getattr(came, name) for name in names] == [getattr(sent, name) for name in names]
    assert not came.damaged
    np.testing.assert_array_equal(came.body, sent.body)


@tried(80)
@given(
    st.sampled_from([0, 64, 5000]),
    st.sampled_from([None, (1, "x")]),
    st.integers(0, 2**20),
    st.integers(0, 7),
)
def test_every_flipped_bit_is_noticed(nbytes: int, meta: Any, place: int, bit: int) -> None:
    """In header or metadata: nothing can be read. In the body: the message comes without it."""
    buffer = encode(Message(Kind.PART, 5, part=1, value=2.0, meta=meta, body=np.ones(nbytes, np.uint8)))
    place %= buffer.size
    buffer[place] ^= 1 << bit
    if place < buffer.size - nbytes:
        with pytest.raises(Unreadable):
            decode(buffer)
    else:
        came = decode(buffer)
        assert (came.kind, came.number, came.part, came.value) == (Kind.PART, 5, 1, 2.0)
        assert came.damaged
        assert came.body.size == 0


@tried(80)
@given(st.binary(max_size=300))
def test_foreign_bytes_are_unreadable_not_fatal(data: bytes) -> None:
    """Whatever arrives under the tag either is a message or raises `Unreadable`."""
    with pytest.raises(Unreadable):
        decode(np.frombuffer(data, np.uint8))


def test_no_message_names_a_module_of_the_package() -> None:
    """Metadata is built of plain types: moving a file must not change the bytes of messages, and so virtual times."""
    member = Member(1, Role.CLIENT, 2.5, {"any": "object"})
    terms = SearchTerms("key", 7, (2.0, 1), member, 9.0, 3.0, lambda: 5, list, 2)
    asking, leading = Search(terms), Search(terms)
    asking.offer([(1.0, 0)], 0.0)
    leading.handle(2, Message(Kind.JOIN, 4, meta=((3.0, 2), "key", 7, Member(2).plain())), 0.0)
    state = list(chunks(1, ({"bits": "01"}, []), None, 100))
    sent = [message for _, message in (*asking.out, *leading.out)] + state
    assert {message.kind for message in sent} >= {Kind.JOIN, Kind.REPLY, Kind.BEGIN, Kind.STATE}
    for message in sent:
        assert b"spawnsim" not in encode(message).tobytes()
    group = Group(5, (member, Member(2)), "key")
    assert Group.of(pickle.loads(pickle.dumps(group.plain()))) == group
    assert rebuild(state) == ({"bits": "01"}, [])


def test_small_messages_cost_a_header() -> None:
    """And metadata is padded so that the body is aligned for every dtype."""
    assert encode(Message(Kind.LEAVE, 1)).size == HEADER_NBYTES == 64
    assert [body_at(nbytes) for nbytes in (0, 1, 64, 65)] == [64, 128, 128, 192]


def test_damage_and_strangers_are_counted() -> None:
    """Words of another channel, torn ones and other programs' bytes are dropped; a damaged body is told."""
    torn = encode(part(1, 64))
    torn[3] ^= 1
    damaged = encode(part(2, 64))
    damaged[-1] ^= 1
    others = [encode(part(3, 0), 77), np.zeros(200, np.uint8), np.zeros(3, np.uint8)]
    endpoint = endpoint_on(Wire([(1, buffer, 1) for buffer in (torn, damaged, *others)]))
    assert [(each.number, each.damaged) for _, each in endpoint.poll()] == [(2, True)]
    assert (endpoint.counts["unreadable"], endpoint.counts["damaged"], endpoint.counts["foreign"]) == (
        3,
        1,
        1,
    )
    with pytest.raises(Foreign):
        decode(others[0])


def test_sends_and_their_buffers_are_kept_until_complete() -> None:
    """Where that is wanted, so that memory is not used again too early."""
    endpoint = endpoint_on(Wire(), tracked=True)
    buffer = encode(part(1, 8))
    endpoint.send_packed(1, buffer)
    assert endpoint.is_sending(buffer)
    assert [endpoint.reap(), endpoint.unfinished, endpoint.reap(), endpoint.unfinished] == [
        False,
        1,
        False,
        1,
    ]
    assert [endpoint.reap(), endpoint.unfinished, endpoint.is_sending(buffer)] == [True, 0, False]


def test_small_messages_are_taken_at_once() -> None:
    """They came with the envelope that the probe found; larger ones are received over several polls."""
    wire = Wire([(1, encode(part(1, AT_ONCE_NBYTES - 64)), 1), (1, encode(part(2, AT_ONCE_NBYTES)), 3)])
    endpoint = endpoint_on(wire)
    assert [len(endpoint.poll()) for _ in range(4)] == [1, 0, 1, 0]


def test_a_small_message_behind_a_large_one_is_not_waited_for() -> None:
    """A card may let it in after the large one: what comes from others meanwhile is handed over."""
    wire = Wire([(1, encode(part(1, LARGE)), 4), (2, encode(part(2, 8)), 3), (3, encode(part(3, LARGE)), 2)])
    endpoint = endpoint_on(wire)
    assert [[source for source, _ in endpoint.poll()] for _ in range(4)] == [[], [3], [2], [1]]
    assert wire.calls == ["Irecv"] * 3


def test_messages_to_oneself_take_no_wire() -> None:
    """Torch refuses them, and MPI may block; here a rank is an ordinary receiver of its own messages."""
    wire = Wire()
    endpoint = endpoint_on(wire)
    assert endpoint.send(0, part(3, 8))
    assert endpoint.send_packed(0, encode(part(4, 8)))
    assert not wire.calls
    assert [(source, message.number) for source, message in endpoint.poll()] == [(0, 3), (0, 4)]


def test_a_dead_peer_is_counted_not_fatal() -> None:
    """Messages to it are undeliverable; a poll that meets its failure acknowledges it, and later polls find others."""
    wire = Wire(dead=(1,))
    endpoint = endpoint_on(wire)
    assert not endpoint.send(1, part(1, 8))
    assert endpoint.poll() == []
    assert (endpoint.counts["undeliverable"], endpoint.counts["peer failed"], endpoint.failed) == (1, 1, {1})
    wire.arrived.append((2, encode(part(2, 8)), 1))
    assert [source for source, _ in endpoint.poll()] == [2]


def test_an_idle_poll_is_one_probe() -> None:
    """On a virtual rank that is one event, whatever the number of ranks."""
    probes: list[int] = []

    def main(comm: Any) -> None:
        endpoint = Endpoint(comm, 1)
        real = endpoint._probe
        endpoint._probe = lambda *how: (probes.append(1), real(*how))[1]
        assert endpoint.poll() == []

    spawnsim.run(main, ranks=1)
    assert len(probes) == 1


BESIDE: dict[str, Callable[[], SpawnPolicy]] = {
    "server": lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0.0)), steps=6),
    "wagma": lambda: WAGMAPolicy(6),
    "decoupled": lambda: DecoupledDiLoCoPolicy(6, fragments=1),
    "clock": lambda: AsyncModelAveragePolicy("all", 120.0, background=True),
}


@pytest.mark.parametrize("policy", BESIDE)
def test_a_run_ends_with_its_last_exchange(policy: str) -> None:
    """Tasks beside training wait for messages that nobody sends any more: to stop them takes no time."""
    steps, step_s = 24, 0.02
    last_s: dict[int, float] = {}

    def main(comm: Any) -> None:
        model, optimizer = without_data(1000)
        chosen = BESIDE[policy]()
        for iteration in range(steps):
            with comm.compute(step_s):
                pass
            chosen(iteration, model, optimizer, group=comm)
        last_s[comm.rank] = comm.clock.now()
        chosen.shutdown()

    run = spawnsim.run(main, ranks=5, platform=Switch(Hockney(1e-6, 1e10)))
    assert max(last_s.values()) == pytest.approx(steps * step_s, abs=0.02)
    assert run.totals["virtual_seconds"] == pytest.approx(max(last_s.values()), abs=0.002)
    assert "warnings" not in run.what  # nothing is left unreceived
