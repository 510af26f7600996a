"""Partitioned messages: partitions arrive one by one, which MPI permits and MPICH does not do."""

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim import errors
from spawnsim.virtual.mpi.module import MPI


def test_partitions_arrive_one_by_one():
    """A receiver may use a partition while the sender still works on the next one."""

    def main(comm):
        data = np.arange(12.0) if comm.rank == 0 else np.zeros(12)
        if comm.rank == 0:
            send = comm.Psend_init(data, 3, 11)
            send.Start()
            for part in (2, 0, 1):
                comm.clock.sleep(1.0)
                send.Pready(part)
            send.Wait()
        elif comm.rank == 11:
            receive = comm.Precv_init(data, 3, 0, 0)
            receive.Start()
            for _ in range(4):
                seen.append(([receive.Parrived(part) for part in range(3)], data[8:].tolist()))
                comm.clock.sleep(1.1 - comm.clock.now() % 1)
            receive.Wait()
            assert (data == np.arange(12.0)).all()

    seen = []
    run(main, 12)
    nothing, last = [0.0] * 4, [8.0, 9.0, 10.0, 11.0]
    assert seen == [
        ([False, False, False], nothing),
        ([False, False, True], last),
        ([True, False, True], last),
        ([True, True, True], last),
    ]


def test_nobody_at_the_other_end():
    """PROC_NULL takes and gives nothing."""

    def main(comm):
        data, status = np.full(4, 7.0), MPI.Status()
        send = comm.Psend_init(data, 2, MPI.PROC_NULL)
        receive = comm.Precv_init(data, 2, MPI.PROC_NULL, 0)
        MPI.Prequest.Startall([send, receive])
        send.Pready_range(0, 1)
        MPI.Request.Waitall([receive, send], [status, MPI.Status()])
        assert (data == 7.0).all() and status.source == MPI.PROC_NULL

    run(main, 1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda comm: comm.Psend_init(np.zeros(4), 0, 0), "0 partitions"),
        (lambda comm: comm.Psend_init(np.zeros(4), 3, 0), "do not divide into 3"),
        (lambda comm: comm.Precv_init(np.zeros(4), 2, 0), "tag -1 is outside"),
        (lambda comm: comm.Psend_init(np.zeros(4), 2, 0).Pready(0), r"partitions \[\] can become ready"),
        (lambda comm: comm.Psend_init(np.zeros(4), 2, 0).Parrived(0), r"Parrived\(0\) of Psend_init"),
        (lambda comm: comm.Send_init(np.zeros(4), 0).Pready(0), "have partitions"),
        (
            lambda comm: (comm.Psend_init(np.zeros(4), 2, 0), comm.Precv_init(np.zeros(4), 4, 0, 0)),
            "same number at both ends",
        ),
    ],
)
def test_wrong_calls_name_the_mistake(wrong, says):
    """The error shows the call and its partitions."""
    with pytest.raises(errors.UsageError, match=says):
        run(wrong, 1)


def test_a_partition_that_never_becomes_ready_is_a_deadlock():
    """The report shows both ends."""

    def main(comm):
        data = np.zeros(4)
        if comm.rank == 0:
            send = comm.Psend_init(data, 2, 1, 5)
            send.Start()
            send.Pready(1)
            send.Wait()
        else:
            receive = comm.Precv_init(data, 2, 0, 5)
            receive.Start()
            receive.Wait()

    with pytest.raises(errors.Deadlock, match=r"Psend, until all partitions are ready\(dest=1, tag=5\)"):
        run(main, 2)
