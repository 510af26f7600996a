"""The digest covers what ranks send, print and record: one number that differs makes another digest."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim.comm.datatypes import BYTE, DOUBLE
from spawnsim.comm.layouts import BF16
from spawnsim.comm.ops import NO_OP
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual import digest as digests
from spawnsim.virtual.digest import SHORT_NBYTES, RankDigest, checksum
from spawnsim.virtual.scripts import run_program

RANKS, ODD = 12, 7  # the rank whose number differs
KIB, MIB = 1024, 1024**2
PROGRAMS = Path(__file__).parent.parent / "programs" / "torchrun"


def digest(main: Any, **how: Any) -> str:
    """Return the digest of a run on twelve ranks."""
    return str(spawnsim.run(main, ranks=RANKS, **how).totals["digest"])


def vector(number: float, count: int = 10, dtype: Any = np.float64, place: int = 3) -> Any:
    """Return numbers of which one is given."""
    data = np.arange(count).astype(dtype)
    data[place] = number
    return data


# -- what is sent ----------------------------------------------------------------------------------------------


def ring(make: Any) -> Any:
    """Return a program in which each rank sends what `make(number)` returns to its right."""

    def send(comm: Any, number: float) -> None:
        data = make(number)
        request = comm.Isend(data, (comm.rank + 1) % comm.size)
        comm.Recv(data.copy() if isinstance(data, np.ndarray) else data.clone(), (comm.rank - 1) % comm.size)
        request.Wait()

    return send


def window(act: Any) -> Any:
    """Return a program in which each rank accesses its right neighbour's part; `act(window, target, data)`."""

    def access(comm: Any, number: float) -> None:
        part = comm.Win.Allocate(80, 8, comm=comm)
        part.Lock((comm.rank + 1) % comm.size)
        act(part, (comm.rank + 1) % comm.size, vector(number))
        part.Unlock((comm.rank + 1) % comm.size)
        part.Free()

    return access


def reads(comm: Any, number: float) -> None:
    """Read what the target has stored in its own memory, which no message brought there."""
    exposed, found = vector(number), np.zeros(10)
    part = comm.Win.Create(exposed, 8, comm=comm)
    comm.Barrier()
    part.Lock((comm.rank + 1) % comm.size)
    part.Get(found, (comm.rank + 1) % comm.size)
    part.Unlock((comm.rank + 1) % comm.size)
    part.Free()


def request_reads(comm: Any, number: float) -> None:
    """Read likewise, by a request."""
    exposed, found = vector(number), np.zeros(10)
    part = comm.Win.Create(exposed, 8, comm=comm)
    part.Fence()
    part.Rget(found, (comm.rank + 1) % comm.size).Wait()
    part.Fence()
    part.Free()


def persistent(comm: Any, number: float) -> None:
    """Send a buffer by a persistent synchronous request."""
    request = comm.Ssend_init(vector(number), (comm.rank + 1) % comm.size)
    request.Start()
    comm.Recv(np.zeros(10), (comm.rank - 1) % comm.size)
    request.Wait()


def objects(comm: Any, number: float) -> None:
    """Send an object to the right."""
    comm.send({"loss": number}, (comm.rank + 1) % comm.size)
    comm.recv(source=(comm.rank - 1) % comm.size)


def neighbours(comm: Any, number: float) -> None:
    """Exchange with the neighbours on a ring."""
    grid = comm.Create_cart([comm.size], periods=[True])
    grid.Neighbor_alltoall(vector(number, 2, place=1), np.zeros(2))


def intercommunicator(comm: Any, number: float) -> None:
    """Exchange a vector with the rank of the other group."""
    half = comm.Split(comm.rank % 2)
    other = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    other.Sendrecv(vector(number), other.rank, 0, np.zeros(10), other.rank)


def strided(comm: Any, number: float) -> None:
    """Send every third number."""
    every_third = DOUBLE.Create_vector(4, 1, 3).Commit()
    request = comm.Isend([vector(number), 1, every_third], (comm.rank + 1) % comm.size)
    comm.Recv(np.zeros(4), (comm.rank - 1) % comm.size)
    request.Wait()


def lent(name: str) -> Any:
    """Return a program that calls a collective of 100,000 numbers."""

    def call(comm: Any, number: float) -> None:
        getattr(comm, name)(vector(number, 100_000, np.float32), np.zeros(100_000, np.float32))

    return call


