"""Abort ends the run at once: no `except` and no `finally` of the program keeps it alive."""

from __future__ import annotations

from pathlib import Path

import pytest

import spawnsim
from spawnsim.cli import main
from spawnsim.errors import RankError

HEAD = "import sys\nfrom mpi4py import MPI\nc = MPI.COMM_WORLD\n"
CATCHING = {
    "finally": """
    try:
        c.Abort(3)
    finally:
        sys.exit(0)
""",
    "except": """
    try:
        c.Abort(3)
    except BaseException:
        c.recv(source=0)
""",
    "generator": """
    def g():
        try:
            yield c.Abort(3)
        finally:
            c.barrier()
    next(g())
""",
    "with": """
    import contextlib
    with contextlib.suppress(BaseException):
        c.Abort(3)
    c.barrier()
""",
}


@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
@pytest.mark.parametrize("how", CATCHING)
def test_a_program_cannot_catch_it(
    tmp_path: Path, how: str, carrier: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is that of the run; the calls that follow it communicate no more."""
    file = tmp_path / "program.py"
    file.write_text(f"{HEAD}if c.rank == 1:{CATCHING[how]}c.recv(source=1)\n")
    assert main(["run", str(file), "--ranks", "11", "--carrier", carrier, "--quiet"]) == 3
    assert "rank 1 called Abort(3)" in capsys.readouterr().err


def test_a_communicator_of_main_aborts_alike() -> None:
    """A `main(comm)` that catches everything."""

    def program(comm):
        try:
            comm.Abort(5)
        except BaseException:  # noqa: BLE001
            comm.record(iteration=0)

    with pytest.raises(RankError, match=r"rank 0 called Abort\(5\)"):
        spawnsim.run(program, ranks=2)
