"""The traps that greenlets, SimPy and MPI set, each with its test."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.virtual_run import LATENCY, OVERHEAD, platform, run

from spawnsim.errors import ParameterError, RankError


@contextmanager
def autocast_of_a_gpu():
    """As `torch.autocast("cuda")`, which does nothing where there is no GPU."""
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        autocast_of_a_gpu,
    ],
    ids=["no_grad", "inference_mode", "autocast", "autocast of a GPU"],
)
def test_a_rank_parked_inside_a_torch_mode_leaves_the_others_alone(mode):
    """Torch keeps its modes by thread, and all ranks share one: they must not leak from rank to rank."""

    def main(comm):
        if comm.rank == 0:
            with mode():
                comm.recv(source=1)  # parks here
                comm.record(on=str(modes()))
        else:
            comm.record(on=str(modes()))
            comm.send(None, 0)
            comm.Barrier() if comm.size > 2 else None
        assert modes() == (True, False, False, False)

    before, found = modes(), run(main, 2)[1].column("on")
    assert found[1] == str((True, False, False, False))
    assert found[0] != found[1]
    assert modes() == before


def modes():
    """Return torch's modes."""
    autocast = (torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def test_streams_of_ranks_do_not_couple():
    """What one rank draws does not depend on how many ranks there are, or on what the others draw."""

    def main(comm):
        for _ in range(comm.rank):
            comm.rng("x").normal()
        comm.Barrier()
        comm.record(y=comm.rng("y").normal())

    small, large = run(main, 2, seed=5)[1].column("y"), run(main, 5, seed=5)[1].column("y")
    assert small == {rank: large[rank] for rank in small}
    assert len(set(large.values())) == 5


class Picky(Exception):
    """An exception that cannot be rebuilt from its args, as SimPy would try."""

    def __init__(self, one, two):
        super().__init__(one)


def test_an_exception_of_a_rank_is_kept_as_it_is():
    """SimPy rebuilds exceptions as type(e)(*e.args); a rank's own must arrive whole."""

    def main(comm):
        with comm.compute(1.5):
            pass
        if comm.rank == 17:
            raise Picky("one", "two")

    with pytest.raises(RankError, match=r"rank 17 raised Picky: one at 1\.5 s") as caught:
        run(main, 20)
    assert isinstance(caught.value.__cause__, Picky)
    assert (caught.value.rank, caught.value.time_s) == (17, 1.5)


def test_a_payload_is_never_the_memory_of_two_ranks():
    """A buffer may be used again at once, and what arrives is the receiver's own."""

    def main(comm):
        data = np.full(4, float(comm.rank))
        request = comm.Isend(data, 1 - comm.rank)
        data[:] = -1
        got = np.empty(4)
        comm.Recv(got, 1 - comm.rank)
        request.Wait()
        everywhere = comm.bcast({"list": [comm.rank]}, root=0)
        everywhere["list"].append(comm.rank)
        comm.record(got=got[0], list=str(everywhere["list"]))

    notes = run(main, 2)[1]
    assert notes.column("got") == {0: 1.0, 1: 0.0}
    assert notes.column("list") == {0: "[0, 0]", 1: "[0, 1]"}


@pytest.mark.parametrize(("progress", "wait"), [("poll", 1.8), ("async", 0.0), ("hardware", 0.0)])
def test_a_window_is_served_when_its_busy_owner_enters_mpi(progress, wait):
    """Passive-target progress is a parameter: by polling, a Get waits for the rest of the owner's block."""

    def main(comm):
        window = comm.Win.Allocate(8, comm=comm)
        comm.Barrier()
        if comm.rank == 0:
            with comm.compute(2.0):
                pass
        else:
            comm.clock.sleep(0.2)
            begin = comm.clock.now()
            window.Lock(0)
            window.Get(np.zeros(8, np.uint8), 0)
            window.Unlock(0)
            comm.record(wait=comm.clock.now() - begin)
        comm.Barrier()
        window.Free()

    found = run(main, 2, platform=platform(progress=progress))[1].column("wait")[1]
    assert found == pytest.approx(wait, abs=6 * LATENCY)


def test_polls_per_mini_batch_bound_a_readers_wait():
    """With a poll every 50 ms a reader waits at most that long, and the owner is not slowed."""

    def main(comm):
        window = comm.Win.Allocate(8, comm=comm)
        window.Lock_all()
        comm.Barrier()
        if comm.rank == 0:
            for _ in range(40):
                with comm.compute(0.05):
                    pass
            comm.record(busy=comm.clock.now())
        for _ in range(20 if comm.rank else 0):
            comm.clock.sleep(0.0731)
            begin = comm.clock.now()
            window.Get(np.zeros(8, np.uint8), 0)
            window.Flush(0)
            comm.record(wait=comm.clock.now() - begin)
        comm.Barrier()
        window.Unlock_all()
        window.Free()

    notes = run(main, 2)[1]
    waits = [values["wait"] for _, _, values in notes.rows if "wait" in values]
    assert max(waits) < 0.05 + 3 * LATENCY
    assert 0.015 < np.mean(waits) < 0.035  # half a mini-batch
    assert notes.column("busy")[0] == pytest.approx(2.0, rel=1e-2)


def test_times_are_absolute_and_do_not_drift():
    """SimPy schedules by delay, and now + (t - now) is not always t: 1,000 observations land on exact times."""

    def main(comm):
        if comm.rank == 0:
            expected = 0.0
            for _ in range(1000):
                with comm.compute(0.1):
                    pass
                comm.Iprobe()
                expected = (expected + 0.1) + OVERHEAD
            assert comm.clock.now() == expected
        else:
            comm.clock.sleep(200)

    run(main, 3, deadline_s=float("inf"))


def test_deadline_timers_do_not_pile_up():
    """One lazily re-armed timer a rank, however many calls block: 400 messages, a handful of events."""

    def main(comm):
        for _ in range(200):
            comm.recv(source=1 - comm.rank) if comm.rank else comm.send(None, 1)
            comm.send(None, 0) if comm.rank else comm.recv(source=1)

    assert run(main, 2, deadline_s=30.0)[0].scheduled <= 4


def test_computing_without_a_duration_is_refused():
    """No silent zero: a run without a compute model says so."""

    def main(comm):
        with comm.compute():
            pass

    with pytest.raises(ParameterError, match=r"comm\.compute\(\) states no duration"):
        run(main, 2)
