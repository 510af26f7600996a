"""`spawnsim run --trace` and `spawnsim trace`: calls and messages of a run as Chrome/Perfetto JSON."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import random_faults, synthetic

import spawnsim
from spawnsim import Run
from spawnsim.cli import main as command
from spawnsim.errors import Deadlock, ParameterError, RankError, WorldError
from spawnsim.record import Table, folder, journal
from spawnsim.report import perfetto
from spawnsim.report.trace_reader import Selection, Timeline
from spawnsim.run.result import totals_of
from spawnsim.virtual import timeline

RANKS = 12
LARGE = 20_000  # doubles: beyond the eager threshold
WALL = "wall_seconds"
Entry = dict[str, Any]

# ---------------------------------------------------------------------------------------------- what a file must be

REQUIRED = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "i": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "s": str, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": int, "args": dict},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": int, "args": dict, "bp": str},
}


def checked(path: Path) -> list[Entry]:
    """Return the entries of a file, held to the format: fields and types, order, nesting, ends of arrows."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    document = json.loads(text)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    entries: list[Entry] = document["traceEvents"]
    for entry in entries:
        required = REQUIRED[entry["ph"]]
        assert set(entry) == {"ph", *required}, entry
        for name, kind in required.items():
            assert isinstance(entry[name], kind), (name, entry)
        assert min(entry.get("ts", 0.0), entry.get("dur", 0.0)) >= 0
    times = [ns(entry["ts"]) for entry in entries if "ts" in entry]
    assert times == sorted(times)
    threads, processes = ({(e["pid"], e["tid"]) for e in entries}, {e["pid"] for e in entries})
    assert len({tid for _, tid in threads} & (processes - {0})) == 0  # viewers would show that thread first
    for thread in threads:
        check_nesting([entry for entry in entries if (entry["pid"], entry["tid"]) == thread])
    check_arrows(entries)
    return entries


def ns(microseconds: float) -> int:
    """Return whole nanoseconds."""
    return round(microseconds * 1000)


def check_nesting(entries: list[Entry]) -> None:
    """Slices of a thread lie in one another or apart; an arrow's end lies in the slice that began last."""
    open_ns: list[int] = []
    for entry in entries:
        if entry["ph"] == "X":
            begin_ns = ns(entry["ts"])
            while open_ns and open_ns[-1] <= begin_ns:
                open_ns.pop()
            end_ns = begin_ns + ns(entry["dur"])
            assert not open_ns or end_ns <= open_ns[-1], entry
            open_ns.append(end_ns)
        elif entry["ph"] in "sf" and entry["name"] == "message":
            assert open_ns and ns(entry["ts"]) <= open_ns[-1], entry


def check_arrows(entries: list[Entry]) -> None:
    """Each begins once and ends once, later."""
    begins, ends = ({e["id"]: e["ts"] for e in entries if e["ph"] == phase} for phase in "sf")
    assert set(begins) == set(ends)
    assert Counter(e["ph"] for e in entries)["s"] == len(begins)
    assert all(begins[arrow] < ends[arrow] for arrow in begins)


def slices(entries: list[Entry], name: str, rank: int | None = None) -> list[Entry]:
    """Return the slices of a name, of one rank or of all."""
    return [e for e in entries if e["ph"] == "X" and e["name"] == name and rank in (None, e["tid"])]


def arrows(entries: list[Entry]) -> list[tuple[Entry, Entry]]:
    """Return both ends of each arrow."""
    ends = {entry["id"]: entry for entry in entries if entry["ph"] == "f"}
    return [(entry, ends[entry["id"]]) for entry in entries if entry["ph"] == "s"]


def drawn(place: Path, **options: Any) -> list[Entry]:
    """Return the checked entries of a run folder's file."""
    drawing = perfetto.draw([(Run.load(place), Timeline.of(place))], Selection(**options))
    return checked(perfetto.write(drawing, place / "trace.json"))


def same_but_wall(one: Run, other: Run) -> bool:
    """Whether all totals are equal but the time that it took."""
    return {**one.totals, WALL: 0} == {**other.totals, WALL: 0}


