"""Messages per second: 1,000 virtual ranks pass 4 KiB round a ring, compared with SimGrid if it is installed.

usage: python benchmarks/ring.py [RANKS] [ROUNDS]

Peers (Debian: apt-get install g++ libsimgrid-dev): SMPI, an unmodified C program with MPI_Sendrecv; S4U, actors in
C++ that pass a pointer instead of data. All alternate, several times. Times are processor times without start-up, so
that ratios hold on a busy machine. Also asserts the number of events and messages of each program.
"""

from __future__ import annotations

import gc
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spawnsim
from spawnsim import PhantomArray
from spawnsim.models.platform import Platform, load_platform
from spawnsim.virtual.mpi.requests import Request

NBYTES, REPEATS = 4096, 5
ARGUMENTS = ["-platform", "platform.xml", "-hostfile", "hosts", "--log=root.thres:error"]
PLATFORM_XML = """<?xml version="1.0"?><!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">
<platform version="4.1"><cluster id="c" prefix="n" suffix="" radical="0-{last}" speed="1Gf" bw="1.25GBps" lat="1us"/>
</platform>"""
SMPI_PROGRAM = """#include <mpi.h>
#include <stdlib.h>
int main(int argc, char **argv) {
  int rank, size, rounds = atoi(argv[1]), nbytes = atoi(argv[2]);
  char *out = calloc(1, nbytes), *in = calloc(1, nbytes);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  while (rounds--)
    MPI_Sendrecv(out, nbytes, MPI_BYTE, (rank + 1) % size, 0, in, nbytes, MPI_BYTE, (rank + size - 1) % size, 0,
                 MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Finalize();
}"""
S4U_PROGRAM = """#include <cstdlib>
#include <simgrid/s4u.hpp>
namespace sg = simgrid::s4u;
int main(int argc, char **argv) {
  sg::Engine engine(&argc, argv);
  const int rounds = atoi(argv[1]), nbytes = atoi(argv[2]), ranks = atoi(argv[3]);
  engine.load_platform("platform.xml");
  for (int i = 0; i < ranks; i++)
    sg::Actor::create("rank", engine.host_by_name("n" + std::to_string(i)), [=] {
      static int payload;
      auto *own = sg::Mailbox::by_name(std::to_string(i));
      auto *next = sg::Mailbox::by_name(std::to_string((i + 1) % ranks));
      for (int k = 0; k < rounds; k++) {
        auto sent = next->put_async(&payload, nbytes);
        own->get<int>();
        sent->wait();
      }
    });
  engine.run();
}"""


def array() -> Any:
    return np.zeros(NBYTES, np.uint8)


def sendrecv(comm: Any, rounds: int, make: Callable[[], Any] = array) -> None:
    out, into, right, left = _ring(comm, make)
    for _ in range(rounds):
        comm.Sendrecv(out, right, 0, into, left, 0)


def without_data(comm: Any, rounds: int) -> None:
    sendrecv(comm, rounds, lambda: PhantomArray(NBYTES, np.uint8))


