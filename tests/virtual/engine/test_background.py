"""Background tasks: beside the rank's program, on its clock's time."""

import pytest
from support.virtual_run import run

from spawnsim.errors import RankError


def test_a_background_task_runs_beside_the_program_in_time():
    """What the task sets at 0.5 s the program does not see at 0.4 s, and sees at 0.6 s, though it ran ahead."""

    def main(comm):
        seen = []

        def work():
            comm.clock.sleep(0.5)
            seen.append(comm.clock.now())

        task = comm.background(work)
        with comm.compute(0.4):
            pass
        early = list(seen)
        with comm.compute(0.2):
            pass
        comm.record(early=len(early), late=seen[0], alive=task.alive, joined=task.join(1.0))

    assert run(main, 2)[1].rows[0][2] == {"early": 0, "late": 0.5, "alive": False, "joined": True}


def test_a_background_task_may_talk_to_other_ranks():
    """A responder serves while the program computes."""

    def main(comm):
        if comm.rank == 0:

            def respond():
                comm.send(comm.recv(source=1) + 1, 1)

            comm.background(respond)
            with comm.compute(5.0):
                pass
        else:
            comm.send(41, 0)
            comm.record(answer=comm.recv(source=0), at=comm.clock.now())

    notes = run(main, 2)[1]
    assert notes.column("answer") == {1: 42}
    assert notes.column("at")[1] < 0.1


def test_an_endless_background_task_ends_with_its_program():
    """As a daemon thread does."""

    def main(comm):
        ticks = []

        def tick():
            while True:
                comm.clock.sleep(0.1)
                ticks.append(1)

        comm.background(tick)
        comm.clock.sleep(1.05)
        comm.record(ticks=len(ticks))

    assert run(main, 3)[1].column("ticks") == {0: 10, 1: 10, 2: 10}


def test_join_gives_up_after_its_timeout():
    """Join says whether the end has come."""

    def main(comm):
        task = comm.background(lambda: comm.clock.sleep(9.0))
        comm.record(joined=task.join(2.0), now=comm.clock.now())

    assert run(main, 1)[1].rows[0][2] == {"joined": False, "now": pytest.approx(2.0)}


def test_an_exception_in_a_background_task_ends_the_run():
    """It is the rank's exception, and loud."""

    def main(comm):
        def fail():
            comm.clock.sleep(0.25)
            raise KeyError("lost")

        comm.background(fail)
        comm.clock.sleep(1.0)

    with pytest.raises(RankError, match=r"rank 0 \(background\) raised KeyError: 'lost' at 0\.25 s"):
        run(main, 1)


def test_a_background_task_that_outlives_its_program_may_read_the_clock():
    """It is ended with its program, while it waits; its `finally` blocks see the time of that."""

    def main(comm):
        def beside():
            try:
                comm.recv(source=(comm.rank + 1) % 3)
            finally:
                comm.record(ended=comm.clock.now())

        comm.background(beside)
        comm.clock.sleep(1.0 + comm.rank)

    assert run(main, 3)[1].column("ended") == {0: 1.0, 1: 2.0, 2: 3.0}