# ------------------------------------------------------------------------------------------------------ traced runs


def ring(comm: Any, iterations: int = 3) -> None:
    """Compute, exchange with the neighbours (large, small), reduce (blocking or not), poll."""
    rank, size = comm.Get_rank(), comm.Get_size()
    out, into = np.full(LARGE, float(rank)), np.empty(LARGE)
    right, left = (rank + 1) % size, (rank - 1) % size
    for iteration in range(iterations):
        with comm.compute(0.001 * (1 + rank % 3)):
            pass
        comm.Sendrecv(out, right, 3, into, left, 3)
        pending = [comm.Isend(out[:10], right, 4)]
        while not comm.Iprobe(left, 4):
            pass
        pending.append(comm.Irecv(into[:10], left, 4))
        type(pending[0]).Waitall(pending)
        comm.Allreduce(out, into)
        comm.Iallreduce(out, into).Wait()
        comm.record(iteration=iteration, received=into[0])


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a traced run of `ring`."""
    place = tmp_path_factory.mktemp("rings") / "run"
    spawnsim.run(ring, ranks=RANKS, seed=5, out=place, trace=True)
    return place


def test_a_trace_changes_nothing(rings: Path):
    """All totals and rows are those of a run that is not traced, the digest above all; nobody is watched afterwards."""
    plain = spawnsim.run(ring, ranks=RANKS, seed=5)
    traced = Run.load(rings)
    assert same_but_wall(traced, plain)
    assert traced.table.digest() == plain.table.digest()
    assert not hasattr(spawnsim.virtual.mpi.communicators.Comm.Send, "__wrapped__")


def test_calls_are_slices_within_iterations(rings: Path):
    """Each call of each rank is there with its times; ranks are threads in order; polls in a row are one slice."""
    entries = drawn(rings)
    for name in ("compute", "iteration", "Sendrecv", "Isend", "Waitall", "Allreduce", "Iallreduce", "Wait"):
        assert Counter(e["tid"] for e in slices(entries, name)) == dict.fromkeys(range(RANKS), 3), name
    assert sum(e["dur"] for e in slices(entries, "compute", 4)) == pytest.approx(3 * 2000)
    assert max(e["args"].get("times", 1) for e in slices(entries, "Iprobe")) > 5
    assert max(Counter(e["tid"] for e in slices(entries, "Iprobe")).values()) <= 3
    names = {e["tid"]: e["args"] for e in entries if e["name"] == "thread_name"}
    places = {e["tid"]: e["args"]["sort_index"] for e in entries if e["name"] == "thread_sort_index"}
    assert names == {rank: {"name": f"rank {rank}"} for rank in range(RANKS)}
    assert places == {rank: rank for rank in range(RANKS)}
    exchange = slices(entries, "Sendrecv", 11)[0]["args"]
    assert exchange == {
        "dest": 0, "source": 10, "tag": 3, "sent": 8 * LARGE, "received": 8 * LARGE, "messages": 2,
        "comm": "MPI_COMM_WORLD",
    }  # fmt: skip


def test_messages_are_arrows_from_send_to_arrival(rings: Path):
    """One for each, to the right neighbour, from the sender's slice to the receiver's, as long as it was under way."""
    found = arrows(drawn(rings))
    ways = Counter((begin["tid"], end["tid"], begin["args"]["bytes"]) for begin, end in found)
    expected = {(rank, (rank + 1) % RANKS, size): 3 for rank in range(RANKS) for size in (8 * LARGE, 80)}
    assert ways == expected
    for begin, end in found:
        assert begin["ts"] == pytest.approx(begin["args"]["sent_s"] * 1e6, abs=2e-3)
        assert end["ts"] >= begin["args"]["arrival_s"] * 1e6 - 2e-3
    large = [end["ts"] - begin["ts"] for begin, end in found if begin["args"]["bytes"] > 80]
    assert min(large) > 8 * LARGE / 1.25e9 * 1e6  # 10 Gbit/s


def test_parts_of_a_collective_share_its_number(rings: Path):
    """All ranks' slices of one have one (context, collective), the wait for one that did not block too."""
    entries = drawn(rings)
    parts = defaultdict(list)
    for entry in entries:
        if entry["ph"] == "X" and "collective" in entry["args"]:
            parts[entry["args"]["context"], entry["args"]["collective"]].append((entry["name"], entry["tid"]))
    blocking, starting = (
        [(name, rank) for name in names for rank in range(RANKS)]
        for names in (["Allreduce"], ["Iallreduce", "Wait"])
    )
    assert [sorted(parts[1, number]) for number in range(6)] == 3 * [blocking, starting]


