"""Searches for groups without any communicator: a network of lists, delivered in any order of pairs."""

from __future__ import annotations

import itertools
import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.effort import tried

from spawnsim.policies.averaging.butterfly import Member
from spawnsim.policies.averaging.directory import DirectoryClient, DirectoryQuery, DirectoryShard, replicas
from spawnsim.policies.averaging.matchmaking import Reply, Search, SearchTerms
from spawnsim.policies.exchange.messages import Kind, Message


class Net:
    """Searches that exchange messages; each pair's messages stay in order, pairs take turns at random."""

    def __init__(
        self, places: dict[int, float], *, size: int | None, seed: int = 0, expires_s: float = 5.0
    ) -> None:
        self.numbers = itertools.count(1)
        self.rng = np.random.default_rng(seed)
        self.searches = {
            rank: Search(
                SearchTerms(
                    "key", 7, (place, rank), Member(rank), expires_s if math.isinf(place) else place, 3.0,
                    lambda: next(self.numbers), list, size, may_lead=not math.isinf(place),
                )
            )
            for rank, place in places.items()
        }  # fmt: skip
        self.wires: dict[tuple[int, int], deque[Message]] = {}
        self.absent: set[tuple[int, int]] = set()  # (rank, group) that a rank has declined

    def collect(self) -> None:
        for rank, search in self.searches.items():
            while search.out:
                dest, message = search.out.popleft()
                self.wires.setdefault((rank, dest), deque()).append(message)

    def run(self, now_s: float = 0.0) -> int:
        """Deliver until nothing is under way; return how many messages were delivered."""
        for count in range(100_000):
            self.collect()
            busy = [pair for pair, wire in self.wires.items() if wire]
            if not busy:
                return count
            source, dest = busy[self.rng.integers(len(busy))]
            message = self.wires[source, dest].popleft()
            if message.kind is Kind.ABSENT:
                self.absent.add((source, message.number))
            elif dest in self.searches:
                self.searches[dest].handle(source, message, now_s)
        pytest.fail("the searches never come to rest")

    def tick(self, now_s: float) -> None:
        for search in self.searches.values():
            search.tick(now_s)
        self.run(now_s)

    def follows(self) -> dict[int, int]:
        return {rank: search.leader for rank, search in self.searches.items() if search.leader is not None}


def circle(net: Net, order: list[int]) -> None:
    """Let each ask the next one, under stale places that make every request seem right."""
    for rank, leader in zip(order, order[1:] + order[:1], strict=True):
        net.searches[rank].offer([(-1.0, leader)], 0.0)


@pytest.mark.parametrize("length", [2, 3, 4, 7])
def test_no_circle_of_waiting(length: int) -> None:
    """A asks B, …, asks A: all come to rest at once, without any time-out, and someone leads."""
    for seed in range(20):
        net = Net(dict.fromkeys(range(length), 5.0), size=None, seed=seed)
        circle(net, list(np.random.default_rng(seed).permutation(length)))
        net.run()
        follows = net.follows()
        assert all((5.0, leader) < (5.0, rank) for rank, leader in follows.items())
        assert len(follows) < length
        assert sum(search.counts["silent leaders"] for search in net.searches.values()) == 0


@tried(80)
@given(
    st.integers(2, 12), st.one_of(st.none(), st.integers(2, 6)), st.integers(0, 2**32), st.booleans(),
)  # fmt: skip
def test_groups_are_disjoint_and_agreed(count: int, size: int | None, seed: int, clients: bool) -> None:
    """Whatever the order: each ends in one group at most, and declines any other that names it; none is too large."""
    rng = np.random.default_rng(seed)
    ranks = range(count)
    places = {r: math.inf if clients and r % 4 == 3 else float(rng.choice([4.0, 5.0, 6.0])) for r in ranks}
    net = Net(places, size=size, seed=seed)
    everybody = [(place, rank) for rank, place in places.items()]
    for rank in rng.permutation(count):
        net.searches[rank].offer([p for p in everybody if rng.random() < 0.8 and p[1] != rank], 0.0)
    net.run()
    for now_s in (4.0, 5.0, 6.0, 9.0, 12.0):
        net.tick(now_s)
    formed = {rank: search.group for rank, search in net.searches.items() if search.group is not None}
    assert all(search.ended for search in net.searches.values())
    for rank, group in formed.items():
        assert rank in group.ranks
        assert 2 <= len(group.ranks) <= (size or count)
    led = {search.group.number: search.group for search in net.searches.values() if search.led}
    assert {group.number for group in formed.values()} == set(led)
    for number, group in led.items():  # who is named but has gone on has said so
        gone = [r for r in group.ranks if r not in formed or formed[r].number != number]
        assert all((rank, number) in net.absent for rank in gone)


