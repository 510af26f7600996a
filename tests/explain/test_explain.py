"""Real hangs are explained: `dumps` has what four processes left, with gloo and with MPICH; a missing rank is reported.

* recorder, stacks: the program of docs/howto/hang.md with gloo, by torch 2.13's flight recorder, and by py-spy 0.4.
* ddp: a rank with fewer batches, with gloo, by `py-spy dump --native --locals`.
* mpi, fault: exchange.py under mpiexec, by `py-spy dump --native --locals`, and by faulthandler.

Dumps of NCCL are made here, in the documented format.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spawnsim.cli import main
from spawnsim.errors import ParameterError
from spawnsim.explain import explain
from spawnsim.explain.stacks import own_file
from spawnsim.waits import Row, ring, table
from tests.support.pages import blocks, check_printed

ROOT = Path(__file__).parents[2]
DUMPS = Path(__file__).parent / "dumps"

Made = Callable[[dict[int, list[dict[str, Any]]]], Path]


def entry(name: str, seq: int, *, group: str = "0", done: bool = False, **more: Any) -> dict[str, Any]:
    """Return an entry of NCCL's flight recorder."""
    return {
        "record_id": seq, "pg_id": 0, "process_group": (group, "default_pg" if group == "0" else "undefined"),
        "collective_seq_id": seq, "p2p_seq_id": 0, "op_id": seq, "profiling_name": f"nccl:{name}",
        "time_created_ns": 1_795_896_254_000_000_000 + seq * 10**9, "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "completed" if done else "started",
        "retired": done, "is_p2p": name.startswith(("send", "recv")),
        "frames": [
            {"filename": "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "line": 99,
             "name": "call"},
            {"filename": "/home/user/job/job.py", "line": more.pop("line", 5), "name": "step"},
        ],
    } | more  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Return a function that writes dumps of NCCL for ranks and their entries, and returns the folder."""

    def write(ranks: dict[int, list[dict[str, Any]]], groups: dict[str, list[int]] | None = None) -> Path:
        config = {
            name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in (groups or {}).items()
        }
        for rank, entries in ranks.items():
            dump = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
        return tmp_path

    return write


# ------------------------------------------------------------------------------------------------- real dumps
def test_the_page_shows_the_explanation_of_the_real_dumps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the recorders with gloo, and of the stacks with MPICH."""
    page = blocks(ROOT / "docs" / "howto" / "hang.md", ROOT)
    recorder, mpi = [block for block in page if block.text.startswith("hang: ")]
    assert main(["explain", str(DUMPS / "recorder")]) == 0
    check_printed(recorder, capsys.readouterr().out)
    monkeypatch.chdir(DUMPS)  # where exchange.py lies
    assert main(["explain", *map(str, (DUMPS / "mpi").iterdir())]) == 0
    check_printed(mpi, capsys.readouterr().out)
    program = next(block for block in page if block.file == "train.py").text.splitlines()
    assert "all_reduce" in program[11]
    assert "barrier" in program[12]


def test_stacks_alone_show_different_collectives() -> None:
    """Where a recorder is missing."""
    said = explain([DUMPS / "stacks"])
    assert said.startswith(
        "hang: 4 of 4 ranks wait; rank 2 is in barrier at train.py:13 (in distributed_c10d.py:5356)"
    )
    assert "where ranks 0, 1, 3 are in all_reduce at train.py:12" in said


def test_a_rank_with_fewer_batches_of_ddp() -> None:
    """Others wait in C++, within backward()."""
    said = explain([DUMPS / "ddp"])
    assert "rank 2 is in all_gather_object at ddp.py:12" in said
    assert "where ranks 0, 1, 3 are in backward at ddp.py:10" in said


def test_a_recorder_in_json_takes_its_lines_from_stacks(tmp_path: Path) -> None:
    """JSON has no stacks."""
    for rank in range(4):
        dump = pickle.loads((DUMPS / "recorder" / f"trace_rank_{rank}").read_bytes())
        entries = [{key: value for key, value in each.items() if key != "frames"} for each in dump["entries"]]
        (tmp_path / f"trace_rank_{rank}.json").write_text(json.dumps(dump | {"entries": entries}))
    said = explain([tmp_path])
    assert "rank 2 calls barrier() where ranks 0, 1, 3 call all_reduce" in said
    assert "JSON has no lines" in said
    said = explain([tmp_path, DUMPS / "stacks"])
    assert "train.py:13" in said
    assert "JSON" not in said


