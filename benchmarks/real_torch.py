"""`TorchComm` on gloo against torch's own calls.

`python -m spawnsim.real.launch.forked 2 benchmarks/real_torch.py [WORDS]`

Both alternate in blocks of a few calls, in both orders, so that both see the same machine state; the medians over all
blocks are printed. WORDS choose parts: collectives, messages, windows.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from spawnsim.comm import IN_PLACE, SUM
from spawnsim.real.torch import TorchComm, guarded, world

SIZES = ((1, 10, 200), (10_000, 10, 60), (10_000_000, 1, 25))
"""float32 in a call, calls in a block, blocks of each kind."""
LENGTH = 10_000_000  # float32 that a reader fetches
BATCH_S, FETCHES = 0.05, 15

Call = Callable[[], object]


def clocked(call: Call, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def versus(theirs: Call, ours: Call, calls: int, blocks: int) -> tuple[float, float, float]:
    """Return torch's and our median seconds per call, and the speed-up of ours (median of paired blocks)."""
    pairs = []
    for block in range(blocks + 2):
        if block % 2:
            first = clocked(theirs, calls)
            pairs.append((first, clocked(ours, calls)))
        else:
            first = clocked(ours, calls)
            pairs.append((clocked(theirs, calls), first))
    kept = pairs[2:]
    ratio = statistics.median(a / b for a, b in kept)
    return statistics.median(a for a, _ in kept), statistics.median(b for _, b in kept), ratio


def say(comm: TorchComm, what: str, found: tuple[float, float, float], wanted: float | None = None) -> None:
    if comm.rank == 0:
        goal = "" if wanted is None else f" (wanted {wanted})"
        print(
            f"{what}: torch {found[0] * 1e6:9.0f} us, ours {found[1] * 1e6:9.0f} us, {found[2]:.2f} ×{goal}",
            flush=True,
        )


def kinds(comm: TorchComm, length: int) -> dict[str, tuple[Call, Call]]:
    """Return the collectives of `length` float32 that torch also has: torch's call and ours."""
    tensor, into, other = torch.zeros(length), torch.zeros(length * comm.size), torch.zeros(length)
    return {
        "Allreduce": (lambda: dist.all_reduce(tensor), lambda: comm.Allreduce(IN_PLACE, tensor)),
        "Bcast": (lambda: dist.broadcast(tensor, 0), lambda: comm.Bcast(tensor)),
        "Allgather": (
            lambda: dist.all_gather_into_tensor(into, tensor),
            lambda: comm.Allgather(tensor, into),
        ),
        "Reduce": (lambda: dist.reduce(other, 0), lambda: comm.Reduce(tensor, other, SUM)),
    }


def collectives(comm: TorchComm) -> None:
    """Measure every size of torch's collectives, and Barrier."""
    for length, calls, blocks in SIZES:
        for name, (theirs, ours) in kinds(comm, length).items():
            wanted = 0.95 if name == "Allreduce" else None
            say(comm, f"{name} of {length:,} float32", versus(theirs, ours, calls, blocks), wanted)
    say(comm, "Barrier", versus(dist.barrier, comm.Barrier, 10, 100))


def messages(comm: TorchComm) -> None:
    """Measure a ping-pong between ranks 0 and 1: half a round trip, and the bandwidth."""
    for length, calls, blocks in SIZES:
        tensor, peer = torch.zeros(length), 1 - comm.rank

        def theirs() -> None:
            order = (dist.send, dist.recv) if comm.rank == 0 else (dist.recv, dist.send)
            for call in order:
                call(tensor, peer)  # noqa: B023  called before the next round

        def ours() -> None:
            if comm.rank == 0:
                comm.Isend(tensor, peer).Wait()  # noqa: B023
                comm.Irecv(tensor, peer).Wait()  # noqa: B023
            else:
                comm.Irecv(tensor, peer).Wait()  # noqa: B023
                comm.Isend(tensor, peer).Wait()  # noqa: B023

        if comm.rank < 2:
            found = versus(theirs, ours, calls, blocks)
            rates = " and ".join(f"{4 * length / (one / 2) / 1e9:.2f}" for one in found[:2])
            say(comm, f"ping-pong of {length:,} float32 ({rates} GB/s)", found)
        comm.Barrier()


def windows(comm: TorchComm) -> None:
    """Fetch 10 M float32 from a donor: at rest against a raw receive, then while the donor computes."""
    window, into = comm.Win.Allocate(4 * LENGTH), torch.zeros(LENGTH)
    memory = torch.from_numpy(window.tomemory()).view(torch.float32)

    def theirs() -> None:
        if comm.rank == 0:
            comm.send(None, 1)
            dist.recv(into, 1)
        else:
            comm.recv(source=0)
            dist.send(memory, 0)

    def ours() -> None:
        if comm.rank == 0:
            window.Get(into, 1)
            window.Flush(1)
            comm.send(None, 1)
        else:
            comm.recv(source=0)

    window.Lock_all()
    if comm.rank < 2:
        found = versus(theirs, ours, 1, FETCHES)
        rates = " and ".join(f"{4 * LENGTH / one / 1e9:.2f}" for one in found[:2])
        say(comm, f"fetch of {LENGTH:,} float32 ({rates} GB/s)", found)
        busy_donor(comm, lambda: (window.Get(into, 1), window.Flush(1)), found[1])
    comm.Barrier()
    window.Unlock_all()
    window.Free()


def busy_donor(comm: TorchComm, fetch: Call, transfer_s: float) -> None:
    """Print a reader's waits, and the cost of serving for a donor that computes in blocks of 50 ms."""
    table = torch.ones(300, 300)
    multiply = clocked(lambda: table @ table, 200)
    steps = int(BATCH_S / multiply)

    def block() -> None:
        with comm.compute():
            for _ in range(steps):
                table @ table

    if comm.rank == 0:
        comm.recv(source=1)
        waits = []
        for _ in range(FETCHES):
            waits.append(clocked(fetch, 1))
            time.sleep(2 * BATCH_S)
        comm.send("over", 1)
        undisturbed, disturbed = comm.recv(source=1)
        spent = (disturbed - undisturbed) / FETCHES
        text = f"median {statistics.median(waits) * 1e3:.0f} ms, longest {max(waits) * 1e3:.0f} ms"
        bound = 60 + transfer_s * 1e3
        print(
            f"reader's wait, donor in blocks of {BATCH_S * 1e3:.0f} ms: {text} (wanted under {bound:.0f});",
            end=" ",
        )
        print(f"each fetch costs the donor {spent * 1e3:.1f} ms of processor time")
    else:
        begin = time.thread_time()
        for _ in range(40):
            block()
        alone = (time.thread_time() - begin) / 40
        comm.send("ready", 0)
        begin, blocks = time.process_time(), 0
        over = comm.irecv(source=0)
        while not over.test()[0]:
            block()
            blocks += 1
        comm.send((alone * blocks, time.process_time() - begin), 0)


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or ["collectives", "messages", "windows"]
    comm = world()
    with guarded(comm):
        for part in (collectives, messages, windows):
            if part.__name__ in chosen:
                part(comm)


if __name__ == "__main__":
    main()
