"""Post between ranks: nothing waits, nothing is dropped that is under way."""

from __future__ import annotations

from typing import Any

import numpy as np

import spawnsim
from spawnsim.errors import RankFailed
from spawnsim.policies.exchange.endpoint import AT_ONCE_NBYTES, Mailbox


class Slow:
    """A request that is over at its third test."""

    def __init__(self) -> None:
        self.tests = 0

    def Test(self) -> bool:
        self.tests += 1
        return self.tests >= 3


class Post:
    """As much of a communicator as a mailbox asks of it: one message waits, requests are slow."""

    def __init__(self, nbytes: int = 0, *, dead: bool = False) -> None:
        self.nbytes, self.dead, self.sent, self.calls = nbytes, dead, [], []

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Isend(self, buf: Any, dest: int, tag: int) -> Slow:
        if self.dead:
            raise RankFailed([dest])
        self.sent.append(Slow())
        return self.sent[-1]

    def Iprobe(self, source: int, tag: int, status: Any) -> bool:
        if self.dead:
            raise RankFailed([1])
        found, self.nbytes = self.nbytes, 0
        if found:
            status.fill(1, tag, found)
        return bool(found)

    def Recv(self, buf: Any, source: int, tag: int) -> None:
        self.calls.append("Recv")

    def Irecv(self, buf: Any, source: int, tag: int) -> Slow:
        self.calls.append("Irecv")
        return Slow()


def data(nbytes: int = 8) -> np.ndarray:
    """Return so many bytes."""
    return np.zeros(nbytes, np.uint8)


def test_sends_and_their_buffers_are_kept_until_complete() -> None:
    """A dropped handle loses messages on gloo and corrupts them on MPI; here it stays until it is over."""
    box = Mailbox(Post(), 1)
    box.send(1, data())
    assert [box.reap(), box.unfinished, box.reap(), box.unfinished] == [False, 1, False, 1]
    assert [box.reap(), box.unfinished] == [True, 0]


def test_large_messages_are_received_without_waiting() -> None:
    """What may come by rendezvous is received in the background, over several polls."""
    comm = Post(AT_ONCE_NBYTES + 1)
    box = Mailbox(comm, 1)
    assert [len(box.poll()) for _ in range(4)] == [0, 0, 1, 0]
    assert comm.calls == ["Irecv"]


def test_small_messages_are_taken_at_once() -> None:
    """They came with the envelope that the probe found."""
    comm = Post(AT_ONCE_NBYTES)
    assert [source for source, _ in Mailbox(comm, 1).poll()] == [1]
    assert comm.calls == ["Recv"]


def test_messages_to_oneself_take_no_wire() -> None:
    """Torch refuses them, and MPI may block; here a rank is an ordinary receiver of its own messages."""
    comm = Post()
    box = Mailbox(comm, 1)
    box.send(0, data())
    assert not comm.sent
    assert [source for source, _ in box.poll()] == [0]


def test_a_dead_peer_is_counted_not_fatal() -> None:
    """Messages to it are undeliverable, and a poll that meets its failure finds nothing."""
    box = Mailbox(Post(dead=True), 1)
    box.send(1, data())
    assert box.poll() == []
    assert (box.counts["undeliverable"], box.counts["peer failed"]) == (1, 1)


def test_an_idle_poll_is_one_probe() -> None:
    """On a virtual rank that is one event, whatever the number of ranks."""
    probes: list[int] = []

    def main(comm: Any) -> None:
        box = Mailbox(comm, 1)
        real = box._probe
        box._probe = lambda *how: (probes.append(1), real(*how))[1]
        assert box.poll() == []

    spawnsim.run(main, ranks=1)
    assert len(probes) == 1
