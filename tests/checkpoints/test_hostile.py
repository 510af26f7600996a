"""Files that came from somewhere: 1,000 mutations of run folders, checkpoints, plans, traces and platforms end in one
error, or are read; none in a traceback, and none takes time or memory that it only claims.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim import checkpoints
from spawnsim.checkpoints import Shard
from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.models.faults import FaultPlan
from spawnsim.models.platform import list_platforms, load_platform
from spawnsim.models.platform.files import to_toml

MUTANTS = 1000
LIMIT_S = 60.0  # processor time of one reading: none needs a second
MEMORY_B = 3 << 30


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return a file as damage, or somebody who means harm, leaves it."""
    kind = rng.randrange(9)
    if kind == 0 or not data:
        return b""
    at = rng.randrange(len(data))
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 3:
        return data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:]
    if kind == 4:
        end = min(len(data), at + rng.randrange(1, 64))
        return data[:at] + data[end:]
    if kind == 5:
        return data + data
    if kind == 6:  # an invalid number, or one beyond every limit
        numbers = [i for i, byte in enumerate(data) if 48 <= byte <= 57] or [at]
        place = rng.choice(numbers)
        hostile = rng.choice(
            [b"-1", b"1e308", b"NaN", b"99999999999999999999", b"null", b'"x"', b"2147483647", b"[]", b"{}"]
        )
        return data[:place] + hostile + data[place + 1 :]
    if kind == 7:
        return (
            data[:at] + rng.choice([b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"\x00" * 8]) + data[at:]
        )
    return data[:at] + (2 ** rng.randrange(8, 63)).to_bytes(8, "little") + data[at + 8 :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run folder with all that can be in one, and other files that people pass around."""
    place = tmp_path_factory.mktemp("hostile")

    def main(comm: Any) -> None:
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        for iteration in range(4):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            comm.record(iteration=iteration, loss=1.5, word="a", flag=True)
            comm.record.event("replacement", iteration=iteration, donors=[0], mode="max")
        comm.checkpoint(
            iteration=4, model=model, optimizer=optimizer, extra={"a": [1, 2.5, None], 3: (np.ones(2),)}
        )

    spawnsim.run(main, ranks=3, out=place / "run")
    (place / "plan.json").write_text(
        FaultPlan.parse("crash:1@1s; drop:0>1@1s+1s,0.5; partition:0@1s+2s").to_json()
    )
    (place / "plan.toml").write_text(
        'seed = 1\n[[faults]]\nkind = "pause"\nrank = 1\nat_s = 1.5\nfor_s = 2\n'
    )
    (place / "trace.csv").write_text("rank,down_s,up_s\n1,2.5,3.5\n2,1,\n")
    (place / "platform.toml").write_text(to_toml(list_platforms()[0]))
    return place


def read_checkpoint(path: Path) -> None:
    """Read all that a checkpoint holds."""
    found = checkpoints.newest(path)
    for rank in range(3):
        checkpoints.part_of(found, rank, size=3).saved()


def plan_of(path: Path) -> None:
    """Read a plan of faults."""
    FaultPlan.parse(str(path), ranks=8)


FILES: dict[str, Callable[[Path], object]] = {
    "run/run.json": lambda path: spawnsim.Run.load(path.parent),
    "run/metrics.npz": lambda path: spawnsim.Run.load(path.parent),
    "run/events.jsonl": lambda path: spawnsim.Run.load(path.parent),
    "run/checkpoints/000000004/all-of-00003.safetensors": lambda path: read_checkpoint(path.parents[2]),
    "plan.json": plan_of,
    "plan.toml": plan_of,
    "trace.csv": plan_of,
    "platform.toml": lambda path: load_platform(str(path)),
}


def test_a_thousand_malformed_files_end_in_one_error_or_are_read(folder: Path, tmp_path: Path) -> None:
    """By generation: cut, flipped, doubled, nested, and numbers that are none."""
    work = tmp_path / "work"
    shutil.copytree(folder, work)
    rng, ends = random.Random(14), Counter[str]()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_B, limits[1]))
    try:
        for number in range(MUTANTS):
            name = list(FILES)[number % len(FILES)]
            data = (folder / name).read_bytes()
            for _ in range(rng.randrange(1, 3)):
                data = mutated(data, rng)
            (work / name).write_bytes(data)
            began_s = time.process_time()
            try:
                FILES[name](work / name)
                ends["read"] += 1
            except SpawnsimError as error:
                ends["refused"] += 1
                ends[f"long: {name}"] += len(str(error)) > 2000
            except MemoryError:
                pytest.fail(f"mutant {number} of {name} takes memory that it only claims")
            assert time.process_time() - began_s < LIMIT_S, f"mutant {number} of {name}"
            (work / name).write_bytes((folder / name).read_bytes())
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert ends["refused"] > MUTANTS / 2 and not any(
        count for name, count in ends.items() if "long" in name
    ), ends


def headed(header: Any, data: bytes = b"") -> bytes:
    """Return a file with a header of its own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        (2**63).to_bytes(8, "little") + b"{}",
        headed(b"[" * 200_000),
        headed({"__metadata__": 3}),
        headed([1, 2]),
        headed({"a": {"dtype": "F64", "shape": [2**40], "data_offsets": [0, 2**43]}, "__metadata__": {}}),
        headed(
            {"a": {"dtype": "F64", "shape": [-1, -1], "data_offsets": [0, 8]}, "__metadata__": {}}, b"x" * 8
        ),
        headed(
            {"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 8]}, "__metadata__": {}}, b"x" * 8
        ),
        headed({"__metadata__": {"checksum": "0", "about": "{}", "states": "{}"}}),
        b"\x80\x04\x95pickle" + b"." * 20,
    ],
    ids=range(11),
)
def test_headers_that_lie(content: bytes, tmp_path: Path) -> None:
    """By hand: sizes, types and nesting that only claim."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ParameterError, match="cannot read"):
        checkpoints.read(tmp_path / "a")


def test_a_shard_is_read_as_it_was_written_and_by_others(tmp_path: Path) -> None:
    """All types, empty and 0-dim ones, keys that are no texts, numbers that JSON lacks; by the rules of safetensors."""
    state = {
        "tensors": [torch.ones(2, 3, dtype=getattr(torch, name)) for name in checkpoints.TYPES.values()],
        "empty": torch.zeros(0, 3), "number": torch.tensor(2.5), "part": torch.arange(10).reshape(2, 5).T[1:],
        "arrays": (np.arange(3), np.zeros((2, 0)), np.array(True), np.arange(6, dtype="f4").reshape(2, 3)[:, 1]),
        "odd": {0: {"step": 1, 2: None}, "$": "dollar", "nan": float("nan"), "inf": -float("inf"), "big": 2**127},
        "betas": (0.9, 0.999), "grad": torch.nn.Parameter(torch.ones(2)), "float32": np.float32(0.5),
    }  # fmt: skip
    shard = Shard()
    shard.put("state", state)
    checkpoints.write(tmp_path / "a", shard, {"ranks": [0]})
    read, about = checkpoints.read(tmp_path / "a")
    found = read.get("state")
    assert about == {"ranks": [0]}
    assert len(found["tensors"]) == 15
    for mine, theirs in zip(state["tensors"], found["tensors"], strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine.float(), theirs.float())
    for name in ("empty", "number", "part", "grad"):
        assert torch.equal(state[name], found[name]) and found[name].shape == state[name].shape
    for mine, theirs in zip(state["arrays"], found["arrays"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert repr(found["odd"]) == repr(state["odd"]) and found["betas"] == (0.9, 0.999)
    data = (tmp_path / "a").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert (
        max(each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
        == len(data) - 8 - length
    )
    assert all(isinstance(value, str) for value in header["__metadata__"].values())


def test_each_damaged_byte_is_noticed(tmp_path: Path) -> None:
    """By the checksum, wherever the structure does not tell."""
    shard = Shard()
    shard.put("state", {"a": torch.arange(4.0), "b": 1})
    checkpoints.write(tmp_path / "a", shard, {"ranks": [0]})
    data = (tmp_path / "a").read_bytes()
    for place in range(len(data)):
        if data[place : place + 1] == b" ":
            continue  # what fills the header up says nothing
        (tmp_path / "a").write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ParameterError):
            checkpoints.read(tmp_path / "a")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")], "no draft stays"


def test_a_checkpoint_counts_once_all_its_shards_are_there(tmp_path: Path) -> None:
    """Drafts and single shards are none; the newest two stay."""
    for iteration in (5, 10, 15):
        for rank in range(3 if iteration < 15 else 2):
            shard = Shard()
            shard.put("iteration", iteration)
            path = checkpoints.shard_path(tmp_path, iteration, 3, rank)
            checkpoints.write(path, shard, {"ranks": [rank], "clocks_s": [iteration + rank / 10]})
    path.with_name(".rank-00002-of-00003.safetensors.99").write_bytes(b"torn")
    assert checkpoints.newest(tmp_path).iteration == 10
    assert checkpoints.clocks_s(checkpoints.newest(tmp_path)) == {0: 10.0, 1: 10.1, 2: 10.2}
    checkpoints.prune(tmp_path)
    assert [found.iteration for found in checkpoints.whole(tmp_path)] == [10, 5]
    with pytest.raises(ParameterError, match="no complete checkpoint"):
        checkpoints.newest(tmp_path / "nothing")