PROGRAM = """
from mpi4py import MPI
import numpy as np, time
comm = MPI.COMM_WORLD
rank, size = comm.rank, comm.size
out, into = np.full(20_000, float(rank)), np.empty(20_000)
for i in range(3):
    time.sleep(0.001 * (1 + rank % 3))
    if rank % 2:
        comm.Send(out, (rank + 1) % size); comm.Recv(into, (rank - 1) % size)
    else:
        comm.Recv(into, (rank - 1) % size); comm.Send(out, (rank + 1) % size)
    half = comm.Split(rank % 2, rank)
    half.Bcast(into, root=1)
    comm.isend({"i": i}, (rank + 1) % size, tag=7); comm.isend({"i": i}, (rank + 1) % size, tag=7)
    assert [comm.recv(tag=7), comm.recv(tag=7)] == 2 * [{"i": i}]
    half.Free()
comm.Barrier()
print(MPI.Wtime())
"""


def program(tmp_path: Path, text: str = PROGRAM) -> Path:
    """Write an mpi4py program."""
    path = tmp_path / "program.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("compute", [None, "5 us"])
def test_an_mpi4py_program_is_traced_unmodified(tmp_path: Path, compute: str | None):
    """Its calls are there, what computing costs in between as well; its digest stays as it is."""
    how: dict[str, Any] = {"ranks": RANKS, "compute": compute}
    plain = spawnsim.run(program(tmp_path), **how)
    traced = spawnsim.run(program(tmp_path), out=tmp_path / "run", trace=True, **how)
    assert same_but_wall(traced, plain)
    entries = drawn(tmp_path / "run")
    for name, count in {
        "sleep": 3,
        "Send": 3,
        "Recv": 3,
        "Split": 3,
        "Bcast": 3,
        "isend": 6,
        "recv": 6,
        "Barrier": 1,
    }.items():
        assert len(slices(entries, name, 10)) == count, name
    assert bool(slices(entries, "compute", 10)) == (compute is not None)
    assert {e["args"]["root"] for e in slices(entries, "Bcast")} == {1}
    assert len({(e["args"]["context"], e["args"]["collective"]) for e in slices(entries, "Bcast")}) == 6
    ways = Counter((begin["tid"], end["tid"]) for begin, end in arrows(entries))
    assert ways == {(rank, (rank + 1) % RANKS): 9 for rank in range(RANKS)}


def test_a_search_for_races_leaves_the_trace_as_it_is(tmp_path: Path):
    """Both replace the functions that move data: neither may replace the other."""
    text = "from mpi4py import MPI\ncomm = MPI.COMM_WORLD\ncomm.sendrecv(1, comm.rank ^ 1, source=comm.rank ^ 1)\n"
    file = program(tmp_path, text)
    for races in (False, True):
        spawnsim.run(file, ranks=12, trace=True, races=races, out=tmp_path / str(races))
        assert len(arrows(drawn(tmp_path / str(races)))) == 12


def test_keeping_rows_takes_no_virtual_time(tmp_path: Path):
    """The journal looked at a virtual clock: where events came at one time, the digest depended on `out`."""
    text = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
for i in range(3):
    pending = [comm.isend(i, (comm.rank + 1) % comm.size) for _ in range(3)]
    for _ in range(3):
        comm.recv(source=(comm.rank - 1) % comm.size)
    MPI.Request.waitall(pending)
