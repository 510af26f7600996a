"""Survivors go on after the death of a rank: by time-out on any MPI, by ULFM where it is switched on."""

from __future__ import annotations

import pytest

from spawnsim.real.launch.launchers import find_library

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(120)]

TRAINING = """
comm = world(deadline_s=2.0, options=Options(survive={survive}))
everyone, own, step = comm, np.ones({length}), 0
total = np.zeros_like(own)
with guarded(comm):
    while step < 20:
        if everyone.rank in {victims} and step == 5:
            os._exit(0)
        try:
            with comm.compute(): time.sleep(0.01)
            comm.Allreduce(own, total)
            assert comm.bcast(step, root=comm.size - 1) == step
            step += 1
        except (RankFailed, Revoked, Timeout):
            found = comm.recover(step)
            comm, step = found.comm, found.step
    file = os.environ["LEFT"] + "." + str(everyone.rank)
    open(file, "w").write(f"{{comm.size}} {{total[0]}} {{sorted(found.dead)}}")
"""


@pytest.mark.parametrize("victims", [(2,), (0, 3)])
def test_survivors_finish_their_steps(job, tmp_path, monkeypatch, victims):
    """They agree on the step, and the sums are those of the survivors."""
    flag = "-disable-auto-cleanup" if find_library().name == "MPICH" else "--enable-recovery"
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    monkeypatch.setenv("SPAWNSIM_SURVIVE", "1")
    found = job(TRAINING.format(victims=victims, survive=True, length=1), n=5, flags=(flag,))
    left = {file.suffix[1:]: file.read_text() for file in tmp_path.glob("left.*")}
    alive = 5 - len(victims)
    wanted = {str(rank): f"{alive} {alive:.1f} {sorted(victims)}" for rank in range(5) if rank not in victims}
    assert left == wanted, found.err


def test_capabilities_name_the_missing_flag(ranks):
    """Without a launcher that lets ranks survive, the communicator says so."""
    ranks("""
    can = comm.capabilities()
    assert (can.backend, can.survives, can.ulfm, can.threads) == ("mpi", False, False, "multiple"), can
    assert "spawnsim run --survive" in can.missing[0]
    """)


def test_a_late_message_whose_sender_dies_harms_nobody(ranks):
    """The library says so where it is received, which is the end of it."""
    ranks("""
    from mpi4py import MPI
    class Torn:
        def Test(self):
            raise MPI.Exception(MPI.ERR_OTHER)
    revoking = comm.runtime.survival.revoking
    revoking._old, revoking._landing = [(comm.as_mpi_comm(), comm.members)], [Torn()]
    assert not revoking.probe_by(lambda source, tag: False)(ANY_SOURCE, ANY_TAG)
    assert revoking._landing == []
    """)


def test_a_call_that_was_left_does_not_end_the_job(ranks):
    """The watchdog checks while other ranks are asked: such a call has missed its deadline, but is not hanging."""
    ranks(
        """
    from spawnsim.real.mpi.abortable import _late
    dog = comm.runtime.watchdog
    ask_all = dog.ask_all

    def looking():
        dog.do(dog._check)
        return ask_all()

    dog.ask_all = looking
    late = _late(comm, ("Barrier", 5, comm, time.perf_counter() - 9, 1.0))
    assert isinstance(late, Timeout), late
    dog.ask_all = ask_all
    """,
        options="Options(survive=True)",
    )


def test_a_library_that_makes_no_communicator_any_more_ends_the_recovery(ranks):
    """MPICH makes none after two deaths in makings of others: ranks tried again, 16 times 6 s, and then once more."""
    ranks(
        """
        from spawnsim.real.mpi import agreement, recovery
        agreement.MAKING_S, recovery.ALONE_S, usual = 0.4, 0.1, (agreement.MAKING_S, recovery.ALONE_S)
        survival, tried = comm.runtime.survival, []
        survival._make = lambda *_: (tried.append(1), time.sleep(600))
        try:
            comm.recover(1)
        except WorldError as error:
            assert "no communicator of the survivors after 3 rounds" in str(error) and type(error) is WorldError, error
        else:
            raise AssertionError("recovered")
        finally:
            agreement.MAKING_S, recovery.ALONE_S = usual
            del survival._make
        assert len(tried) == 3
        """,
        options="Options(survive=True, check_calls=True)",  # a world of its own
    )


def test_a_making_that_hangs_is_given_up_and_tried_again_by_all(ranks):
    """Open MPI may hang in it though all live: they waited for a deadline (30 s), which has nothing to do with it.

    And it hung because other threads called the library meanwhile: no polls do.
    """
    ranks(
        """
        from spawnsim.real.mpi import agreement, recovery
        survival, channel = comm.runtime.survival, comm.runtime.channel
        made, make, receive = survival._made, survival._make, channel.receive
        first, usual = survival.agreement.lineages[comm.label].done + 1, (agreement.MAKING_S, recovery.ALONE_S)
        tried, making, meanwhile = [], [], []

        def limited(meeting, decision):
            agreement.MAKING_S = recovery.ALONE_S = 0.2 if meeting.number == first else 60.0
            return made(meeting, decision)

        def stand_in(meeting, decision):
            tried.append(meeting.number)
            if meeting.number == first:
                return time.sleep(600 if rank == 1 else 0)  # it hangs on one rank, the others have theirs
            making.append(1)
            time.sleep(0.1)
            comm.runtime.poll()  # as a thread of the program may
            new = make(meeting, decision)
            making.clear()
            return new

        survival._made, survival._make = limited, stand_in
        channel.receive = lambda: (meanwhile.extend(making), receive())[1]
        comm.runtime.probe_by(lambda *_: meanwhile.extend(making))
        try:
            with comm.clock.deadline(600.0):
                found = comm.recover(1)
        finally:
            agreement.MAKING_S, recovery.ALONE_S = usual
            del survival._made, survival._make, channel.receive
        assert (found.comm.size, found.step, found.dead) == (size, 1, ()), found
        everyone = found.comm.allgather(tried)
        assert first in sum(everyone, []) and {each[-1] for each in everyone} == {tried[-1]} != {first}, everyone
        assert meanwhile == []
        """,
        options="Options(survive=True, check_calls=True)",
    )


@pytest.mark.parametrize("length", [1, 100_000], ids=["by the library", "on the node"])
@pytest.mark.parametrize("victims", [(2,), (0, 3)])
def test_ulfm_shrinks_where_the_library_has_it(job, ranks, tmp_path, monkeypatch, victims, length):
    """Blocking collectives end in RankFailed at once, and the job in status 0; MPICH's wheel says that it cannot."""
    if find_library().name != "Open MPI":
        ranks("assert not comm.capabilities().ulfm")
        return
    monkeypatch.setenv("LEFT", str(tmp_path / "left"))
    found = job(
        TRAINING.format(victims=victims, survive=False, length=length), n=5, flags=("--with-ft", "ulfm")
    )
    left = {file.suffix[1:]: file.read_text() for file in tmp_path.glob("left.*")}
    assert len(left) == 5 - len(victims), found.err
    assert all(text.endswith(str(sorted(victims))) for text in left.values()), left