def tensors(comm: Any, rounds: int) -> None:
    sendrecv(comm, rounds, lambda: torch.zeros(NBYTES // 4))


def send_recv(comm: Any, rounds: int) -> None:
    out, into, right, left = _ring(comm)
    for _ in range(rounds):
        comm.Send(out, right)
        comm.Recv(into, left, 0)


def isend_irecv(comm: Any, rounds: int) -> None:
    out, into, right, left = _ring(comm)
    for _ in range(rounds):
        Request.Waitall([comm.Irecv(into, left, 0), comm.Isend(out, right)])


def objects(comm: Any, rounds: int) -> None:
    out, _, right, left = _ring(comm)
    for _ in range(rounds):
        comm.sendrecv(out, right, 0, None, left, 0)


def _ring(comm: Any, make: Callable[[], Any] = array) -> tuple[Any, Any, int, int]:
    rank, size = comm.Get_rank(), comm.Get_size()
    return make(), make(), (rank + 1) % size, (rank - 1) % size


def platform(contention: str) -> Platform:
    """Return the default platform with another model of contention."""
    plain = load_platform("ethernet-10g")
    return replace(plain, network=replace(plain.network, contention=contention))  # type: ignore[type-var]


def ours(program: Callable[[Any, int], None], ranks: int, rounds: int, contention: str = "serial") -> float:
    """Return the processor seconds of a run; assert its number of events and messages."""
    # Collect the garbage of earlier runs first: it costs 0.1 s in some run, which may be the long or the short one.
    gc.collect()
    begin = time.process_time()
    run = spawnsim.run(lambda comm: program(comm, rounds), ranks=ranks, platform=platform(contention))
    spent = time.process_time() - begin
    totals = run.totals
    assert totals["messages"] == ranks * rounds
    assert totals["events"] == (ranks * rounds if program is isend_irecv else 2 * ranks * rounds)
    return spent


def peer(command: list[str], folder: Path) -> float:
    """Return the processor seconds of another program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def peers(folder: Path, ranks: int) -> dict[str, Callable[[int], float]]:
    """Build the available peers; return functions: rounds -> processor seconds."""
    (folder / "platform.xml").write_text(PLATFORM_XML.format(last=ranks - 1))
    (folder / "hosts").write_text("\n".join(f"n{i}" for i in range(ranks)))
    (folder / "ring.c").write_text(SMPI_PROGRAM)
    (folder / "ring.cpp").write_text(S4U_PROGRAM)
    built: dict[str, Callable[[int], float]] = {}
    if shutil.which("smpicc"):
        peer(["smpicc", "-O2", "ring.c", "-o", "smpi"], folder)
        run = ["smpirun", "-np", str(ranks), *ARGUMENTS, "--cfg=smpi/simulate-computation:no", "./smpi"]
        built["SMPI in C"] = lambda rounds: peer([*run, str(rounds), str(NBYTES)], folder)
    if shutil.which("smpicc") and shutil.which("g++"):
        peer(["g++", "-O2", "-std=c++17", "ring.cpp", "-o", "s4u", "-lsimgrid"], folder)
        built["S4U in C++, no data"] = lambda rounds: peer(
            ["./s4u", str(rounds), str(NBYTES), str(ranks), "--log=root.thres:error"], folder
        )
    return built


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 50
    contenders: dict[str, Callable[[int], float]] = {
        "Sendrecv": lambda n: ours(sendrecv, ranks, n),
        "Sendrecv, no data": lambda n: ours(without_data, ranks, n),
        "Sendrecv, tensors": lambda n: ours(tensors, ranks, n),
        "Send, Recv": lambda n: ours(send_recv, ranks, n),
        "Irecv, Isend, Waitall": lambda n: ours(isend_irecv, ranks, n),
        "sendrecv (pickled)": lambda n: ours(objects, ranks, n),
        'Sendrecv, contention "none"': lambda n: ours(sendrecv, ranks, n, "none"),
        'Sendrecv, contention "fifo"': lambda n: ours(sendrecv, ranks, n, "fifo"),
    }
    with tempfile.TemporaryDirectory() as name:
        contenders |= peers(Path(name), ranks)
        spent: dict[str, list[float]] = {each: [] for each in contenders}
        for _ in range(REPEATS):
            for each, call in contenders.items():
                spent[each].append(call(rounds + 1) - call(1))
    speed = {each: ranks * rounds / statistics.median(seconds) for each, seconds in spent.items()}
    yardsticks = [each for each in ("SMPI in C", "S4U in C++, no data") if each in speed]
    print(
        f"{ranks} ranks, {rounds} rounds, {NBYTES} B: messages a second of processor time; medians of {REPEATS}"
    )
    for each, rate in speed.items():
        ratios = "   ".join(f"{rate / speed[other]:5.2f} x {other}" for other in yardsticks)
        print(f"{each:<30}{rate:10,.0f}   {ratios}")


if __name__ == "__main__":
    main()
