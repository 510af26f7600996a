"""Chakra execution traces: written from traced runs, read into programs that have timing alone.

A trace is a file for each rank (`NAME.RANK.et`): messages of protocol buffers, each after its length, first a
`GlobalMetadata`, then a `Node` for each operation, with the nodes on which it depends (MLCommons Chakra,
`et_def.proto`). The few fields that are used are coded here: a generated module would need protobuf's compiler, of the
version of the runtime. `comm_group.json` beside the files says which ranks each `pg_name` is, as ASTRA-sim has it.
"""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.phantoms import PhantomArray

COMP, SEND, RECV, COLL = 4, 5, 6, 7
KINDS = {COMP: "COMP_NODE", SEND: "COMM_SEND_NODE", RECV: "COMM_RECV_NODE", COLL: "COMM_COLL_NODE"}
COLLECTIVES = (
    "allreduce", "reduce", "allgather", "gather", "scatter", "bcast", "alltoall", "reduce_scatter",
    "reduce_scatter_block", "barrier",
)  # fmt: skip
# ASTRA-sim 2.2 ends with "Unsupported collective comm type" at the others, and replays a broadcast's recorded time.
SIMULATED = ("allreduce", "allgather", "bcast", "alltoall", "reduce_scatter")
GROUPS = "comm_group.json"
VERSION = "0.0.4"


@dataclass
class Node:
    """One operation of a rank. `attr` has what Chakra calls attributes: whole numbers, texts, truth values."""

    id: int
    kind: int
    name: str = ""
    deps: list[int] = field(default_factory=list)
    start_us: int = 0
    lasts_us: int = 0
    attr: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- coding
def _varint(value: int) -> bytes:
    found = bytearray()
    value &= (1 << 64) - 1
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(raw)) + raw


def _attribute(name: str, value: Any) -> bytes:
    number = 27 if isinstance(value, bool) else 29 if isinstance(value, str) else 9
    return _field(1, name) + _field(number, int(value) if isinstance(value, bool) else value)


def encoded(node: Node) -> bytes:
    """Return a node as a message of protocol buffers."""
    parts = [_field(1, node.id), _field(2, node.name), _field(3, node.kind)]
    if node.deps:
        parts.append(_field(5, b"".join(map(_varint, node.deps))))  # data_deps
    parts += [_field(6, node.start_us), _field(7, node.lasts_us)]
    parts += [_field(10, _attribute(*each)) for each in node.attr.items()]
    return b"".join(parts)


