"""MPI-IO on virtual ranks: accesses in the order of virtual time, and errors."""

import pytest
from support.virtual_run import run

from spawnsim import errors
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.scripts import run_program

CREATE = MPI.MODE_CREATE | MPI.MODE_RDWR


def test_accesses_happen_in_the_order_of_virtual_time(tmp_path):
    """Of two writes to one place the later one stays, and a read sees those before it; ranks run in another order."""
    seen = {}

    def main(comm):
        file = MPI.File.Open(comm, tmp_path / "log", CREATE)
        comm.Barrier()
        comm.clock.sleep(12.0 - comm.rank)
        file.Write_shared(b"%02d" % comm.rank)
        file.Write_at(100, b"%02d" % comm.rank)
        comm.clock.sleep(0.5)
        last = bytearray(2)
        file.Read_at(100, last)
        seen[comm.rank] = bytes(last)
        file.Close()

    run(main, 12)
    data = (tmp_path / "log").read_bytes()
    assert data[:24] == b"".join(b"%02d" % rank for rank in reversed(range(12)))
    assert data[100:] == b"00"
    assert seen == {rank: b"%02d" % rank for rank in range(12)}


def test_data_arrive_with_the_end_of_the_request(tmp_path):
    """A non-blocking read leaves the buffer alone until then; a collective one waits for all ranks."""
    (tmp_path / "data").write_bytes(b"abcdef")

    def main(comm):
        file, buf = MPI.File.Open(comm, tmp_path / "data"), bytearray(3)
        comm.Barrier()
        if comm.rank:
            comm.clock.sleep(2.0)
        began_s = comm.clock.now()
        request = file.Iread_at_all(3 * (comm.rank % 2), buf)
        assert bytes(buf) == bytes(3)
        request.Wait()
        assert bytes(buf) == (b"def" if comm.rank % 2 else b"abc")
        assert comm.rank or comm.clock.now() > began_s + 1.9
        file.Close()

    run(main, 3)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda comm, path: MPI.File.Open(comm, path / f"{comm.rank}", CREATE), MPI.ERR_NOT_SAME),
        (lambda comm, path: MPI.File.Open(comm, path / "old", CREATE | MPI.MODE_EXCL), MPI.ERR_FILE_EXISTS),
        (lambda comm, path: MPI.File.Open(comm, path / "no" / "such"), MPI.ERR_NO_SUCH_FILE),
        (lambda comm, path: MPI.File.Open(comm, path / "old").Set_size(4), MPI.ERR_IO),
        (
            lambda comm, path: MPI.File.Open(comm, path / "old", MPI.MODE_RDWR).Set_size(comm.rank),
            MPI.ERR_NOT_SAME,
        ),
        (lambda comm, path: MPI.File.Open(comm, path / "old").Seek_shared(-1), MPI.ERR_ARG),
        (lambda comm, path: MPI.File.Open(comm, path / "old").Read_all_end(bytearray(1)), MPI.ERR_OTHER),
        (
            lambda comm, path: MPI.File.Open(comm, path / "old").Set_view(0, MPI.INT, MPI.BYTE),
            MPI.ERR_ARG,
        ),
        (
            lambda comm, path: MPI.File.Open(comm, path / "old").Set_view(0, MPI.INT, None, "external32"),
            MPI.ERR_UNSUPPORTED_DATAREP,
        ),
        (
            lambda comm, path: MPI.File.Open(comm, path / "old", MPI.MODE_RDONLY | MPI.MODE_SEQUENTIAL).Read(
                b""
            ),
            MPI.ERR_UNSUPPORTED_OPERATION,
        ),
    ],
)
def test_errors_have_their_class_on_all_ranks(wrong, code, tmp_path):
    """No rank is left waiting: an error of a collective call is raised on each."""
    (tmp_path / "old").write_bytes(b"old")

    def main(comm):
        with pytest.raises(MPI.Exception) as caught:
            wrong(comm, tmp_path)
        assert caught.value.Get_error_class() == code

    run(main, 3)


def test_the_program_ends_where_a_file_is_read_only_for_all(tmp_path):
    """An uncaught error names the call, the file, the rank and the line."""
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(errors.UsageError, match=r"Write_at: .*old is open for reading only"):
        run(lambda comm: MPI.File.Open(comm, tmp_path / "old").Write_at(0, b"x"), 2)


def test_an_open_file_is_reported(tmp_path):
    """As are requests and windows, at the end of an unmodified program."""
    path, warnings = tmp_path / "opens.py", []
    path.write_text(
        "from mpi4py import MPI\n"
        f"file = MPI.File.Open(MPI.COMM_WORLD, {str(tmp_path / 'data')!r}, MPI.MODE_CREATE | MPI.MODE_WRONLY)\n"
    )
    run_program(path, [], Scenario(2), recorder=Recorder(), warn=warnings)
    assert any("2 files were never closed: 2 × " in line for line in warnings), warnings
