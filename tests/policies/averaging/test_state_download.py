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


@pytest.mark.parametrize("seed", range(3))
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
    """And without a time limit nobody waits for one that may come; with one, everybody does."""

    def main(comm: Any) -> Any:
        averager = sharer_of(comm, allow_state_sharing=False)
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
        return int(loading.result()[1][0].item()), comm.clock.now() - began_s

    rank, waited_s = play(main, 2)[0]
    assert rank == 1
    assert waited_s < 1.0


def test_the_state_that_comes_by_default() -> None:
    """The group key's bits, and the averaged tensors as they are at that moment."""

    def main(comm: Any) -> Any:
        averager = sharer_of(comm, initial_group_bits=format(comm.rank, "02b"))
        averager.state_sharing_priority = float(comm.rank)
        comm.clock.sleep(0.5)
        if comm.rank == 0:
            metadata, [tensor] = averager.load_state_from_peers()
            return metadata, tensor.item()
        comm.clock.sleep(0.5)
        return None

    assert play(main, 3)[0] == ({"group_key": "10"}, 2.0)


class Described(DecentralizedAverager):
    """Shares a small and a large tensor; says what they are."""

    def get_current_state(self) -> Any:
        tensors = [torch.linspace(0, 1, 10), torch.linspace(0, 1, 5000), torch.arange(3)]
        roles = (TensorRole.PARAMETER, TensorRole.OPTIMIZER, TensorRole.UNSPECIFIED)
        return (
            "m",
            tensors,
            [
                CompressionInfo.from_tensor(t, n, role)
                for n, (t, role) in enumerate(zip(tensors, roles, strict=True))
            ],
        )


def test_a_state_is_read_as_its_donor_packed_it() -> None:
    """Compressed by size, by a donor whose setting the newcomer does not share."""

    def main(comm: Any) -> Any:
        compression = SizeAdaptiveCompression(1000, "none", Uniform8Bit()) if comm.rank else None
        averager = Described(
            [torch.zeros(1)], comm, prefix="t", start=True, state_compression=compression,
            part_size_bytes=512 * (1 + comm.rank), **QUICK,
        )  # fmt: skip
        comm.clock.sleep(0.5)
        if comm.rank == 0:
            return averager.load_state_from_peers()
        comm.clock.sleep(0.5)
        return None

    metadata, (small, large, whole) = play(main, 2)[0]
    assert metadata == "m"
    assert torch.equal(small, torch.linspace(0, 1, 10))
    assert torch.equal(whole, torch.arange(3))
    error = (large - torch.linspace(0, 1, 5000)).abs().max()
    assert 0 < error < 0.05


@pytest.mark.parametrize("fault", ["corrupt:3>0@0.4s+1s,1", "drop:3>0@0.4s+1s,1"])
def test_a_donor_whose_words_do_not_arrive_is_passed_over(fault: str) -> None:
    """The next one gives its state, whole."""

    def main(comm: Any) -> Any:
        averager = Numbers(comm, prefix="t", start=True, next_chunk_timeout=0.2, **QUICK)
        averager.state_sharing_priority = float(comm.rank)
        comm.clock.sleep(0.5)
        if comm.rank == 0:
            return averager.load_state_from_peers(timeout=2.0)
        comm.clock.sleep(1.0)
        return None

    metadata, [tensor] = play(main, 4, faults=fault)[0]
    assert metadata == 2
    assert torch.equal(tensor, torch.full((100_000,), 2.0))


class Numbers(DecentralizedAverager):
    """Shares many numbers."""

    def __init__(self, comm: Any, **parameters: Any) -> None:
        super().__init__([torch.zeros(1)], comm, **parameters)

    def get_current_state(self) -> Any:
        return self.rank, [torch.full((100_000,), float(self.rank))]
