"""What hivemind's suite checks of averaging, by the same numbers, on virtual ranks with averagers in the background.

Properties and parameters are those of its `test_averaging.py` and `test_allreduce_fault_tolerance.py`; the programs are
ours. Its tests play all peers from one process; here each rank is a peer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.policies.averaging import AveragingFailed, DecentralizedAverager, Stage
from spawnsim.policies.averaging.directory import DirectoryClient, DirectoryShard, Entry
from spawnsim.policies.averaging.vector import element_counts
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing

QUICK = {"min_matchmaking_time": 0.5, "request_timeout": 0.3, "start": True}


def play(main: Callable[[Any], Any], ranks: int) -> list[Any]:
    """Run a program; return what it returned, by rank."""
    returned: dict[int, Any] = {}

    def kept(comm: Any) -> None:
        returned[comm.rank] = main(comm)

    spawnsim.run(kept, ranks=ranks, platform="ethernet-10g", seed=11)
    return [returned[rank] for rank in range(ranks)]


def averager_of(tensors: Sequence[torch.Tensor], comm: Any, **parameters: Any) -> DecentralizedAverager:
    """Return an averager with quick times."""
    return DecentralizedAverager(
        tensors, comm, **({"start": False, "prefix": "mygroup"} | QUICK | parameters)
    )


def tensors_of(rank: int) -> list[torch.Tensor]:
    """Return one of four unlike peers' tensors."""
    generator = torch.Generator().manual_seed(rank)
    normal, uniform = torch.randn(123, generator=generator), torch.rand(123, generator=generator)
    return [
        [normal, torch.zeros(3)], [uniform, torch.ones(3)], [-uniform, torch.arange(3.0)],
        [normal**3, torch.arange(3.0) / 2],
    ][rank]  # fmt: skip


@pytest.mark.parametrize(
    ("clients", "auxiliaries"), [(c, a) for c in range(3) for a in range(3)] + [(0, 4), (1, 3), (0, 3)]
)
def test_allreduce_once(clients: int, auxiliaries: int) -> None:
    """Four peers in some roles: the mean of those that send, to 1e-6, and all are in the result."""
    roles = np.random.default_rng(clients + 3 * auxiliaries).permutation(4)

    def main(comm: Any) -> Any:
        place, tensors = int(roles[comm.rank]), tensors_of(comm.rank)
        client, helps = place < clients, clients <= place < clients + auxiliaries
        averager = averager_of(tensors, comm, target_group_size=4, client_mode=client, auxiliary=helps)
        result = averager.step()
        comm.clock.sleep(0.2)
        averager.shutdown()
        return helps, sorted(result), tensors

    returned = play(main, 4)
    assert all(ranks == [0, 1, 2, 3] for _, ranks, _ in returned)
    senders = [tensors_of(rank) for rank in range(4) if not returned[rank][0]]
    for helps, _, tensors in returned:
        for index, tensor in enumerate(tensors):
            if not helps:
                mean = sum(each[index] for each in senders) / len(senders)
                torch.testing.assert_close(tensor, mean, rtol=0, atol=1e-6)


def test_allreduce_weighted() -> None:
    """Two clients, two nodes, random weights: the weighted mean to 1e-6."""
    weights = np.random.default_rng(3).uniform(0.01, 10, 4)

    def main(comm: Any) -> Any:
        tensors = tensors_of(comm.rank)
        averager = averager_of(tensors, comm, target_group_size=4, client_mode=comm.rank % 2 == 1)
        averager.step(weight=float(weights[comm.rank]))
        comm.clock.sleep(0.2)
        return tensors

    for tensors in play(main, 4):
        for index, tensor in enumerate(tensors):
            total = sum(
                float(weight) * tensors_of(rank)[index].double() for rank, weight in enumerate(weights)
            )
            torch.testing.assert_close(tensor.double(), total / weights.sum(), rtol=1e-6, atol=1e-6)


