"""Downloads of state: from whom, of what, and when there is none to be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies.averaging.averagers import QUICK, averager_of, play

from spawnsim.policies.averaging import (
    CompressionInfo,
    DecentralizedAverager,
    SizeAdaptiveCompression,
    TensorRole,
)
from spawnsim.policies.state.codecs import Uniform8Bit


def sharer_of(comm: Any, **parameters: Any) -> DecentralizedAverager:
    """Return an averager in the background of one tensor that holds the rank's number."""
    return averager_of(comm, float(comm.rank), 1, **({"start": True} | parameters))


class Sharing(DecentralizedAverager):
    """Shares a given state, with descriptions of its tensors, and counts how often."""

    def __init__(self, comm: Any, state: tuple[Any, list[torch.Tensor]], **parameters: Any) -> None:
        self.state, self.calls = state, 0
        super().__init__([torch.zeros(1)], comm, **({"start": True, "prefix": "t"} | QUICK | parameters))

    def get_current_state(self) -> Any:
        self.calls += 1
        roles = (TensorRole.PARAMETER, TensorRole.OPTIMIZER, TensorRole.UNSPECIFIED)
        pairs = enumerate(zip(self.state[1], roles, strict=False))
        return *self.state, [CompressionInfo.from_tensor(t, n, role) for n, (t, role) in pairs]


@pytest.mark.parametrize("seed", range(2))
def test_the_donor_is_who_has_the_highest_priority_now(seed: int) -> None:
    """Changed priorities, and donors that come and go, count from the next download on: no old list is used."""
    plan = [  # at each second: new priorities, None for those who share nothing any more; who then has the best
        ({0: 3.0, 1: 4.0, 2: 5.0, 3: 4.5}, 3), ({0: 10.0}, 0), ({0: 0.0, 3: None}, 1), ({1: 0.5, 0: 2.0}, 0),
        ({3: 1.0, 0: None}, 3), ({0: None, 1: None, 3: None}, None),
    ]  # fmt: skip

    def main(comm: Any) -> list[Any]:
        averager, got = sharer_of(comm), []
        for second, (changes, _) in enumerate(plan):
            if comm.rank in changes:
                averager.allow_state_sharing = changes[comm.rank] is not None
                averager.state_sharing_priority = changes[comm.rank] or 0.0
            comm.clock.sleep(second + 0.5 - comm.clock.now())
            if comm.rank == 2:
                found = averager.load_state_from_peers(timeout=0.3)
                got.append(found and int(found[1][0].item()))
            comm.clock.sleep(second + 1.0 - comm.clock.now())
        averager.shutdown()
        return got

    assert play(main, 4, seed=seed)[2] == [best for _, best in plan]


def test_without_donors_there_is_no_state_at_once() -> None:
    """And without a time limit nobody waits for one that may come; with one, everybody does. Bits come with it."""

    def main(comm: Any) -> Any:
        averager = sharer_of(comm, allow_state_sharing=False, initial_group_bits=format(comm.rank, "02b"))
        comm.clock.sleep(0.5)
        if comm.rank:
            comm.clock.sleep(0.5)
            averager.allow_state_sharing = True
            comm.clock.sleep(3.0)
            return None
        began_s = comm.clock.now()
        assert averager.load_state_from_peers() is None
        assert comm.clock.now() - began_s < 0.05
        loading = averager.load_state_from_peers(wait=False, timeout=2.0)
        assert not loading.done()
        assert loading.result() == ({"group_key": "01"}, [torch.tensor([1.0])])
        return comm.clock.now() - began_s

    assert play(main, 2)[0] < 1.0


def test_a_state_is_a_copy_of_the_donors_at_that_moment() -> None:
    """Made once for each download, of any dtype; later changes show in the next one alone."""
    shared = ({"x": 123}, [torch.randn(3), torch.randint(0, 5, (3,)), torch.ones(2).bfloat16()])
    donors: list[Sharing] = []

    def main(comm: Any) -> None:
        averager = Sharing(comm, shared)
        if comm.rank == 0:
            donors.append(averager)
            comm.clock.sleep(5.0)
            return
        comm.clock.sleep(0.5)
        [donor] = donors
        assert donor.calls == 0
        metadata, tensors = averager.load_state_from_peers()
        assert (donor.calls, metadata) == (1, {"x": 123})
        assert all(torch.equal(got, given) for got, given in zip(tensors, shared[1], strict=True))
        shared[0]["y"], shared[1][1][2] = 123, 9
        assert (metadata, tensors[1][2] == 9) == ({"x": 123}, False)
        metadata, tensors = averager.load_state_from_peers()
        assert (donor.calls, metadata, tensors[1][2]) == (2, {"x": 123, "y": 123}, 9)

    play(main, 2)


def test_a_state_is_read_as_its_donor_packed_it() -> None:
    """Compressed by size, by a donor whose setting the newcomer does not share."""
    sent = [torch.linspace(0, 1, 10), torch.linspace(0, 1, 5000), torch.arange(3)]

    def main(comm: Any) -> Any:
        compression = SizeAdaptiveCompression(1000, "none", Uniform8Bit()) if comm.rank else None
        parts = {"state_compression": compression, "part_size_bytes": 512 * (1 + comm.rank)}
        averager = Sharing(comm, ("m", sent), **parts)
        comm.clock.sleep(0.5)
        if comm.rank == 0:
            return averager.load_state_from_peers()
        comm.clock.sleep(0.5)
        return None

    metadata, (small, large, whole) = play(main, 2)[0]
    assert metadata == "m"
    assert torch.equal(small, sent[0])
    assert torch.equal(whole, sent[2])
    assert 0 < (large - sent[1]).abs().max() < 0.05


@pytest.mark.parametrize(
    "fault",
    [
        "corrupt:3>0@0.4s+1s,1",
        "corrupt:3>0@0.4s+1s,0.3",
        "drop:3>0@0.4s+1s,1",
        "crash:3@0.5s",
        "pause:3@0.45s+3s",
    ],
)
def test_a_donor_whose_words_do_not_arrive_is_passed_over(fault: str) -> None:
    """The next one gives its state, whole, after a chunk's time-out at most."""

    def main(comm: Any) -> Any:
        state = comm.rank, [torch.full((100_000,), float(comm.rank))]
        averager = Sharing(comm, state, next_chunk_timeout=0.2, part_size_bytes=2**14)
        averager.state_sharing_priority = float(comm.rank)
        comm.clock.sleep(0.5)
        if comm.rank == 0:
            return averager.load_state_from_peers(timeout=2.0)
        comm.clock.sleep(1.0)
        return None

    metadata, [tensor] = play(main, 4, faults=fault)[0]
    assert metadata == 2
    assert torch.equal(tensor, torch.full((100_000,), 2.0))