def test_a_missing_rank_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """By the ranks that wait for it, and in a separate line; the status is 0."""
    files = [DUMPS / "recorder" / f"trace_rank_{rank}" for rank in (0, 1, 3)]
    assert main(["explain", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert "ranks 0, 1, 3 wait for rank 2, whose dump is missing" in said
    assert said.endswith("No dump: rank 2\n")
    assert "rank 3 waits for rank 0" in explain(files[2:])


def test_faulthandler_and_the_programs_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no values of variables: for whom a rank waits is not known, and the report says so."""
    monkeypatch.chdir(DUMPS)
    said = explain([DUMPS / "fault"])
    assert "comm.Send(np.ones(1 << 20), dest=other)  exchange.py:12" in said
    assert "For whom they wait is not in the stacks" in said


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("train.py", True), ("__main__.py", True), ("models/net.py", True), ("/home/user/job/train.py", True),
        ("threading.py", False), ("torch/nn/functional.py", False), ("simpy/core.py", False),
        ("importlib/__init__.py", False), ("/opt/python/lib/python3.12/json/decoder.py", False),
        ("libmpi.so.12", False), ("<frozen importlib._bootstrap>", False),
        ("/v/site-packages/deepspeed/runtime/engine.py", False),
    ],
)  # fmt: skip
def test_files_of_programs(file: str, own: bool) -> None:
    """On another machine, and as py-spy shortens them."""
    assert own_file(file) is own


def test_py_spys_json(tmp_path: Path) -> None:
    """The main thread is the one with the process's number."""
    for rank in range(2):
        threads = [
            {"pid": 7, "os_thread_id": 8, "frames": []},
            {"pid": 7, "os_thread_id": 7, "frames": [
                {"name": "recv", "filename": "/v/site-packages/torch/distributed/distributed_c10d.py", "line": 9,
                 "locals": [{"name": "src", "repr": str(1 - rank)}]},
                {"name": "<module>", "filename": "/home/user/job/job.py", "line": 4, "locals": None},
            ]},
        ]  # fmt: skip
        (tmp_path / f"{rank}.json").write_text(json.dumps(threads))
    said = explain([tmp_path])
    assert "a cycle of waits: rank 0 → rank 1 → rank 0" in said
    assert "job.py:4 (in distributed_c10d.py:9)" in said


# ------------------------------------------------------------------------------------- the format of NCCL's dumps
def test_a_cycle_of_groups(made: Any) -> None:
    """On 12 ranks, of which nine have finished."""
    groups = {"1": [3, 7], "2": [7, 11], "3": [3, 11]}
    ranks = {rank: [entry("all_reduce", 1, done=True)] for rank in range(12)}
    for rank, group in ((3, "1"), (7, "2"), (11, "3")):
        ranks[rank].append(entry("all_reduce", 1, group=group, line=8, record_id=2))
    said = explain([made(ranks, groups)])
    assert said.startswith("hang: 3 of 12 ranks wait; a cycle of waits: rank 3 → rank 7 → rank 11 → rank 3\n")
    assert "all_reduce(shape=[4], dtype=float32), collective_seq_id 1 on group 1  " in said
    assert "job.py:8" in said
    assert "8 more in no call; last: all_reduce at job.py:5" in said


def test_the_rank_that_never_arrived(made: Any) -> None:
    """Ten others wait for it."""
    ranks = {rank: [entry("all_reduce", 1, done=True), entry("all_reduce", 2, line=9)] for rank in range(11)}
    ranks[5] = ranks[5][:1]
    said = explain([made(ranks)])
    assert "hang: 10 of 11 ranks wait; ranks 0, 1, 2, 3, 4, 6, 7, 8 and 2 more wait for rank 5" in said
    assert "which did not make the call" in said


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            entry("all_reduce", 3, input_sizes=[[7]]),
            "rank 9 calls all_reduce(shape=[7], dtype=float32) at job.py:5",
        ),
        (
            entry("all_reduce", 3, input_dtypes=["Double"]),
            "rank 9 calls all_reduce(shape=[4], dtype=float64)",
        ),
        (entry("broadcast", 3), "rank 9 calls broadcast(shape=[4], dtype=float32)"),
    ],
)
def test_calls_that_do_not_match(wrong: dict[str, Any], words: str, made: Any) -> None:
    """In shape, type or operation."""
    ranks = {rank: [entry("all_reduce", 3)] for rank in range(10)} | {9: [wrong, entry("barrier", 4)]}
    said = explain([made(ranks)])
    assert f"collective_seq_id 3 on default_pg: {words}" in said
    assert "call all_reduce(shape=[4], dtype=float32) at job.py:5" in said