"""
    how: dict[str, Any] = {"ranks": RANKS, "faults": "duplicate:*>3@0s+1s,1"}
    plain = spawnsim.run(program(tmp_path, text), **how)
    assert sum(event["kind"] == "link" for event in plain.events) == 9
    assert same_but_wall(spawnsim.run(program(tmp_path, text), out=tmp_path / "kept", **how), plain)
    assert same_but_wall(
        spawnsim.run(program(tmp_path, text), out=tmp_path / "run", trace=True, **how), plain
    )


def dying(comm: Any) -> None:
    """Rank 3 dies and comes back, rank 5 is paused, all beside background tasks; survivors recover."""
    rank, size = comm.Get_rank(), comm.Get_size()
    part = np.full(LARGE, float(rank))

    def tick() -> None:
        for _ in range(5):
            comm.clock.sleep(0.002)

    beside = comm.background(tick)
    for iteration in range(8):
        with comm.compute(0.003):
            pass
        try:
            comm.Sendrecv(part, (rank + 1) % size, 1, part.copy(), (rank - 1) % size, 1)
            comm.allreduce(iteration)
        except WorldError:
            comm = comm.recover().comm
            rank, size = comm.Get_rank(), comm.Get_size()
            break
        comm.record(iteration=iteration)
    with comm.compute(0.01):
        pass
    beside.join()


def test_deaths_pauses_and_restarts_are_shown(tmp_path: Path):
    """The call in which a rank dies ends there; a pause lies in the call that it lengthens; nothing changes."""
    how: dict[str, Any] = {
        "ranks": RANKS,
        "faults": "crash:3@0.02s; pause:5@0.004s+0.012s; pause:5@0.01s+0.007s",
    }
    plain = spawnsim.run(dying, **how)
    assert same_but_wall(spawnsim.run(dying, out=tmp_path / "run", trace=True, **how), plain)
    entries = drawn(tmp_path / "run")
    (crash,) = (e for e in entries if e["name"] == "crash")
    (last,) = (e for e in entries if e["ph"] == "X" and e["tid"] == 3 and e["args"].get("error") == "died")
    assert ns(last["ts"]) + ns(last["dur"]) == ns(crash["ts"]) == 20_000_000
    assert [(e["tid"], e["ts"], e["dur"]) for e in slices(entries, "paused")] == [
        (5, 4000, 12_000),
        (5, 16_000, 1000),
    ]
    assert len(slices(entries, "recover")) == RANKS - 1
    errors = {e["args"]["error"] for e in entries if e["ph"] == "X" and "error" in e["args"]}
    assert {"died", "RankFailed"} <= errors
    beside = {
        e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name" and e["tid"] >= RANKS
    }
    assert beside == {rank + RANKS: f"rank {rank}, background 1" for rank in range(RANKS)}


def test_a_raise_and_the_calls_that_it_cuts_short_are_shown(tmp_path: Path):
    """What a rank raises is a mark on its thread; where others stood then, and what they waited for, is told."""
    text = PROGRAM.replace("comm.Barrier()", "if rank == 11: raise ValueError('no luck')\ncomm.Barrier()")
    with pytest.raises(RankError):
        spawnsim.run(program(tmp_path, text), ranks=RANKS, out=tmp_path / "run", trace=True)
    entries = drawn(tmp_path / "run")
    (raised,) = (e for e in entries if e["name"] == "raised")
    assert (raised["tid"], raised["args"]["error"]) == (11, "ValueError: no luck")
    waiting = [e for e in entries if e["ph"] == "X" and "waits" in e["args"]]
    assert waiting
    end_ns = {ns(e["ts"]) + ns(e["dur"]) for e in waiting}
    assert end_ns == {round(Run.load(tmp_path / "run").totals["virtual_seconds"] * 1e9)}


def test_a_signal_is_no_rank_s_fault(tmp_path: Path):
    """Ctrl-C comes to whichever rank runs: none has raised, and what was kept is there."""

    def stopped(comm: Any) -> None:
        with comm.compute(0.001):
            pass
        comm.Barrier()
        if comm.rank == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spawnsim.run(stopped, ranks=RANKS, out=tmp_path / "run", trace=True)
    entries = drawn(tmp_path / "run")
    assert len(slices(entries, "Barrier")) == RANKS
    assert not [e for e in entries if e["name"] == "raised"]


def test_a_deadlock_shows_what_all_wait_for(tmp_path: Path):
    """Calls that never return reach to the end of the run."""

    def stuck(comm: Any) -> None:
        with comm.compute(0.001 * (1 + comm.rank)):
            pass
        comm.recv(source=(comm.rank + 1) % comm.size, tag=7)

    with pytest.raises(Deadlock):
        spawnsim.run(stuck, ranks=RANKS, out=tmp_path / "run", trace=True)
    found = slices(drawn(tmp_path / "run"), "recv")
    assert [e["args"]["waits"] for e in found if e["tid"] == 11] == [
        "recv(source=0, tag=7) on MPI_COMM_WORLD"
    ]
    assert {ns(e["ts"]) + ns(e["dur"]) for e in found} == {RANKS * 1_000_000}


@pytest.mark.parametrize("kind", random_faults.KINDS)
def test_random_runs_are_traced_as_they_are(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Policies, windows and collectives under deaths, restarts, pauses and faults of links: one digest, whole files."""
    run = spawnsim.run
    for seed in (4, 6):
        place = tmp_path / str(seed)
        plain = random_faults.KINDS[kind](seed).carry_out()
        with monkeypatch.context() as traced:
            traced.setattr(spawnsim, "run", partial(run, out=place, trace=True, overwrite=True))
            assert random_faults.KINDS[kind](seed).carry_out() == plain
        assert len(drawn(place)) > 50


