"""Numbers of handles, calls that virtual ranks lack, and memory that claims to be on a GPU."""

import pickle
import warnings

import numpy as np
import pytest
from support.virtual_run import run

from spawnsim.comm import memory
from spawnsim.comm.failures import SpecBufferError
from spawnsim.errors import Deadlock, UnsupportedError
from spawnsim.virtual.mpi.module import MPI


def test_numbers_of_handles_lead_back():
    """Each rank gets its own handle from its own number; a number of another kind is an error."""

    def main(comm):
        dup = comm.Dup()
        number = dup.toint()
        comm.barrier()
        assert MPI.Comm.fromint(number) == dup
        assert MPI.Comm.fromhandle(dup.handle).rank == comm.rank
        assert MPI.Datatype.fromhandle(MPI.INT.handle) == MPI.INT
        assert MPI.Comm.fromhandle(0) == MPI.COMM_NULL
        with pytest.raises(MPI.Exception):
            MPI.Datatype.fromhandle(number)

    run(main, 11)


def test_there_is_no_handle_of_fortran():
    """As with mpi4py where MPI lacks Fortran, and with a warning."""
    with pytest.warns(RuntimeWarning, match="py2f"):
        assert MPI.INT.py2f() == -1


def test_what_is_lacking_is_an_error_of_mpi():
    """A program that has another way catches it as MPI's exception, or as a NotImplementedError."""
    for kind in (MPI.Exception, NotImplementedError, UnsupportedError):
        with pytest.raises(kind, match="Open_port is not available"):
            MPI.Open_port()
    with pytest.raises(MPI.Exception) as caught:
        MPI.Session.Init()
    assert caught.value.Get_error_class() == MPI.ERR_UNSUPPORTED_OPERATION


def test_copies_are_pickled_as_copies():
    """And predefined objects as themselves."""
    for null in (
        MPI.COMM_NULL,
        MPI.INFO_NULL,
        MPI.INFO_ENV,
        MPI.MESSAGE_NULL,
        MPI.MESSAGE_NO_PROC,
        MPI.FILE_NULL,
    ):
        assert pickle.loads(pickle.dumps(null)) is null
        copy = pickle.loads(pickle.dumps(type(null)(null)))
        assert copy == null and copy is not null

    def main(comm):
        assert pickle.loads(pickle.dumps(comm)) is MPI.COMM_WORLD
        assert pickle.loads(pickle.dumps(MPI.Intracomm(comm))) == comm

    run(main, 2)


def test_types_by_their_properties():
    """Pairs of a value and an integer; types of Fortran by class and size."""
    assert MPI.Datatype.Get_value_index(MPI.DOUBLE, MPI.INT) == MPI.DOUBLE_INT
    assert MPI.Datatype.Get_value_index(MPI.DOUBLE, MPI.FLOAT) == MPI.DATATYPE_NULL
    assert MPI.Datatype.Match_size(MPI.TYPECLASS_REAL, 8).Get_size() == 8
    with pytest.raises(MPI.Exception):
        MPI.Datatype.Match_size(MPI.TYPECLASS_REAL, 7)


class OnGpu:
    """Memory of the host, under a GPU's protocol."""

    def __init__(self, array):
        self.array, self.__cuda_array_interface__ = array, array.__array_interface__


def test_memory_of_a_simulated_gpu(monkeypatch):
    """Without a GPU it is the host's; with one it must be copied first."""

    def main(comm):
        data = np.full(3, comm.rank)
        comm.Bcast(OnGpu(data), root=10)
        assert (data == 10).all()

    monkeypatch.setattr(memory, "gpu_here", lambda: False)
    run(main, 11)
    monkeypatch.setattr(memory, "gpu_here", lambda: True)
    with pytest.raises(SpecBufferError, match="on a GPU: copy it"):
        memory.flat(OnGpu(np.zeros(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MPI.Get_address(np.zeros(0)) == 0


def test_a_request_that_the_program_completes():
    """It takes part in waits with others; one that nobody completes is a deadlock with its name."""
    seen = []

    def main(comm):
        request = MPI.Grequest.Start(lambda status: status.Set_source(7), lambda: seen.append(comm.rank))
        assert not request.Test()
        send, status = comm.isend(1, comm.rank), MPI.Status()
        assert comm.recv(source=comm.rank) == 1
        request.complete("done")
        MPI.Request.Waitall([send, request], [MPI.Status(), status])
        assert status.source == 7 and not request

    run(main, 3)
    assert sorted(seen) == [0, 1, 2]
    with pytest.raises(Deadlock, match="Grequest, until its Complete"):
        run(lambda comm: MPI.Grequest.Start().Wait(), 2)