def test_shapes_of_a_gather_may_differ(made: Any) -> None:
    """So all ranks have arrived."""
    ranks = {rank: [entry("gather", 1, input_sizes=[[rank]])] for rank in range(3)}
    assert "all ranks have made the call for which they wait: look at the network" in explain([made(ranks)])


def test_messages_in_a_ring_and_an_early_call_that_the_buffer_has_lost(made: Any) -> None:
    """A rank with a later call has made the earlier one."""
    send = [entry(f"send {rank}->{(rank + 1) % 3}", 4, p2p_seq_id=1) for rank in range(3)]
    ranks = {rank: [entry("barrier", 3, done=True), send[rank]] for rank in range(3)}
    ranks[3] = [entry("barrier", 3)]
    said = explain([made(ranks, {"0": [0, 1, 2, 3]})])
    assert "hang: 4 of 4 ranks wait; a cycle of waits: rank 0 → rank 1 → rank 2 → rank 0" in said
    ranks[0] = [entry("barrier", 7, done=True)]
    said = explain([made(ranks, {"0": [0, 1, 2, 3]})])
    assert said.startswith("hang: 3 of 4 ranks wait; rank 2 waits for rank 0, which did not make the call")


# ------------------------------------------------------------------------------------------------ unusable files
class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("it ran",)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("rank0", b"", "the file is empty"),
        ("rank0", b"spam\n", "neither a dump of PyTorch's flight recorder nor a Python stack"),
        ("rank0", pickle.dumps(_Runs()), "it asks for builtins.print"),
        ("rank0", pickle.dumps({"entries": []})[:-9], "not a whole pickle of plain values"),
        ("rank0", pickle.dumps([1]), "neither a dump"),
        ("rank0", pickle.dumps({"version": "9", "entries": [{"state": 1}]}), "no process_group (version 9)"),
        ("rank0.json", b'{"version": "2.1', "not whole JSON"),
        ("rank0.json", b"[]", "neither a dump"),
        ("trace", b"x", "no rank in the file's name"),
        ("trace.29364", (DUMPS / "stacks" / "rank2.txt").read_bytes(), "is 29364 its rank?"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    """With the reason, in one line; a pickle runs no code."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ParameterError) as found:
        explain([tmp_path / name])
    assert str(tmp_path / name) in str(found.value)
    assert words in str(found.value)


def test_two_files_of_a_rank_and_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both have the status of unusable files."""
    for name in ("rank0", "other_rank0"):
        (tmp_path / name).write_bytes((DUMPS / "stacks" / "rank2.txt").read_bytes())
    assert main(["explain", str(tmp_path)]) == 2
    assert "stack of rank 0, as in" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert main(["explain", str(tmp_path / "none")]) == 2
    assert main(["explain", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_a_recorder_that_recorded_nothing(made: Any) -> None:
    """The report has the setting."""
    said = explain([made({0: [], 1: []})])
    assert "Nothing recorded by ranks 0, 1: set TORCH_FR_BUFFER_SIZE" in said


def test_a_ring_and_a_table_of_many() -> None:
    """A thousand ranks take a row and a line."""
    assert ring({rank: [(rank + 1) % 1000] for rank in range(1000)}) == [*range(1000)]
    said = table([Row(rank, f"rank {rank}", "", "barrier()", "a.py:1") for rank in range(1000)], time="")
    assert said.splitlines()[1:] == ["  rank 0  barrier()  a.py:1", "  999 more in barrier at a.py:1"]