class _Cursor:
    """Reads one message; every error names the file."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at = path, data, 0

    def error(self, what: str) -> ParameterError:
        return ParameterError(f"{self.path}: {what}: no Chakra trace, or a damaged one")

    def varint(self) -> int:
        value = shift = 0
        while True:
            if self.at >= len(self.data) or shift > 63:
                raise self.error(f"a number ends amid byte {self.at}")
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise self.error(
                f"{count} bytes are announced at byte {self.at}, {len(self.data) - self.at} are there"
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def fields(self) -> Iterator[tuple[int, int | bytes]]:
        while self.at < len(self.data):
            number, wire = divmod(self.varint(), 8)
            if wire == 0:
                yield number, self.varint()
            elif wire in (1, 2, 5):
                yield number, self.take({1: 8, 5: 4}.get(wire) or self.varint())
            else:
                raise self.error(f"field {number} has the unknown type {wire}")


def _numbers(path: Path, value: int | bytes) -> list[int]:
    if isinstance(value, int):
        return [value]
    cursor, found = _Cursor(path, value), []
    while cursor.at < len(cursor.data):
        found.append(cursor.varint())
    return found


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def decoded(path: Path, data: bytes) -> Node:
    """Return the node of a message; `path` is for errors."""
    node = Node(-1, 0)
    for number, value in _Cursor(path, data).fields():
        if number in (4, 5):
            node.deps += _numbers(path, value)
        elif number == 10 and isinstance(value, bytes):
            name, found = _decoded_attribute(path, value)
            node.attr[name] = found
        elif number == 2 and isinstance(value, bytes):
            node.name = value.decode("utf-8", "replace")
        elif isinstance(value, int):
            key = {1: "id", 3: "kind", 6: "start_us", 7: "lasts_us"}.get(number)
            if key is not None:
                setattr(node, key, value)
    if node.id < 0:  # proto3 leaves out what is 0
        node.id = 0
    return node


def _decoded_attribute(path: Path, data: bytes) -> tuple[str, Any]:
    name = ""
    found: Any = None
    for number, value in _Cursor(path, data).fields():
        if number == 1 and isinstance(value, bytes):
            name = value.decode("utf-8", "replace")
        elif number == 29 and isinstance(value, bytes):
            found = value.decode("utf-8", "replace")
        elif number in (3, 5) and isinstance(value, bytes):
            found = struct.unpack("<d" if number == 3 else "<f", value)[0]
        elif isinstance(value, int):  # zigzag where signed types are kept so
            found = (value >> 1) ^ -(value & 1) if number in (15, 19) else _signed(value)
    return name, found


def write_nodes(path: Path, nodes: Sequence[Node]) -> None:
    """Write the trace of one rank."""
    messages = [_field(1, VERSION), *map(encoded, nodes)]
    path.write_bytes(b"".join(_varint(len(each)) + each for each in messages))


def read_nodes(path: Path) -> list[Node]:
    """Return the nodes of one rank, in the order of the file.

    Raises:
        ParameterError: the file cannot be read, is damaged, or a node depends on one that is not there.
    """
    try:
        cursor = _Cursor(path, path.read_bytes())
    except OSError as error:
        raise ParameterError(f"{path}: cannot be read ({error})") from error
    cursor.take(cursor.varint())  # GlobalMetadata
    nodes = []
    while cursor.at < len(cursor.data):
        nodes.append(decoded(path, cursor.take(cursor.varint())))
    known = Counter(node.id for node in nodes)
    for node in nodes:
        if known[node.id] > 1:
            raise ParameterError(f"{path}: node {node.id} is there {known[node.id]} times")
        missing = [each for each in node.deps if each not in known]
        if missing:
            raise ParameterError(f"{path}: node {node.id}: data_deps: no node {missing[0]}")
    return nodes


# ------------------------------------------------------------------------------------------------------------ writing
def base_collective(call: str) -> int | None:
    """Return Chakra's number of a collective by mpi4py's name of the call: "Iallreduce" is 0; None if it has none."""
    name = call.lower().removesuffix("v")
    for form in (name, name.removeprefix("i")):
        if form in COLLECTIVES:
            return COLLECTIVES.index(form)
    return None


@dataclass
class Written:
    """What was written: nodes by kind; by name calls that have none, and collectives that ASTRA-sim refuses."""

    nodes: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


def write_traces(rows: Sequence[Mapping[str, Any]], out: Path) -> Written:
    """Write a traced run as Chakra execution traces.

    Each rank's operations depend on the one before in its program; a non-blocking collective on that, and what comes
    after its Wait on it. Durations are whole microseconds. One-sided accesses, neighbour exchanges and scans are in no
    node, since Chakra has none for them.

    Args:
        rows: calls and messages of the run, as `Timeline.rows` yields them.
        out: the folder; `trace.RANK.et` and `comm_group.json` are written in it.

    Returns:
        What was written.
    """
    calls: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    messages: defaultdict[tuple[int, int], list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    members: defaultdict[int, set[int]] = defaultdict(set)
    for row in rows:
        if "call" not in row:
            messages[row["source"], row["out"]].append((SEND, row))
            messages[row["rank"], row["into"]].append((RECV, row))
        elif not row.get("task"):
            calls[row["rank"]].append(row)
            if "context" in row:
                members[row["context"]].add(row["rank"])
    found = Written()
    out.mkdir(parents=True, exist_ok=True)
    for rank, own in sorted(calls.items()):
        own.sort(key=lambda row: int(row["number"]))
        write_nodes(out / f"trace.{rank}.et", list(_nodes(rank, own, messages, found)))
    groups = {str(context): sorted(ranks) for context, ranks in sorted(members.items())}
    (out / GROUPS).write_text(json.dumps(groups), encoding="utf-8")
    return found


def _nodes(
    rank: int,
    calls: Sequence[Mapping[str, Any]],
    messages: Mapping[tuple[int, int], Sequence[tuple[int, Mapping[str, Any]]]],
    found: Written,
) -> Iterator[Node]:
    before: list[int] = []  # what the next operation depends on
    begun: dict[tuple[int, int], int] = {}  # non-blocking collectives
    number = 0
    for row in calls:
        made = []
        for node in _of_call(row, messages.get((rank, row["number"]), ())):
            number += 1
            node.id, node.deps = number, list(before)
            found.nodes[KINDS[node.kind]] += 1
            found.refused[row["call"]] += (
                node.kind == COLL and COLLECTIVES[node.attr["comm_type"]] not in SIMULATED
            )
            made.append(node.id)
            yield node
        key = row.get("context", -1), row.get("collective", -1)
        kind = base_collective(row["call"])
        if kind is not None and row["call"].lower().startswith("i"):
            begun[key] = made[0]
        elif key in begun and kind is None:  # its Wait
            before = [*before, begun.pop(key)]
        elif made:
            before = made
        elif row["call"] not in ("compute", "sleep", "join", "Wait", "Waitall") or "received" in row:
            found.left_out[row["call"]] += 1


def _of_call(row: Mapping[str, Any], messages: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[Node]:
    start_us = round(1e6 * row["time_s"])
    lasts_us = max(round(1e6 * row["end_s"]) - start_us, 0) if row["end_s"] < float("inf") else 0
    common = {"start_us": start_us, "lasts_us": lasts_us, "name": row["call"]}
    kind = base_collective(row["call"])
    if row["call"] in ("compute", "sleep"):
        yield Node(0, COMP, attr={"is_cpu_op": False}, **common)
    elif kind is not None and "context" in row:
        attr = {"is_cpu_op": False, "comm_type": kind, "comm_size": row.get("sent", 0)}
        yield Node(
            0, COLL, attr=attr | {"pg_name": str(row["context"]), "root": row.get("root", 0)}, **common
        )
    for end, message in messages:
        attr = {"is_cpu_op": False, "comm_size": message["bytes"], "comm_tag": message["tag"]}
        attr |= {"comm_src": message["source"], "comm_dst": message["rank"]}
        yield Node(0, end, attr=attr, **common)


# ------------------------------------------------------------------------------------------------------------ reading
def read_traces(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the operations of all ranks, from files `NAME.RANK.et` and the `comm_group.json` beside them.

    Returns:
        "ranks": for each its operations, in an order in which each stands behind those that it depends on;
        "groups": the ranks of each process group.

    Raises:
        ParameterError: a file cannot be read, a rank is missing, dependencies go round, or an attribute is missing.
    """
    files: dict[int, Path] = {}
    for path in paths:
        word = path.name.split(".")[-2] if path.name.count(".") > 1 else ""
        if not word.isdecimal() or int(word) in files:
            raise ParameterError(f"{path}: files are called NAME.RANK.et, one for each rank")
        files[int(word)] = path
    missing = [rank for rank in range(len(files)) if rank not in files]
    if missing or not files:
        raise ParameterError(
            f"{paths[0] if paths else 'no file'}: no file is of rank {missing[0] if missing else 0}"
        )
    beside = files[0].parent / GROUPS
    groups: dict[str, list[int]] = {}
    if beside.is_file():
        try:
            groups = {
                name: [int(rank) for rank in ranks] for name, ranks in json.loads(beside.read_text()).items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ParameterError(f"{beside}: not a list of ranks for each group ({error})") from error
    ranks = [[_operation(files[rank], node) for node in _ordered(files[rank])] for rank in range(len(files))]
    return {"ranks": ranks, "groups": groups}


def _ordered(path: Path) -> list[Node]:
    """Return the nodes of a file, each behind those that it depends on; else as in the file."""
    nodes = read_nodes(path)
    left = {node.id: len(set(node.deps)) for node in nodes}
    then: defaultdict[int, list[int]] = defaultdict(list)
    by_id = {node.id: (place, node) for place, node in enumerate(nodes)}
    for node in nodes:
        for each in set(node.deps):
            then[each].append(node.id)
    ready = [by_id[own][0] for own, count in left.items() if not count]
    found = []
    heapify(ready)
    while ready:
        node = nodes[heappop(ready)]
        found.append(node)
        for each in then[node.id]:
            left[each] -= 1
            if not left[each]:
                heappush(ready, by_id[each][0])
    if len(found) < len(nodes):
        stuck = min(own for own, count in left.items() if count)
        raise ParameterError(f"{path}: node {stuck}: data_deps: it depends on itself, by others")
    return found


_NEEDED = {
    COMP: (), SEND: ("comm_size", "comm_dst"), RECV: ("comm_size", "comm_src"), COLL: ("comm_size", "comm_type")
}  # fmt: skip


def _operation(path: Path, node: Node) -> dict[str, Any]:
    """Return what is done for a node, as JSON can hold it."""
    for name in _NEEDED.get(node.kind, ()):
        value = node.attr.get(name)
        if not isinstance(value, int) or value < 0:
            raise ParameterError(
                f"{path}: node {node.id} ({node.name}): {name} is {value!r}, no whole number"
            )
    attr = {name: node.attr[name] for name in _NEEDED.get(node.kind, ())}
    kept = {
        name: node.attr[name] for name in ("comm_tag", "pg_name", "root") if node.attr.get(name) is not None
    }
    # Memory, storage and metadata pass as computing of their length.
    kind = node.kind if node.kind in KINDS else COMP
    if kind == COLL and attr["comm_type"] >= len(COLLECTIVES):
        raise ParameterError(
            f"{path}: node {node.id} ({node.name}): comm_type {attr['comm_type']} is not known"
        )
    return {"id": node.id, "kind": kind, "deps": node.deps, "us": node.lasts_us, **attr, **kept}


PROGRAM = '''"""{count} ranks of a Chakra execution trace, timing alone: made by `spawnsim import chakra`."""

from pathlib import Path

from spawnsim.fidelity.chakra import replay

DIGEST = "{digest}"  # of the operations, so that another trace is another program


def main(comm):
    """Carry out this rank's operations."""
    replay(comm, Path(__file__).with_suffix(".json"))
'''


def replay(comm: Any, path: Path) -> None:
    """Carry out a rank's operations on `comm`: computing takes the time recorded, communication what it takes here.

    An operation begins when those it depends on are over. Communication goes on beside what does not depend on it;
    computing is one operation at a time, in the order of the file.

    Args:
        comm: the world, with as many ranks as the trace.
        path: what `spawnsim import chakra` wrote.

    Raises:
        ParameterError: another number of ranks.
    """
    known = _known(str(path), path.stat().st_mtime_ns)
    if comm.Get_size() != len(known["ranks"]):
        raise ParameterError(f"{path}: {len(known['ranks'])} ranks: run it on as many, not {comm.Get_size()}")
    rank, group = comm.Get_rank(), comm.Get_group()
    groups = {
        name: (comm.Create_group(group.Incl(ranks)), ranks)
        for name, ranks in known["groups"].items()
        if rank in ranks
    }
    going: dict[int, Any] = {}
    for operation in known["ranks"][rank]:
        for each in operation["deps"]:
            if each in going:
                going.pop(each).Wait()
        if operation["kind"] == COMP:
            with comm.compute(1e-6 * operation["us"]):
                pass
        else:
            going[operation["id"]] = _begun(comm, groups, operation)
    for request in going.values():
        request.Wait()


@lru_cache(maxsize=1)  # all virtual ranks of a process read one file
def _known(path: str, _changed: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))
    return found


