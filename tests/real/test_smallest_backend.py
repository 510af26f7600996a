"""The smallest backend: ranks are threads, parcels go over queues, and `spawnsim.real.base` derives all the rest."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract.cases import Case, Outcome, find_cases, run_together
from contract.test_contract import ABSENT_ON, broken

from spawnsim.errors import MismatchError, Timeout
from spawnsim.real.base import WireComm, WireRuntime, namespace
from spawnsim.real.runtime.services import Options, RankServices
from spawnsim.real.runtime.wire import Bytes, Parcel, Sent, Wire

RANKS = 4
Main = Callable[[WireComm], Any]


class QueueWire(Wire):
    """A queue per rank, which a thread of the rank empties."""

    def __init__(self, rank: int, queues: list[queue.SimpleQueue[Any]]) -> None:
        super().__init__(rank, len(queues))
        self._queues = queues
        self._thread = threading.Thread(target=self._receive_all, name=f"wire {rank}", daemon=True)

    def carry(self, to: int, parcel: Parcel, payload: Bytes | None, sent: Sent) -> None:
        parcel.source = self.rank
        self._queues[to].put((parcel, None if payload is None else payload.copy()))
        sent.finish()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._queues[self.rank].put(None)
        self._thread.join()

    def _receive_all(self) -> None:
        while (found := self._queues[self.rank].get()) is not None:
            self.receive(*found)


def run_threads(main: Main, ranks: int = RANKS, options: Options | None = None) -> list[Any]:
    """Run `main(comm)` on so many threads; return what each returns, or raise the first error."""
    queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(ranks)]
    results: list[Any] = [None] * ranks
    met = threading.Barrier(ranks)

    def be_a_rank(rank: int) -> None:
        services = RankServices(rank, recorder=None, seed=0, deadline_s=20.0)
        runtime = WireRuntime(QueueWire(rank, queues), services, options or Options())
        comm = WireComm(runtime, tuple(range(ranks)), "world")
        runtime.begin()
        met.wait()
        services.clock.start()
        try:
            results[rank] = main(comm)
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            results[rank] = error
        runtime.finalize()

    threads = [threading.Thread(target=be_a_rank, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_it_keeps_the_contract(ranks: int) -> None:
    """Every case passes that passes over torch.distributed: the same calls are there, derived from messages."""
    cases: list[Case] = find_cases(ranks)

    def main(comm: WireComm) -> list[Outcome]:
        return list(run_together(namespace(comm), comm, cases))

    outcomes = run_threads(main, ranks)[0]
    assert len(outcomes) == len(cases)
    assert broken(outcomes, "torch") == []
    if ranks > 1:
        passed = {one.case for one in outcomes if one.status == "passed"}
        assert passed & ABSENT_ON["torch"] == set()


def test_the_promises_of_real_ranks_are_derived_as_well() -> None:
    """A deadline names the rank that is missing, calls that differ are found, and sums can be in rank order."""

    def main(comm: WireComm) -> None:
        different = comm.Dup()
        with pytest.raises(MismatchError, match=r"ranks 0-1: Bcast, root 0.*\n  ranks 2-3: Allreduce, SUM"):
            different.Bcast(np.zeros(2)) if comm.rank < 2 else different.Allreduce(np.zeros(2), np.zeros(2))
        comm.runtime.check_calls = False
        total = np.array([[1e16, 1.0, -1e16, 1.0][comm.rank]])
        comm.Allreduce(total.copy(), total)
        assert total[0] == ((1e16 + 1.0) - 1e16) + 1.0
        with comm.clock.deadline(0.1), pytest.raises(Timeout, match="recv from rank 1, tag 3") as late:
            comm.recv(source=1, tag=3)
        assert list(late.value.ranks) == [1]

    run_threads(main, options=Options(check_calls=True, reduction="ordered"))


def test_nobody_leaves_while_others_compare_notes() -> None:
    """The last to tell rank 0 what it has recorded come when another has told it long ago."""

    def main(comm: WireComm) -> list[int] | None:
        comm.runtime.settle()
        time.sleep(0.3 * (comm.rank == 1))
        return comm.gather(comm.rank, root=0)

    assert run_threads(main) == [[0, 1, 2, 3], None, None, None]