def test_allreduce_grid() -> None:
    """Eight peers in pairs, two bits: the mean stays, spread never grows in three rounds, and is 0 from then on."""

    def main(comm: Any) -> Any:
        tensor = torch.randn(3, generator=torch.Generator().manual_seed(comm.rank))
        averager = averager_of(
            [tensor], comm, target_group_size=2, initial_group_bits=format(comm.rank // 2, "02b")
        )
        history = [tensor.clone()]
        for _ in range(5):
            assert len(averager.step()) == 2
            comm.Barrier()
            history.append(tensor.clone())
        comm.clock.sleep(0.2)
        return torch.stack(history)

    history = torch.stack(play(main, 8))
    mean, spread = history.mean(dim=0), history.std(dim=0)
    torch.testing.assert_close(mean, mean[:1].expand(6, 3), rtol=0, atol=1e-6)
    assert (spread[0] > 0.1).all()
    assert (spread[1:4] <= spread[:3] + 1e-6).all()
    assert (spread[4:] < 1e-6).all()


def test_allgather() -> None:
    """Eight peers, groups of four: each gets what the four gave, and nothing else."""

    def main(comm: Any) -> Any:
        averager = averager_of([torch.ones(1)], comm, target_group_size=4, initial_group_bits="000")
        result = averager.step(gather={"batch_size": 123 + comm.rank, "foo": "bar"})
        comm.clock.sleep(0.2)
        return dict(result)

    for gathered in play(main, 8):
        assert len(gathered) == 4
        assert all(given == {"batch_size": 123 + rank, "foo": "bar"} for rank, given in gathered.items())


def cost(length: int, parts: Sequence[int], bandwidths: Sequence[float]) -> float:
    """Return the time of the slowest peer."""
    return max(
        (length + (len(parts) - 2) * part) / max(rate, 1e-9)
        for part, rate in zip(parts, bandwidths, strict=True)
    )


def test_load_balancing() -> None:
    """As quick as the reference's partitions; small shares are left out; unknown, zero and random bandwidths."""
    for length, rates, reference in (
        (60, [0.25] * 4, [15] * 4),
        (1024, [0.3, 0.5, 0.9], [0, 255, 769]),
        (60, [0.44, 0.33, 0.22], [42, 18, 0]),
        (60, [0.55, 0.44, 0.40], [35, 16, 9]),
        (2**20, [0.3, 0.5, 0.9, 0.6], [0, 169327, 602629, 276620]),
        (2**20, [0.0, 0.5, 0.0, 0.6], [0, 428963, 0, 619613]),
    ):
        assert cost(length, element_counts(length, rates), rates) <= cost(length, reference, rates) * (
            1 + 1e-12
        )
    assert element_counts(60, [0.55, 0.44, 0.40], 10) == [41, 19, 0]
    assert element_counts(60, [0.32, 0.55, 0.44], 10) == [0, 40, 20]
    two = element_counts(2, [0.55, 0.20, 0.44], 10)  # (1, 0, 1) there: a tie, by the cost of who has a share
    assert sum(two) == 2
    assert two[1] == 0
    assert element_counts(1, [0.55, 0.20, 0.44], 10) == [1, 0, 0]
    assert element_counts(100, [None, None]) == [50, 50]
    assert element_counts(100, [None] * 5) == [20] * 5
    assert element_counts(100, [0, 0, 0, None, None]) == [0, 0, 0, 50, 50]
    with pytest.raises(ParameterError):
        element_counts(100, [0, 0, 0])
    rng = np.random.default_rng(0)
    for _ in range(10):
        length, peers = int(rng.integers(1, 2**30)), int(rng.integers(1, 256))
        rates = list(rng.random(peers) * rng.random() * 1e5 + 1e-6)
        found = element_counts(length, rates, int(rng.choice([0, rng.integers(0, length // 10 + 1)])))
        assert sum(found) == length
        assert min(found) >= 0


def test_too_few_peers() -> None:
    """Four peers under four keys: each step fails, and says so."""

    def main(comm: Any) -> None:
        averager = averager_of(
            [torch.randn(3)], comm, target_group_size=2, initial_group_bits=format(comm.rank, "03b")
        )
        control = averager.step(wait=False, timeout=2.0)
        with pytest.raises(AveragingFailed):
            control.result()

    play(main, 4)


def test_overcrowded() -> None:
    """Sixteen peers under one key, in pairs: all but one pair at most find each other in every round."""

    def main(comm: Any) -> list[int]:
        averager = averager_of([torch.randn(3)], comm, target_group_size=2)
        sizes = []
        for _ in range(5):
            sizes.append(len(averager.step(timeout=5.0) or ()))
            comm.Barrier()
        return sizes

    sizes = np.array(play(main, 16))
    assert ((sizes == 2).sum(axis=0) >= 15).all()


class Stateful(DecentralizedAverager):
    """Shares what it is told to, and counts how often."""

    def __init__(self, comm: Any, state: Any, **parameters: Any) -> None:
        self.state, self.calls = state, 0
        super().__init__(
            [torch.zeros(3)],
            comm,
            **({"start": False, "prefix": "demo", "target_group_size": 2} | QUICK | parameters),
        )

    def get_current_state(self) -> Any:
        self.calls += 1
        return self.state


def test_load_state_from_peers() -> None:
    """A copy of the donor's state as it is then; None while it shares nothing; again when it does."""
    shared = ({"x": 123}, [torch.randn(3), torch.randint(0, 5, (3,))])
    donors: list[Stateful] = []

    def main(comm: Any) -> None:
        averager = Stateful(comm, shared)
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
        assert metadata == {"x": 123}
        assert tensors[1][2] != 9
        metadata, tensors = averager.load_state_from_peers()
        assert (donor.calls, metadata, tensors[1][2]) == (2, {"x": 123, "y": 123}, 9)
        donor.allow_state_sharing = False
        comm.clock.sleep(0.3)
        assert averager.load_state_from_peers() is None
        donor.allow_state_sharing = True
        comm.clock.sleep(0.5)
        assert averager.load_state_from_peers()[0] == shared[0]
        assert donor.calls == 3

    play(main, 2)


def test_load_state_priority() -> None:
    """The donor of the highest priority at the moment, never the caller itself."""
    averagers: dict[int, DecentralizedAverager] = {}

    def main(comm: Any) -> None:
        rank = comm.rank
        averager = averagers[rank] = averager_of(
            [torch.randn(3), torch.rand(5), torch.tensor([float(rank)])], comm, allow_state_sharing=rank != 1
        )
        averager.state_sharing_priority = 5.0 - abs(2 - rank)
        comm.clock.sleep(0.5)
        if rank:
            comm.clock.sleep(4.0)
            return

        def donor_for(newcomer: int) -> float:
            loading = averagers[newcomer].load_state_from_peers(wait=False, timeout=1.0)
            comm.clock.sleep(0.5)
            assert loading.done()
            return loading.result()[1][-1].item()

        assert donor_for(0) == 2
        assert donor_for(2) == 3
        averagers[0].state_sharing_priority = 10.0
        comm.clock.sleep(0.2)
        assert donor_for(2) == 0
        averagers[1].allow_state_sharing = averagers[2].allow_state_sharing = False
        comm.clock.sleep(0.2)
        assert donor_for(0) == 3

    play(main, 4)


def test_getset_bits() -> None:
    """Bits are what they were set to."""

    def main(comm: Any) -> None:
        averager = averager_of([torch.randn(3)], comm, target_group_size=2)
        averager.set_group_bits("00101011101010")
        assert averager.get_group_bits() == "00101011101010"

    play(main, 1)


def test_averaging_trigger() -> None:
    """Two of four wait for a trigger: the others wait in their all-reduce; a second trigger harms nothing."""

    def main(comm: Any) -> Any:
        averager = averager_of([torch.randn(3)], comm)
        control = averager.step(
            wait=False, scheduled_time=comm.clock.now() + 0.5, weight=1.0, require_trigger=comm.rank in (1, 2)
        )
        comm.clock.sleep(0.7)
        stages = [control.stage, control.done()]
        control.allow_allreduce()
        comm.clock.sleep(0.5)
        control.allow_allreduce()
        return [*stages, control.stage, control.done()]

    runs, waits = [Stage.RUNNING_ALLREDUCE, False], [Stage.AWAITING_TRIGGER, False]
    over = [Stage.FINISHED, True]
    assert play(main, 4) == [runs + over, waits + over, waits + over, runs + over]


def test_averaging_cancel() -> None:
    """Two of four cancel, a client and a node: the other two average together."""

    def main(comm: Any) -> Any:
        averager = averager_of([torch.randn(3)], comm, client_mode=comm.rank % 2 == 0)
        control = averager.step(wait=False, scheduled_time=comm.clock.now() + 1.0)
        comm.clock.sleep(0.2)
        if comm.rank < 2:
            control.cancel()
            comm.clock.sleep(2.0)
            return control.cancelled()
        found = sorted(control.result())
        comm.clock.sleep(0.5)
        return found

    assert play(main, 4) == [True, True, [2, 3], [2, 3]]


# ------------------------------------------------------------------------------------------------------------ faults
class Fault(Enum):
    """What a peer does in the all-reduce."""

    NONE = 0
    FAIL_BEFORE = 1
    FAIL_SENDING = 2
    SLOW_SENDING = 3
    FAIL_REDUCING = 4
    SLOW_REDUCING = 5
    CANCEL = 6


LAST = 4  # the last reducer of the group: the one to whom a failing sender fails
SENDING, REDUCING = (Fault.FAIL_SENDING, Fault.SLOW_SENDING), (Fault.FAIL_REDUCING, Fault.SLOW_REDUCING)


class Faulty(DecentralizedAverager):
    """Fails in the midst of what it sends to one reducer, or returns to all senders; or is ten seconds late there."""

    def tamper(self, fault: Fault) -> None:
        """Commit a fault from now on."""
        self.told: Counter[int] = Counter()  # messages by destination, of the kind that fails

        def fails(rank: int, message: Message) -> bool:
            if fault is Fault.FAIL_BEFORE:
                return message.kind in (Kind.PART, Kind.DELTA)
            if fault in SENDING and message.kind is Kind.PART and rank == LAST:
                self.told[rank] += 1
                return self.told[rank] > 1
            if fault in REDUCING and message.kind is Kind.DELTA:
                self.told[rank] += 1
                return self.told[rank] > 3
            return False

        send = self.endpoint.send

        def late(rank: int, message: Message) -> None:
            self.comm.clock.sleep(10.0)
            send(rank, message)

        def tampered(rank: int, message: Message) -> None:
            if not fails(rank, message):
                send(rank, message)
            elif fault in (Fault.SLOW_SENDING, Fault.SLOW_REDUCING):
                self.comm.background(partial(late, rank, message))

        self.endpoint.send = tampered  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Fault.NONE, Fault.FAIL_BEFORE), (Fault.FAIL_BEFORE, Fault.FAIL_BEFORE),
        (Fault.SLOW_SENDING, Fault.FAIL_SENDING), (Fault.FAIL_SENDING, Fault.FAIL_BEFORE),
        (Fault.SLOW_REDUCING, Fault.FAIL_SENDING), (Fault.FAIL_REDUCING, Fault.FAIL_REDUCING),
        (Fault.NONE, Fault.CANCEL),
    ],
)  # fmt: skip
def test_fault_tolerance(first: Fault, second: Fault) -> None:
    """Five peers, of which a node and a client fail: the others end, in time, with the mean or their own values."""
    faults = [first, second, Fault.NONE, Fault.NONE, Fault.NONE]

    def tensors(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return [
            torch.randn(shape, generator=generator)
            for shape in ((16, 1024), (3, 8192), (4, 4, 4), (512, 512))
        ]

    def main(comm: Any) -> Any:
        values = tensors(comm.rank)
        averager = Faulty(
            values, comm, prefix="test", request_timeout=0.3, min_matchmaking_time=1.0, next_chunk_timeout=0.5,
            allreduce_timeout=5.0, part_size_bytes=2**16, client_mode=comm.rank == 1, start=True,
        )  # fmt: skip
        averager.tamper(faults[comm.rank])
        control = averager.step(timeout=5.0, wait=False, allow_retries=False)
        if faults[comm.rank] is Fault.CANCEL:
            control.cancel()
        comm.clock.sleep(8.0)
        if comm.rank >= 2:
            assert set(control.result()) >= {2, 3, 4}
            whole = faults[0] is Fault.NONE and control.result().complete
            assert whole == (faults[1] is Fault.CANCEL)
        comm.clock.sleep(8.0)
        return torch.cat([each.reshape(-1) for each in values])

    returned = play(main, 5)
    before = [torch.cat([each.reshape(-1) for each in tensors(rank)]) for rank in range(5)]
    counted = [rank for rank in range(5) if faults[rank] not in (Fault.FAIL_BEFORE, Fault.CANCEL)]
    mean = torch.stack([before[rank] for rank in counted]).mean(dim=0)
    for rank in (2, 3, 4):
        right = (returned[rank] - mean).abs() < 1e-5
        if first is Fault.NONE:  # a client that fails leaves no range without a reducer
            assert right.all()
            continue
        assert right.float().mean() > 0.5
        if not {first, second} & set(SENDING):
            assert (right | (returned[rank] == before[rank])).all()


# ------------------------------------------------------------------------------------------------------------- keys
class Declarations:
    """Twelve ranks' shards and askers; messages are delivered at once, at the time that is set."""

    def __init__(self, size: int = 12) -> None:
        self.now_s = 0.0
        self.shards = [DirectoryShard() for _ in range(size)]
        self.askers = [DirectoryClient(rank, size, 1.0) for rank in range(size)]

    def deliver(self, source: int, messages: list[Outgoing]) -> None:
        """Hand messages over, and what answers them."""
        for dest, message in messages:
            if message.kind is Kind.DECLARE:
                self.deliver(dest, self.shards[dest].handle(source, message, self.now_s))
            else:
                self.askers[dest].handle(source, message)

    def declare(self, rank: int, key: str, until_s: float) -> None:
        """Declare that a rank looks for a group."""
        self.deliver(
            rank, self.askers[rank].ask(key, self.now_s, Entry(rank, until_s, until_s, f"peer {rank}"))
        )

    def take_back(self, rank: int, key: str) -> None:
        """Declare that a rank looks for none any more."""
        self.deliver(rank, self.askers[rank].take_back(key))

    def active(self, key: str, asker: int = 11) -> list[tuple[int, float, str]]:
        """Return who looks for a group under a key, as one who looks for none is told."""
        self.askers[asker].entries.pop(key, None)
        self.deliver(asker, self.askers[asker].ask(key, self.now_s))
        assert self.askers[asker].wake_s() == math.inf  # all replicas have answered
        return [
            (entry.rank, entry.until_s, entry.value) for entry in self.askers[asker].known(key, self.now_s)
        ]


def test_key_manager() -> None:
    """Who has declared itself under a key is found there until it takes that back or its time has run out.

    Upstream also lists those that take no part at the moment; here nobody asks for them, and they are forgotten.
    """
    net, key = Declarations(), "test_averaging.0b10110"
    net.declare(1, key, 60.0)
    net.declare(2, key, 61.0)
    assert net.active(key) == [(1, 60.0, "peer 1"), (2, 61.0, "peer 2")]
    net.declare(3, key, 62.0)
    net.take_back(2, key)
    assert net.active(key) == [(1, 60.0, "peer 1"), (3, 62.0, "peer 3")]
    net.declare(2, key, 66.0)
    net.declare(1, key, 63.0)  # for longer
    assert [rank for rank, *_ in net.active(key)] == [3, 1, 2]
    for other in ("", "1", "1011", "10111", "101100"):
        assert net.active(f"test_averaging.0b{other}") == []
    assert net.active("another.0b10110") == []
    net.now_s = 62.5
    assert [rank for rank, *_ in net.active(key)] == [1, 2]
    net.now_s = 66.0
    assert net.active(key) == []
    assert not any(shard.entries for shard in net.shards)  # what has run out is forgotten
