"""Endless polls are told from polls that will end: by what is still due, and by counts, never by seconds."""

import numpy as np
import pytest
from support.virtual_run import LATENCY, OVERHEAD, run

from spawnsim.errors import Livelock, Timeout
from spawnsim.scenario import Scenario
from spawnsim.virtual.engine import diagnosis
from spawnsim.virtual.scripts import run_program


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch):
    """Let a hundredth of the polls be enough."""
    monkeypatch.setattr(diagnosis, "LIVELOCK_POLLS", 10_000)
    monkeypatch.setattr(diagnosis, "POLLS_EACH", 100)


POLLS = {
    "Iprobe": lambda comm, request: comm.Iprobe(source=1),
    "Improbe": lambda comm, request: comm.Improbe(source=1) is not None,
    "Test": lambda comm, request: request.Test(),
    "Testall": lambda comm, request: request.Testall([request]),
    "Testany": lambda comm, request: request.Testany([request])[1],
    "Testsome": lambda comm, request: bool(request.Testsome([request])),
    "Get_status": lambda comm, request: request.Get_status(),
}


def work(comm, seconds):
    """Compute."""
    with comm.compute(seconds):
        pass


BUSY = {
    "sleeps": lambda comm: comm.clock.sleep(0.03),
    "sleeps often": lambda comm: [comm.clock.sleep(0.001) for _ in range(30)],
    "computes": lambda comm: work(comm, 0.03),
    "waits for a timer": lambda comm: late(comm, 0.03),
}


def late(comm, seconds):
    """Wait for what nobody sends, with a deadline."""
    with pytest.raises(Timeout), comm.clock.deadline(seconds):
        comm.recv(source=0, tag=9)


@pytest.mark.parametrize("poll", POLLS)
@pytest.mark.parametrize("busy", BUSY)
def test_polls_go_on_while_an_event_is_due(poll, busy):
    """30,000 polls are three times the limit; but another rank has something to do, and then sends."""

    def main(comm):
        if comm.rank == 1:
            BUSY[busy](comm)
            comm.send("x", 0)
        else:
            request = comm.irecv(source=1) if "robe" not in poll else None
            while not POLLS[poll](comm, request):
                pass
            comm.record(now=comm.clock.now())

    now_s = run(main, 2)[1].column("now")[0]
    assert 0.03 + LATENCY <= now_s <= 0.03 + LATENCY + 40 * OVERHEAD


@pytest.mark.parametrize("poll", POLLS)
@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_endless_polls_are_found(poll, pause_s):
    """Tight ones, and those that sleep in between; the report shows who polls where."""

    def main(comm):
        request = comm.irecv(source=1 - comm.rank) if "robe" not in poll else None
        while not POLLS[poll](comm, request):
            if pause_s:
                comm.clock.sleep(pause_s)

    with pytest.raises(Livelock, match=r"10,000 polls in a row found nothing") as caught:
        run(main, 2)
    assert "test_livelock.py:" in str(caught.value)
    assert "rank 1" in str(caught.value)


def test_many_polite_pollers_do_not_add_up():
    """63 ranks look once a millisecond while one rank works for a second."""

    def main(comm):
        if comm.rank == 0:
            comm.clock.sleep(1.0)
            for dest in range(1, comm.size):
                comm.send("go", dest)
        else:
            request = comm.irecv(source=0)
            while not request.Test():
                comm.clock.sleep(0.001)

    assert run(main, 64)[0].virtual_seconds == pytest.approx(1.0, abs=0.01)


def test_what_polls_know_to_end_later_is_no_livelock():
    """The last rank has entered the barrier already, far ahead of the others' clocks: no event, but an end."""

    def main(comm):
        work(comm, 0.05 * comm.rank)
        request = comm.Ibarrier()
        while comm.rank == 0 and not request.Test():
            pass
        request.Wait()
        comm.record(now=comm.clock.now())

    assert run(main, 2)[1].column("now")[0] >= 0.05


def test_a_message_under_way_is_no_livelock():
    """It was sent by a rank that has ended, and arrives after more polls than the limit."""

    def main(comm):
        if comm.rank == 1:
            work(comm, 0.05)
            comm.send("x", 0)
        else:
            while not comm.Iprobe(source=0):  # in vain: it is not that message
                if comm.Iprobe(source=1):
                    break
            comm.record(now=comm.clock.now())

    assert run(main, 2)[1].column("now")[0] >= 0.05 + LATENCY


def test_polls_of_a_program_that_reads_its_clock_may_wait_for_a_time():
    """Nothing else happens, and nothing is due but the time that the program waits for."""

    def main(comm):
        while comm.clock.now() < 0.05:
            comm.Iprobe()

    assert run(main, 2)[0].virtual_seconds == pytest.approx(0.05)


@pytest.mark.parametrize(("pause_s", "polls"), [(1e-6, "30,000"), (60.0, "10,000")])
def test_polls_that_read_the_clock_end_as_well(monkeypatch, pause_s, polls):
    """After a day of virtual time, or many times as many polls."""

    def main(comm):
        while comm.clock.now() < pause_s * 1e9:
            comm.Iprobe()
            comm.clock.sleep(pause_s)

    monkeypatch.setattr(diagnosis, "TIMED_FACTOR", 3)
    with pytest.raises(Livelock, match=f"{polls} polls in a row"):
        run(main, 1)


@pytest.mark.parametrize(
    "look", [lambda comm, window: comm.clock.sleep(2e-6), lambda comm, window: window.Sync()]
)
def test_looks_at_exposed_memory_are_polls(look):
    """They go on while a store is still to come, and end when none is."""

    def main(comm):
        memory = np.zeros(1)
        window = comm.Win.Create(memory, comm=comm)
        window.Lock_all()
        if comm.rank == 1:
            comm.clock.sleep(0.03)
            window.Put(np.ones(1), 0)
            window.Flush(0)
        while comm.rank == 0 and memory[0] < wanted:
            look(comm, window)
        window.Unlock_all()
        window.Free()

    wanted = 1
    run(main, 2)
    wanted = 2
    with pytest.raises(Livelock):
        run(main, 2)


def test_a_rank_that_waits_beside_one_that_polls_is_shown():
    """The rank that polls would never notice that the other waits for it."""

    def main(comm):
        if comm.rank == 0:
            comm.recv(source=1)
        while not comm.Iprobe(source=0):
            pass

    with pytest.raises(Livelock, match=r"recv\(source=1, tag=ANY_TAG\) on MPI_COMM_WORLD") as caught:
        run(main, 2)
    assert "Iprobe" in str(caught.value)


def test_a_program_cannot_swallow_it():
    """It would poll on for ever."""

    def main(comm):
        while True:
            try:
                comm.Iprobe()
            except BaseException:  # noqa: BLE001
                comm.record(caught=1)

    with pytest.raises(Livelock):
        run(main, 2)


def test_tolls_do_not_hide_endless_polls(tmp_path):
    """What each call costs (`--compute 5us`) is the price of the poll, not something that happens."""
    path = tmp_path / "script.py"
    path.write_text("from mpi4py import MPI\nwhile not MPI.COMM_WORLD.Iprobe(): pass\n")
    with pytest.raises(Livelock, match=r"Iprobe +script\.py:2"):
        run_program(path, [], Scenario(2, compute="5 us"), recorder=None)