def tensor(dtype: torch.dtype) -> Any:
    """Return a program in which each rank sends a large tensor to the right."""
    return ring(lambda number: torch.from_numpy(vector(number, 40_000, np.float32)).to(dtype))


WAYS = {
    "eager": ring(vector),
    "rendezvous": ring(lambda number: vector(number, 20_000)),
    "1 MB": ring(lambda number: vector(number, 125_000, place=124_999)),
    "1 MB, odd end": ring(lambda number: vector(number, MIB + 5, np.uint8, place=-1)),
    "int64": ring(lambda number: vector(number, 1, np.int64, place=0)),
    "float16": ring(lambda number: vector(number, 9, np.float16)),
    "long double": ring(lambda number: vector(number, 9, np.longdouble)),
    "complex": ring(lambda number: vector(number, 9_000, np.complex64)),
    "bfloat16": tensor(torch.bfloat16),
    "float32 tensor": tensor(torch.float32),
    "0-dim": ring(lambda number: np.array(number)),
    "derived type": strided,
    "object": objects,
    "persistent": persistent,
    "bcast": lambda comm, number: comm.bcast(number, root=ODD),
    "Bcast": lambda comm, number: comm.Bcast(vector(number), root=ODD),
    "gather": lambda comm, number: comm.gather(number),
    "Gather": lambda comm, number: comm.Gather(vector(number), np.zeros(10 * RANKS)),
    "scatter": lambda comm, number: comm.scatter([number] * RANKS, root=ODD),
    "Scatter": lambda comm, number: comm.Scatter(vector(number, 10 * RANKS, place=99), np.zeros(10), root=ODD),
    "allgather": lambda comm, number: comm.allgather(number),
    "alltoall": lambda comm, number: comm.alltoall([0.0, number] + [0.0] * (RANKS - 2)),
    "Alltoall": lambda comm, number: comm.Alltoall(vector(number, 10 * RANKS), np.zeros(10 * RANKS)),
    "Iallreduce": lambda comm, number: comm.Iallreduce(vector(number), np.zeros(10)).Wait(),
    "allreduce": lambda comm, number: comm.allreduce(number),
    "Allreduce": lent("Allreduce"),
    "Scan": lent("Scan"),
    "Reduce": lent("Reduce"),
    "Neighbor_alltoall": neighbours,
    "intercommunicator": intercommunicator,
    "Put": window(lambda part, target, data: part.Put(data, target)),
    "Accumulate": window(lambda part, target, data: part.Accumulate(data, target)),
    "Get_accumulate": window(lambda part, target, data: part.Get_accumulate(data, data.copy(), target)),
    "Fetch_and_op": window(lambda part, target, data: part.Fetch_and_op(data[3:4], np.zeros(1), target)),
    "Compare_and_swap": window(
        lambda part, target, data: part.Compare_and_swap(
            data.view(np.int64)[3:4], np.zeros(1, np.int64), np.zeros(1, np.int64), target
        )
    ),
    "Get": reads,
    "Rget": request_reads,
    "row": lambda comm, number: comm.record(loss=number),
    "event": lambda comm, number: comm.record.event("judged", loss=number),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_one_number_makes_another_digest(way: str) -> None:
    """On one rank of twelve, one number differs; the same twice is equal."""

    def found(number: float) -> str:
        return digest(lambda comm: WAYS[way](comm, number if comm.rank == ODD else 1.0))

    assert found(2.0) != found(3.0)
    assert found(2.0) == found(2.0)


# -- what is not sent --------------------------------------------------------------------------------------------


def test_what_does_not_travel_does_not_count() -> None:
    """Gaps of derived types and of Alltoallv, padding, and what a receiving buffer held."""

    def main(comm: Any, chance: int) -> None:
        memory = np.full(10, chance, np.float64)
        memory[::3] = 1.0
        every_third = DOUBLE.Create_vector(4, 1, 3).Commit()
        request = comm.Isend([memory, 1, every_third], (comm.rank + 1) % comm.size)
        comm.Recv(np.full(4, chance, np.float64), (comm.rank - 1) % comm.size)
        request.Wait()
        spread = np.full(2 * RANKS, chance, np.float64)
        spread[::2] = comm.rank
        places = [2 * rank for rank in range(RANKS)]
        comm.Alltoallv([spread, [1] * RANKS, places, DOUBLE], np.full(RANKS, chance, np.float64))
        wide = np.frombuffer(bytearray([chance]) * 16 * 5, np.longdouble)
        wide.view(np.uint8).reshape(5, 16)[:, :10] = 0x3F  # the other six bytes are no part of the number
        request = comm.Isend(wide, (comm.rank + 1) % comm.size)
        comm.Recv(np.zeros(5, np.longdouble), (comm.rank - 1) % comm.size)
        request.Wait()
        whole = np.full(100, chance, np.uint8)
        comm.Bcast([whole, 0, BYTE], root=0)
        comm.Reduce(np.ones(3), np.full(3, chance, np.float64) if comm.rank == 0 else None, root=0)

    assert digest(lambda comm: main(comm, 0)) == digest(lambda comm: main(comm, 0xA5))


def test_windows_are_made_of_memory_that_does_not_count() -> None:
    """Making a window tells the others where its memory is, and sends nothing of it. NO_OP sends no origin."""

    def main(comm: Any, chance: float) -> None:
        exposed = np.full(10_000, chance)
        part = comm.Win.Create(exposed, 8, comm=comm)
        exposed[:] = 1.0
        part.Fence()
        part.Get_accumulate(np.full(1, chance), np.full(1, chance), comm.rank, op=NO_OP)
        part.Fence()
        part.Free()

    assert digest(lambda comm: main(comm, 0.0)) == digest(lambda comm: main(comm, 5.0))


def test_threads_of_torch_do_not_matter() -> None:
    """Contents are summed up exactly, in the same order always."""
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(
                digest(lambda comm: tensor(torch.bfloat16)(comm, 2.0) or lent("Allreduce")(comm, 2.0))
            )
    finally:
        torch.set_num_threads(threads)
    assert len(set(found)) == 1


WHOLE = """
import sys, torch, spawnsim
from spawnsim import policies

def build(rng):
    layers = [torch.nn.Linear(8, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 1)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)

def main(comm, name):
    model, optimizer = build(comm.rng)
    make = {
        "averaging": lambda: policies.AverageAllPolicy(2),
        "clock": lambda: policies.AsyncModelAveragePolicy(sync_interval_ms=20),
        "groups": lambda: policies.DecentralizedAveragingPolicy(average_every=3, target_group_size=4),
        "selective": lambda: policies.AsyncSelectiveAveragingPolicy(lambda: build(comm.rng), average_every=3),
        "one-sided": lambda: policies.OneSidedSelectiveAveragingPolicy(
            lambda: build(comm.rng), model=model, average_every=3
        ),
    }
    policy = make[name]()
    for iteration in range(8):
        with comm.compute(0.01):
            metric = float(comm.rng("metric").random())
        model, optimizer, info = policy(iteration, model, optimizer, local_metric=metric, group=comm)
    policy.shutdown()

for name in ("averaging", "clock", "groups", "selective", "one-sided"):
    print("digest", name, spawnsim.run(main, ranks=12, parameters={"name": name}).totals["digest"])
for name, ranks in (("messages", 11), ("ddp", 3)):  # unmodified ones of torch.distributed
    run = spawnsim.run(f"{sys.argv[1]}/{name}.py", ranks=ranks, seed=3)
    print("digest", name, run.totals["digest"])
"""


@pytest.fixture(scope="module")
def processes() -> list[dict[str, str]]:
    """The digests of training programs in two processes, with other contents of fresh memory, and other hashes."""
    found = []
    for byte in (85, 170):
        done = subprocess.run(
            [sys.executable, "-c", WHOLE, PROGRAMS],
            env=os.environ | {"MALLOC_PERTURB_": str(byte), "PYTHONHASHSEED": str(byte)},
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        lines = (line.split() for line in done.stdout.splitlines())
        found.append({line[1]: line[2] for line in lines if line[:1] == ["digest"]})
    return found


def test_the_library_sends_no_uninitialised_memory(processes: list[dict[str, str]]) -> None:
    """Messages of every policy are the same whatever fresh memory holds."""
    names = ["averaging", "clock", "groups", "selective", "one-sided"]
    one, other = ([each[name] for name in names] for each in processes)
    assert one == other
    assert len(set(one)) == 5


@pytest.mark.parametrize("name", ["messages", "ddp"])
def test_unmodified_programs_of_torch_have_one_digest(name: str, processes: list[dict[str, str]]) -> None:
    """Whatever the hashes of texts; pickled objects hold tensors."""
    one, other = (each[name] for each in processes)
    assert one == other


# -- the checksum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 28, 4096, SHORT_NBYTES])
def test_another_library_makes_the_same_checksum(nbytes):
    """Digests may not depend on whether `spawnsim[fast]` is installed."""
    data = np.random.default_rng(nbytes).bytes(nbytes)
    for start in (0, 1, 2**32 - 1):
        assert digests.crc32(data, start) == crc32(data, start)
    assert digests.crc32(np.frombuffer(data, np.uint8), 5) == crc32(data, 5)


@pytest.mark.parametrize("nbytes", [1, 7, 8, SHORT_NBYTES, SHORT_NBYTES + 1, 3 * SHORT_NBYTES + 5, 70 * KIB])
def test_a_changed_bit_anywhere_changes_the_checksum(nbytes: int) -> None:
    """First and last bytes, and some between, in each bit."""
    raw = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    places = sorted({*range(min(nbytes, 20)), *range(max(nbytes - 20, 0), nbytes), *range(0, nbytes, 997)})
    found = {checksum(raw)}
    for place in places:
        for bit in range(8):
            raw[place] ^= 1 << bit
            found.add(checksum(raw))
            raw[place] ^= 1 << bit
    assert len(found) == 1 + 8 * len(places)


def test_words_that_change_places_change_the_checksum() -> None:
    """Above 8 KiB words are added up; rows of any power of two words, swapped, still show."""
    data = np.random.default_rng(1).normal(size=1 << 15)
    found = [checksum(data)]
    for power in range(14):
        swapped = data.copy()
        swapped[0], swapped[1 << power] = data[1 << power], data[0]
        found.append(checksum(swapped))
        rows = data.reshape(-1, 1 << power).copy()
        rows[[0, 1]] = rows[[1, 0]]
        found.append(checksum(rows.reshape(-1)))
    assert len(set(found)) == len(found) - 1  # at power 0 both swap the same two words


def test_equal_contents_have_equal_checksums() -> None:
    """Bytes, arrays of any dtype and shape, aligned or not, behind the same start."""
    for nbytes in (16, 64 * KIB):
        raw = np.random.default_rng(2).bytes(nbytes)
        same = [
            raw,
            bytearray(raw),
            memoryview(raw),
            np.frombuffer(raw),
            np.frombuffer(raw, np.int16).reshape(2, -1),
        ]
        same += [
            np.frombuffer(raw, BF16),
            np.frombuffer(b"-" + raw, np.uint8)[1:],
            np.repeat(np.frombuffer(raw), 2)[::2],
        ]
        assert len({checksum(each, 5) for each in same}) == 1
        assert checksum(raw, 5) != checksum(raw, 6)


def test_lists_tell_where_one_member_ends() -> None:
    """The same bytes divided in another way, or for other neighbours, are other contents."""
    found = [
        checksum(each)
        for each in (
            [b"ab", b"c"],
            [b"a", b"bc"],
            [b"abc"],
            [b"abc", None],
            {(1, 0): b"abc"},
            {(2, 0): b"abc"},
        )
    ]
    assert all(one != other for one, other in pairwise(sorted(found)))
    assert checksum((b"abc",), 3) == checksum(None, 3) == 3


# -- whole programs ----------------------------------------------------------------------------------------------


def program(path: Path, text: str) -> str:
    """Return the digest of a whole program."""
    path.write_text(f"import sys\nfrom mpi4py import MPI\ncomm = MPI.COMM_WORLD\n{text}\n")
    return run_program(path, [], Scenario(RANKS), recorder=Recorder()).digest


def test_printed_lines_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One character on one rank makes another digest; in how many pieces it is written does not, nor does stderr."""
    path = tmp_path / "prints.py"
    text = f"print('loss', 1 + (comm.rank == {ODD}) * NUMBER)"
    assert program(path, text.replace("NUMBER", "2")) == program(path, text.replace("NUMBER", "2"))
    assert program(path, text.replace("NUMBER", "2")) != program(path, text.replace("NUMBER", "3"))
    whole = program(path, "sys.stdout.write('ab\\ncd')")
    assert whole == program(
        path, "sys.stdout.write('a'); print('b', file=sys.stderr); sys.stdout.write('b\\ncd')"
    )
    assert whole == program(path, "sys.stdout.buffer.write(b'ab\\ncd')")
    assert whole != program(path, "sys.stdout.write('ab\\nce')")
    assert "[rank 7] ce" in capsys.readouterr().out


def test_the_command_line_fixes_the_order_of_sets(tmp_path: Path) -> None:
    """A set of texts is pickled and printed alike in two processes."""
    path = tmp_path / "sets.py"
    path.write_text(
        "from mpi4py import MPI\nnames = {f'layer{i}' for i in range(40)}\nprint(MPI.COMM_WORLD.bcast(names))\n"
    )
    command = [sys.executable, "-m", "spawnsim", "run", str(path), "--ranks", "12", "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    runs = [subprocess.run(command, capture_output=True, env=environment, check=True) for _ in range(2)]
    one, other = (json.loads(each.stdout.splitlines()[-1])["digest"] for each in runs)
    assert one == other


def test_pickled_tensors_are_their_values_alone() -> None:
    """Pickles of torch name storages by address; neither contents nor lengths of what is sent may depend on that."""
    held = []

    def main(comm: Any) -> None:
        held.append([torch.zeros(100 + comm.rank) for _ in range(len(held))])  # other addresses in each run
        model = torch.nn.Linear(300, 10)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.5)
        state = {
            "model": model.state_dict(),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "view": torch.ones(9)[::2],
        }
        found = comm.bcast(state if comm.rank == 0 else None)
        assert (found["model"]["weight"] == 1.5).all()
        assert found["view"].stride() == (2,)
        assert found["half"].dtype == torch.bfloat16
        comm.allgather([found["model"]["bias"], torch.nn.Parameter(found["view"])])

    runs = [spawnsim.run(main, ranks=12, seed=1).totals for _ in range(3)]
    assert len({(run["digest"], run["virtual_seconds"], run["bytes"]) for run in runs}) == 1


@pytest.mark.parametrize("seconds", [1e10, 1e18])
def test_times_of_centuries_are_times(seconds: float):
    """A block, or a sleep, of more than 2^63 ns was an internal error; shorter ones keep their entries."""

    def main(comm: Any) -> None:
        with comm.compute(seconds):
            pass
        comm.clock.sleep(seconds)

    run = spawnsim.run(main, ranks=RANKS)
    assert run.totals["virtual_seconds"] == 2 * seconds


def test_the_digest_does_not_depend_on_the_number_of_threads(monkeypatch):
    """Products of matrices have other last bits where threads share them: ranks use one, unless told otherwise."""

    def main(comm):
        draw = torch.Generator().manual_seed(comm.rank)
        weights = torch.randn(700, 700, generator=draw)
        comm.record(threads=torch.get_num_threads(), norm=float((weights @ weights.T).sum()))

    reported = torch.get_num_threads()
    try:
        digests = []
        for number in (1, 2, 3):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            torch.set_num_threads(number)
            found = spawnsim.run(main, ranks=2)
            assert (torch.get_num_threads(), "OMP_NUM_THREADS" in os.environ) == (number, False)
            assert set(found.table["threads"].tolist()) == {1}
            digests.append(found.totals["digest"])
        assert len({*digests}) == 1
    finally:
        torch.set_num_threads(reported)


def test_the_digest_of_a_rank_is_one_hash_over_its_packed_events():
    """It is compared between versions, so it does not depend on how events are collected before they are hashed."""
    own, events = RankDigest(3), [(0.25 * n, n % 6 + 1, n - 1, 1 << (n % 40), n) for n in range(150)]
    for event in events:
        own.note(event)
    own.cover(b"abc")
    packed = b"".join(struct.pack("<diiqi", *event) for event in events)
    expected = hashlib.blake2b(packed + struct.pack("<I", crc32(b"abc")), digest_size=16).digest()
    assert (own.value(), own.count) == (expected, 150)


def test_programs_in_processes_with_other_hashes_have_equal_digests() -> None:
    """Messages, windows, calls, policies, under faults; `benchmarks/digests.py` compares 2,000 when asked to."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, root / "benchmarks" / "digests.py", "--runs", "60"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 programs" in done.stdout and ": 0 differ" in done.stdout


def test_a_communicators_module_has_the_names_of_mpi() -> None:
    """As that of mpi4py's has: packages look there for IN_PLACE."""

    def main(comm: Any) -> None:
        module = sys.modules[type(comm).__module__]
        total = np.full(2, 1.0)
        comm.Allreduce(module.IN_PLACE, total)
        assert total[0] == comm.size
        assert not hasattr(module, "NOT_A_NAME")

    spawnsim.run(main, ranks=11)
