"""asyncio in unmodified programs: a loop for each rank, in virtual time, on both carriers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import spawnsim

Printed = Callable[..., list[str]]
BEGIN = (
    "from mpi4py import MPI\nimport asyncio, os\ncomm = MPI.COMM_WORLD\nrank, size = comm.rank, comm.size\n"
)


@pytest.fixture(params=["greenlets", "threads"])
def printed(request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run a program and return its lines, sorted."""

    def start(text: str, ranks: int = 3) -> list[str]:
        program = tmp_path / "program.py"
        program.write_text(BEGIN + text)
        spawnsim.run(program, ranks=ranks, options={"carrier": request.param, "prefix": False})
        return sorted(capsys.readouterr().out.splitlines())

    return start


def test_coroutines_poll_mpi_and_sleep_in_virtual_time(printed: Printed) -> None:
    """As on real ranks, and an hour takes no time."""
    text = """
async def receive(source):
    request = comm.irecv(source=source)
    while True:
        over, value = request.test()
        if over:
            return value
        await asyncio.sleep(0.001)

async def main():
    sent = comm.isend(rank, (rank + 1) % size)
    heard = await asyncio.gather(receive((rank - 1) % size), asyncio.sleep(3600.0, "slept"))
    sent.wait()
    print(rank, heard, round(MPI.Wtime()))

asyncio.run(main())
"""
    assert printed(text) == [f"{rank} [{(rank - 1) % 3}, 'slept'] 3600" for rank in range(3)]


def test_ranks_wait_for_each_other_within_their_loops(printed: Printed) -> None:
    """A blocking call amid a coroutine: each rank's loop, and its hooks of asynchronous generators, stay its own."""
    text = """
async def counted():
    for number in range(3):
        yield comm.allreduce(number)

async def main():
    loop = asyncio.get_running_loop()
    found = [each async for each in counted()]
    await asyncio.sleep(rank)
    comm.Barrier()
    print(rank, found, loop is asyncio.get_running_loop())

asyncio.run(main())
asyncio.run(main())
"""
    assert printed(text) == sorted([f"{rank} [0, 3, 6] True" for rank in range(3)] * 2)
    with pytest.raises(RuntimeError, match="no running event loop"):
        asyncio.get_running_loop()
    assert tuple(sys.get_asyncgen_hooks()) == (None, None)
    assert asyncio.run(asyncio.sleep(0.0, "outside")) == "outside"


def test_time_outs_and_files_of_loops(printed: Printed) -> None:
    """A time-out is virtual; what is in a pipe already is read first."""
    text = """
async def main():
    try:
        await asyncio.wait_for(asyncio.Event().wait(), 60.0)
    except TimeoutError:
        print(rank, "late", round(MPI.Wtime()))
    reading, writing = os.pipe()
    os.write(writing, b"x")
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(reading, ready.set)
    await asyncio.wait_for(ready.wait(), 60.0)
    asyncio.get_running_loop().remove_reader(reading)
    print(rank, "read", round(MPI.Wtime()))

asyncio.run(main())
"""
    assert printed(text, 2) == ["0 late 60", "0 read 60", "1 late 60", "1 read 60"]