def test_all_find_each_other() -> None:
    """Ten that know of each other become one group at the earliest expiration."""
    net = Net({rank: 5.0 + rank for rank in range(10)}, size=None)
    for rank, search in net.searches.items():
        search.offer([(5.0 + other, other) for other in range(10) if other != rank], 0.0)
    net.run()
    net.tick(5.0)
    assert {search.group for search in net.searches.values() if search.group} == {net.searches[0].group}
    assert sorted(net.searches[9].group.ranks) == list(range(10))


def request(rank: int = 5, place: float = 9.0, key: str = "key", schema: int = 7) -> Message:
    """Return a join request."""
    return Message(Kind.JOIN, 99, meta=((place, rank), key, schema, Member(rank).plain()))


@pytest.mark.parametrize(
    ("message", "reply"),
    [
        (request(), Reply.ACCEPTED),
        (request(key="other"), Reply.BAD_GROUP_KEY),
        (request(schema=8), Reply.BAD_SCHEMA_HASH),
        (request(place=1.0), Reply.BAD_EXPIRATION_TIME),
        (request(rank=6), Reply.PROTOCOL_VIOLATION),
        (Message(Kind.JOIN, 99, meta="?"), Reply.PROTOCOL_VIOLATION),
    ],
)
def test_replies(message: Message, reply: Reply) -> None:
    """A leader says why not."""
    [search] = Net({0: 5.0}, size=3).searches.values()
    search.handle(5, message, 0.0)
    assert search.out.pop()[1].part == reply


def test_more_replies() -> None:
    """Who asks twice is accepted twice, as one follower; followers redirect; an ended search says so, a client too."""
    net = Net({0: 5.0, 1: 5.0, 9: math.inf}, size=3)
    zero, one, client = net.searches.values()
    zero.handle(5, request(), 0.0)
    zero.handle(5, request(), 0.0)
    assert zero.out.pop()[1].part == Reply.ACCEPTED
    assert list(zero.followers) == [5]
    one.offer([(5.0, 0)], 0.0)
    one.handle(5, request(), 0.0)
    net.run()
    assert zero.group is not None
    assert one.group == zero.group
    one.handle(6, request(6), 0.0)
    assert one.out.pop()[1].part == Reply.NOT_LOOKING_FOR_GROUP
    client.handle(6, request(6), 0.0)
    assert client.out.pop()[1].part == Reply.NOT_DECLARED


def test_a_group_is_formed_once() -> None:
    """Requests that come with the last member's, in one poll, do not make a second group."""
    [search] = Net({0: 5.0}, size=2).searches.values()
    for rank in (5, 6, 7):
        search.handle(rank, request(rank), 0.0)
    assert search.group.ranks == (0, 5)
    assert sum(message.kind is Kind.BEGIN for _, message in search.out) == 1


@pytest.mark.parametrize("reply", [Reply.ACCEPTED, Reply.GROUP_IS_FULL, None])
def test_a_full_group_is_formed_when_the_open_request_is_answered(reply: Reply | None) -> None:
    """The asked leader may have counted this rank in already, and would begin a group that it declines."""
    net = Net(dict.fromkeys(range(4), 5.0), size=3)
    search = net.searches[1]
    search.offer([(5.0, 0)], 0.0)
    asked = search.out.pop()[1]
    for rank in (2, 3):
        net.searches[rank].offer([(5.0, 1)], 0.0)
        search.handle(rank, net.searches[rank].out.pop()[1], 0.0)
    assert not search.ended
    assert len(search.followers) == 2
    if reply is None:  # the leader is silent
        search.tick(3.0)
    else:
        search.handle(0, Message(Kind.REPLY, asked.number, part=reply, meta=5.0), 0.1)
    if reply is Reply.ACCEPTED:
        assert (search.group, search.leader, search.followers) == (None, 0, {})
    else:
        assert search.group is not None
        assert sorted(search.group.ranks) == [1, 2, 3]


