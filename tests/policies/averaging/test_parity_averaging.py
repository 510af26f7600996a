"""What hivemind's suite checks of averaging, by the same numbers, on virtual ranks with averagers in the background.

Properties and parameters are those of its `test_averaging.py` and `test_allreduce_fault_tolerance.py`; the programs are
ours. Its tests play all peers from one process; here each rank is a peer. What `test_averager.py` checks as well, in
larger worlds, is not here.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from policies.averaging.averagers import averager_of, play

from spawnsim.policies.averaging import DecentralizedAverager
from spawnsim.policies.exchange.messages import Kind, Message


def test_allgather() -> None:
    """Eight peers, groups of four: each gets what the four gave, and nothing else."""

    def main(comm: Any) -> Any:
        averager = averager_of(comm, start=True, target_group_size=4, initial_group_bits="000")
        result = averager.step(gather={"batch_size": 123 + comm.rank, "foo": "bar"})
        comm.clock.sleep(0.2)
        return dict(result)

    for gathered in play(main, 8).values():
        assert len(gathered) == 4
        assert all(given == {"batch_size": 123 + rank, "foo": "bar"} for rank, given in gathered.items())


def test_overcrowded() -> None:
    """Sixteen peers under one key, in pairs: all but one pair at most find each other in every round."""

    def main(comm: Any) -> list[int]:
        averager, sizes = averager_of(comm, start=True, target_group_size=2), []
        for _ in range(5):
            sizes.append(len(averager.step(timeout=5.0) or ()))
            comm.Barrier()
        return sizes

    sizes = np.array(list(play(main, 16).values()))
    assert ((sizes == 2).sum(axis=0) >= 15).all()


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