def _begun(comm: Any, groups: Mapping[str, tuple[Any, Sequence[int]]], operation: Mapping[str, Any]) -> Any:
    nbytes, tag = operation["comm_size"], operation.get("comm_tag", 0)
    if operation["kind"] == SEND:
        return comm.Isend(_bytes(nbytes), operation["comm_dst"], tag)
    if operation["kind"] == RECV:
        return comm.Irecv(_bytes(nbytes), operation["comm_src"], tag)
    within, ranks = groups.get(operation.get("pg_name", ""), (comm, range(comm.Get_size())))
    name, root = COLLECTIVES[operation["comm_type"]], operation.get("root", 0)
    size, here = len(ranks), within.Get_rank() == root
    each = -(-nbytes // size)
    if name == "barrier":
        return within.Ibarrier()
    if name == "bcast":
        return within.Ibcast(_bytes(nbytes), root)
    if name in ("allreduce", "reduce"):
        sum_of = _bytes(nbytes)
        if name == "allreduce":
            return within.Iallreduce(sum_of, _bytes(nbytes))
        return within.Ireduce(sum_of, _bytes(nbytes) if here else None, root=root)
    if name == "allgather":
        return within.Iallgather(_bytes(nbytes), _bytes(nbytes * size))
    if name == "gather":
        return within.Igather(_bytes(nbytes), _bytes(nbytes * size) if here else None, root)
    if name == "scatter":
        return within.Iscatter(_bytes(each * size) if here else None, _bytes(each), root)
    if name == "alltoall":
        return within.Ialltoall(_bytes(each * size), _bytes(each * size))
    return within.Ireduce_scatter_block(_bytes(each * size), _bytes(each))


def _bytes(count: int) -> PhantomArray:
    return PhantomArray(count, "u1")