def test_a_silent_leader_is_given_up() -> None:
    """After `request_timeout`; the next candidate before this rank is asked, and the late answer is declined."""
    [search] = Net({5: 9.0}, size=2).searches.values()
    search.offer([(9.5, 7)], 0.0)
    assert not search.out
    search.offer([(1.0, 1), (2.0, 2)], 0.0)
    first = search.out.popleft()[1]
    search.tick(3.0)
    assert [(dest, message.kind) for dest, message in search.out] == [(1, Kind.LEAVE), (2, Kind.JOIN)]
    search.out.clear()
    search.handle(1, Message(Kind.REPLY, first.number, part=Reply.ACCEPTED, meta=9.0), 3.1)
    assert [(dest, message.kind) for dest, message in search.out] == [(1, Kind.LEAVE)]


def test_a_follower_sends_its_own_followers_on() -> None:
    """Whoever finds a better leader disbands, with a hint whom to ask."""
    net = Net({0: 5.0, 1: 6.0, 2: 7.0}, size=None)
    net.searches[2].offer([(6.0, 1)], 0.0)
    net.run()
    net.searches[1].offer([(5.0, 0)], 0.0)
    net.run()
    assert net.follows() == {1: 0, 2: 0}


# ------------------------------------------------------------------------------------------------------ directory
def declare(
    shard: DirectoryShard, rank: int, place: float, now_s: float = 0.0, until_s: float = 9.0
) -> list[tuple[int, Message]]:
    """Declare, and return what the replica sends."""
    return shard.handle(rank, Message(Kind.DECLARE, 0, part=1, meta=("k", (rank, place, until_s))), now_s)


def test_declare_renew_leave() -> None:
    """A declaration is listed until it runs out or is taken back; renewing changes its place."""
    shard = DirectoryShard()
    declare(shard, 3, 5.0)
    declare(shard, 4, 2.0, until_s=3.0)
    assert [entry.rank for entry in shard.find("k", 1.0)] == [4, 3]
    assert [entry.rank for entry in shard.find("k", 4.0)] == [3]
    declare(shard, 3, 8.0)
    assert shard.find("k", 4.0)[0].place == 8.0
    shard.handle(3, Message(Kind.DECLARE, 0, meta=("k", False)), 4.0)
    assert shard.find("k", 4.0) == shard.find("unknown", 4.0) == []
    assert shard.entries == {}


def test_news_of_an_earlier_place() -> None:
    """Those who declared before hear of one whom they should ask."""
    shard = DirectoryShard()
    declare(shard, 3, 5.0)
    assert [dest for dest, _ in declare(shard, 4, 6.0)] == [4]
    assert [dest for dest, _ in declare(shard, 5, 1.0)] == [3, 4, 5]


def test_a_silent_replica_is_replaced() -> None:
    """After the time-out the asker declares to another one, and trusts it again when it answers."""
    asker = DirectoryClient(0, 50, 3.0)
    first = [dest for dest, _ in asker.ask("k", 0.0)]
    assert first == replicas("k", 50)
    asker.handle(first[0], Message(Kind.LISTED, 0, meta=("k", [(7, 1.0, 9.0)])))
    assert [entry.rank for entry in asker.known("k", 0.0)] == [7]
    assert asker.tick(3.0) == {"k"}
    assert [dest for dest, _ in asker.ask("k", 3.0)] == replicas("k", 50, {first[1]})
    asker.handle(first[1], Message(Kind.LISTED, 0, meta=("k", [])))
    assert not asker.suspects


def test_a_question_hears_its_replicas_alone() -> None:
    """Of two declarations of one rank the later one holds; answers to another question are not this one's."""
    query = DirectoryQuery(DirectoryClient(0, 50, 3.0), "k", 7, 0.0)
    first, second = (dest for dest, _ in query.messages)
    listed = [(4, 1.0, 5.0, "old"), (0, 1.0, 9.0, "own"), (6, 2.0, 3.0, "expired")]
    query.handle(first, Message(Kind.LISTED, 7, meta=("k", listed)))
    query.handle(second, Message(Kind.LISTED, 8, meta=("k", [])))
    assert not query.over(2.9)
    query.handle(second, Message(Kind.LISTED, 7, meta=("k", [(4, 1.0, 8.0, "new")])))
    assert query.over(2.9)
    assert [(entry.rank, entry.value) for entry in query.entries(4.0)] == [(4, "new")]