# ------------------------------------------------------------------------------------------------- what fits and not


def test_a_rank_is_followed_as_long_as_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is kept is bounded; whose share is used up, and when, is said; what there is of it is whole."""
    monkeypatch.setattr(timeline, "MOST", 20 * RANKS)
    spawnsim.run(ring, ranks=RANKS, seed=5, out=tmp_path / "run", trace=True)
    found = Timeline.of(tmp_path / "run")
    assert found is not None
    assert Counter(found.amounts.rank.tolist()) == dict.fromkeys(range(RANKS), 20)
    drawing = perfetto.draw([(Run.load(tmp_path / "run"), found)])
    assert any(
        "12 ranks were traced only in the first part of the run, rank " in note for note in drawing.notes
    )
    checked(perfetto.write(drawing, tmp_path / "trace.json"))


def test_ranks_and_times_can_be_chosen(rings: Path):
    """--ranks 8-11 --from --until: nothing else is in the file."""
    whole = drawn(rings)
    begin_us, end_us = (f(e["ts"] for e in slices(whole, "Allreduce")) for f in (min, max))
    entries = drawn(rings, ranks=Selection.of_ranks("8-11"), from_s=begin_us / 1e6, until_s=end_us / 1e6)
    assert {e["tid"] for e in entries if "ts" in e} == {8, 9, 10, 11}
    assert {(begin["tid"], end["tid"]) for begin, end in arrows(entries)} == {(8, 9), (9, 10), (10, 11)}
    for entry in entries:
        if entry["ph"] == "X" and entry["name"] != "iteration":
            assert entry["ts"] <= end_us + 1e-3
            assert entry["ts"] + entry["dur"] >= begin_us - 1e-3


def test_a_choice_without_anything_is_told(rings: Path):
    """Ranks that the run has not, or a time after its end."""
    for nothing in ({"ranks": frozenset((99,))}, {"from_s": 1e6}):
        drawing = perfetto.draw([(Run.load(rings), Timeline.of(rings))], Selection(**nothing))
        assert drawing.notes == ["test_trace: these ranks recorded nothing in this time"]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("3", {0, 1, 2}),
        ("0-2", {0, 1, 2}),
        ("3,10-11", {3, 10, 11}),
        *((wrong, None) for wrong in ("7,", "-3", "0", "4-2", "a")),
    ],
)
def test_ranks_are_named_as_a_number_or_a_list(text: str, ranks: set[int] | None):
    """`--ranks 3` are the first three; what names no rank is refused."""
    if ranks is None:
        with pytest.raises(ParameterError, match="--ranks"):
            Selection.of_ranks(text)
    else:
        assert Selection.of_ranks(text) == ranks


@pytest.mark.parametrize("limit", [400, 150, 40])
def test_a_file_is_kept_to_a_size(rings: Path, limit: int):
    """Fewer ranks are shown, or less time: whole, and said in the file and to the user."""
    run, found = Run.load(rings), Timeline.of(rings)
    drawing = perfetto.draw([(run, found)], Selection(limit=limit))
    entries = checked(perfetto.write(drawing, rings.parent / f"{limit}.json"))
    assert sum("ts" in entry for entry in entries) <= limit * 1.1
    (note,) = drawing.notes
    assert f"at most {limit} entries" in note
    shown = json.loads((rings.parent / f"{limit}.json").read_text())["otherData"]["runs"][0]["shown"]
    assert "0 s to " in shown


def test_many_ranks_give_way_before_time_does(tmp_path: Path):
    """Of 100 ranks the first so many are shown as fit, with those that failed."""

    def failing(comm: Any) -> None:
        for _ in range(10):
            with comm.compute(0.001):
                pass
        if comm.rank == 77:
            raise ValueError

    with pytest.raises(RankError):
        spawnsim.run(failing, ranks=100, out=tmp_path / "run", trace=True)
    assert {e["tid"] for e in slices(drawn(tmp_path / "run", limit=300), "compute")} == {*range(29), 77}
    last = [e["ts"] for e in slices(drawn(tmp_path / "run", limit=50), "compute")]
    assert (min(last), max(last)) == (7000, 9000)  # how it ended


# ------------------------------------------------------------------------------------------------ files and commands


def test_the_trace_of_a_killed_run_is_read_as_far_as_it_came(rings: Path, tmp_path: Path):
    """What is left then is the journal; a torn end is left out."""
    whole = gzip.decompress((rings / folder.TRACE).read_bytes())
    shards = tmp_path / journal.FOLDER
    shards.mkdir()
    (shards / journal.TRACE).write_bytes(whole + whole[: whole.index(b"\n") + 20])
    left, kept = Timeline.of(tmp_path), Timeline.of(rings)
    assert left is not None and kept is not None
    assert left.amounts.begin_s.tolist() == kept.amounts.begin_s.tolist()
    (rings.parent / "damaged").mkdir()
    (rings.parent / "damaged" / folder.TRACE).write_bytes(b"no journal")
    with pytest.raises(ParameterError, match="cannot read the trace"):
        Timeline.of(rings.parent / "damaged")


def test_the_command_line_traces_packs_and_says_what_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """`run --trace`, `trace`: the file's default name, `.gz`, and one line about what is not in it."""
    monkeypatch.chdir(tmp_path)
    text = program(tmp_path)
    assert command(["run", str(text), "--ranks", "12", "--quiet", "--trace", "--out", "run"]) == 0
    assert command(["trace", "run"]) == 0
    first = capfd.readouterr()
    assert first.out.splitlines()[-1] == "run/trace.json" and "replaced" not in first.err
    entries = checked(tmp_path / "run" / "trace.json")
    Path("trace.json").write_text("another's")
    assert command(["trace", "run"]) == 0
    assert "replaced" not in capfd.readouterr().err
    assert Path("trace.json").read_text() == "another's"
    assert command(["trace", "run", "run"]) == 0
    assert "spawnsim: trace: trace.json existed, and was replaced\n" in capfd.readouterr().err
    assert command(["trace", "run", "--out", "packed.json.gz"]) == 0
    assert checked(tmp_path / "packed.json.gz") == entries
    monkeypatch.setattr(perfetto, "LARGE", 100)
    assert command(["trace", "run", "--ranks", "11"]) == 0
    assert {e["tid"] for e in checked(tmp_path / "run" / "trace.json.gz")} == set(range(11))
    capfd.readouterr()
    assert command(["trace", "run", "--limit", "200"]) == 0
    assert "only " in capfd.readouterr().err
    about = json.loads((tmp_path / "run" / "trace.json").read_text())["otherData"]["runs"][0]
    assert (about["outcome"], about["seed"], about["spawnsim"]) == ("finished", 0, spawnsim.__version__)
    # Run again without a timeline or rows, the folder has no drawing of the run before; and nothing is to be drawn.
    Path("plain.py").write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
    assert command(["run", "plain.py", "--ranks", "2", "--quiet", "--out", "run", "--overwrite"]) == 0
    assert command(["trace", "run"]) == 2
    assert "there is nothing to show" in capfd.readouterr().err
    assert not [*Path("run").glob("trace.json*")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "program.py", "--ranks", "2", "--trace"], "--out"),
        (["run", "program.py", "-n", "2", "--backend", "mpi", "--trace"], "virtual ranks"),
        (["trace", "run", "--from", "2", "--until", "1"], "this range is empty"),
        (["trace", "run", "--limit", "0"], "at least 1"),
        (["trace", "run", "--out", "run/trace.gz"], "belongs to the run"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """One line, status 2."""
    monkeypatch.chdir(tmp_path)
    program(tmp_path)
    synthetic.run("average", ranks=2, iterations=2).save(tmp_path / "run")
    assert command(arguments) == 2
    assert said in capfd.readouterr().err


# ------------------------------------------------------------------------------------- runs that were not traced


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Two policies on 12 ranks."""
    return [synthetic.run(policy, ranks=12, iterations=25) for policy in ("average", "selective")]


def rows_drawn(runs: list[Run], path: Path, **options: Any) -> list[Entry]:
    """Return the checked entries of runs that were not traced."""
    return checked(
        perfetto.write(perfetto.draw([(run, None) for run in runs], Selection(**options)), path / "t.json")
    )


def test_rows_of_any_run_are_drawn(runs: list[Run], tmp_path: Path):
    """Each run is a process, each rank a thread; the user is told why there are no calls."""
    entries = rows_drawn(runs, tmp_path)
    assert len({entry["pid"] for entry in entries}) == 2
    assert {entry["tid"] for entry in entries} == set(range(12))
    assert len(slices(entries, "compute")) == 2 * 12 * 25
    notes = perfetto.draw([(run, None) for run in runs]).notes
    assert notes == [
        f"{name}: no calls and messages: the run was recorded without --trace"
        for name in ("average", "selective")
    ]


def test_blocks_of_a_rank_follow_one_another(runs: list[Run], tmp_path: Path):
    """A thread's blocks begin where the last one ended (to a nanosecond), so viewers nest nothing."""
    entries = [e for e in rows_drawn(runs[:1], tmp_path) if e["ph"] == "X" and e["tid"] == 3]
    ends = [e["ts"] + e["dur"] for e in entries]
    assert entries[0]["ts"] == 0
    assert [e["ts"] for e in entries[1:]] == pytest.approx(ends[:-1], abs=2e-3)


def test_each_replacement_has_a_mark_and_arrows_from_all_donors(runs: list[Run], tmp_path: Path):
    """Arrows come out of the donors' threads and end at the mark."""
    entries = rows_drawn(runs[1:], tmp_path)
    marks = [e for e in entries if e["ph"] == "i"]
    expected = Counter((donor, event["rank"]) for event in runs[1].events for donor in event["donors"])
    assert len(marks) == len(runs[1].events) > 0
    assert Counter((begin["tid"], end["tid"]) for begin, end in arrows(entries)) == expected


def test_a_trace_names_ranks_that_did_something(tmp_path: Path):
    """One row of a rank with a large number is a short file: it filled the disk."""
    table = Table({"rank": np.array([2**31 - 1], np.int32), "time_s": np.ones(1), "loss": np.ones(1)})
    lonely = Run({}, table, [], totals_of(table, [], {}))
    assert len(rows_drawn([lonely], tmp_path)) < 10
    texts = dict(table) | {name: np.array(["x"]) for name in ("compute_s", "iteration")}
    assert len(rows_drawn([dataclasses.replace(lonely, table=Table(texts))], tmp_path)) < 10
