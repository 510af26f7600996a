"""PyTorch's flight recorders of all ranks: which call each rank waits in, for whom, and where calls do not match.

A recorder keeps the last calls of a rank. `collective_seq_id` counts the collectives of a group, so the calls of its
ranks with one number belong together. Gloo records neither `send` and `recv` nor the ranks of its groups, and leaves
the state of a call at "scheduled": only "retired" shows that it is over.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from spawnsim.explain.stacks import own_file
from spawnsim.waits import line, ranks_text

# Calls for which all ranks give the same shapes; of other calls a rank's shapes may differ.
ALIKE = {"all_reduce", "allreduce_coalesced", "broadcast", "reduce", "all_gather", "_all_gather_base",
         "_reduce_scatter_base", "reduce_scatter"}  # fmt: skip
TYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32", "Short": "int16",
         "Char": "int8", "Byte": "uint8"}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """An entry of a flight recorder.

    Attributes:
        rank: the rank that made it.
        group: the group's name, and its description.
        number: `collective_seq_id`, or `p2p_seq_id`.
        name: such as "all_reduce", without the backend; "send 0->1" for messages.
        over: whether it is complete.
        detail: shape and type, as text.
        line: the program's line; "?" in JSON, which has no stacks.
        since: when it was made, of the host's clock in UTC.
    """

    rank: int
    group: tuple[str, str]
    number: int
    name: str
    over: bool
    detail: str
    line: str
    since: str

    @property
    def text(self) -> str:
        """The call in the form of the table."""
        return f"{self.name}({self.detail}), collective_seq_id {self.number} on {self.group_text}"

    @property
    def place(self) -> str:
        """The line, for the end of a sentence."""
        return "" if self.line == "?" else f" at {self.line}"

    @property
    def group_text(self) -> str:
        """The group's description, or its name."""
        name, description = self.group
        return description if description not in ("", "undefined") else f"group {name}"

    @property
    def signature(self) -> tuple[str, str]:
        """What all ranks of a group must have in common."""
        return self.name, self.detail if self.name in ALIKE else ""


def calls(rank: int, recorder: Mapping[str, Any]) -> list[Call]:
    """Return the calls of a recorder in their order."""
    entries = sorted(recorder["entries"], key=lambda entry: entry.get("record_id", 0))
    return [_call(rank, entry) for entry in entries]


def _call(rank: int, entry: Mapping[str, Any]) -> Call:
    name, description = entry["process_group"]
    frames = [(str(each["filename"]), int(each["line"])) for each in entry.get("frames") or ()]
    shapes, types = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    about = [f"shape={shapes[0] if len(shapes) == 1 else shapes}"] if shapes else []
    about += (
        [f"dtype={', '.join(sorted({TYPES.get(each, each.lower()) for each in types}))}"] if types else []
    )
    ns = entry.get("time_created_ns")
    return Call(
        rank,
        (str(name), str(description)),
        entry.get("p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id", 0),
        str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        entry["state"] == "completed" or bool(entry.get("retired")),
        ", ".join(about),
        line(frames, own_file) or "?",
        f"{datetime.fromtimestamp(ns / 1e9, UTC):%H:%M:%S.%f}"[:-3] if ns else "",
    )


class Recorders:
    """The recorders of all ranks that have one.

    Args:
        recorders: rank -> its dump.
        world: the number of ranks.
    """

    def __init__(self, recorders: Mapping[int, Mapping[str, Any]], world: int) -> None:
        self.calls = {rank: calls(rank, each) for rank, each in recorders.items()}
        self._members = {
            name: ranks for name, ranks in members(recorders).items() if name
        }  # gloo's has no name
        self._at: dict[tuple[str, int], dict[int, Call]] = defaultdict(dict)
        self._last: dict[str, dict[int, int]] = defaultdict(dict)
        for call in (call for each in self.calls.values() for call in each if _peer(call) is None):
            self._at[call.group[0], call.number][call.rank] = call
            self._last[call.group[0]][call.rank] = max(
                call.number, self._last[call.group[0]].get(call.rank, 0)
            )
            if "default_pg" in call.group or call.group[0] == "0":
                self._members.setdefault(call.group[0], range(world))

    def pending(self, rank: int) -> Call | None:
        """Return the first call of a rank that is not over."""
        return next((call for call in self.calls[rank] if not call.over), None)

    def peers(self, call: Call) -> list[int]:
        """Return the ranks for which a call waits: ranks that did not make it, or made another."""
        members = self._members.get(call.group[0], [])
        if (peer := _peer(call)) is not None:
            return [members[peer] if peer < len(members) else peer]
        here, last = self._at[call.group[0], call.number], self._last[call.group[0]]
        # A recorder keeps the last calls only: a rank that has made a later one has made this one, too.
        return [
            rank for rank in members
            if (here[rank].signature != call.signature if rank in here else last.get(rank, -1) < call.number)
        ]  # fmt: skip

    def knows(self, call: Call) -> bool:
        """Whether the ranks of a call's group are known."""
        return call.group[0] in self._members

    def mismatch(self) -> str:
        """Return a sentence on the first collective for which the calls of its ranks differ, or ""."""
        for _, here in sorted(self._at.items(), key=lambda each: (each[0][1], each[0][0])):
            kinds = Counter(call.signature for call in here.values())
            if len(kinds) < 2 or all(call.over for call in here.values()):
                continue
            usual = kinds.most_common(1)[0][0]
            others = [call for call in here.values() if call.signature == usual]
            wrong = next(call for call in here.values() if call.signature != usual)
            return (
                f"collective_seq_id {wrong.number} on {wrong.group_text}: rank {wrong.rank} calls {wrong.name}"
                f"({wrong.detail}){wrong.place} where {ranks_text([call.rank for call in others])} "
                f"{'calls' if len(others) == 1 else 'call'} {others[0].name}({others[0].detail}){others[0].place}"
            )
        return ""


def _peer(call: Call) -> int | None:
    """Return the other rank of a message, as its number in the group."""
    found = re.fullmatch(r"(send|recv) (\d+)(->|<-)(\d+)", call.name)
    return int(found[4]) if found else None


def members(recorders: Mapping[int, Mapping[str, Any]]) -> dict[str, Sequence[int]]:
    """Return the ranks of each group that recorders list; gloo lists one of a rank's groups, without its name."""
    found: dict[str, Sequence[int]] = {}
    for each in recorders.values():
        for name, config in (each.get("pg_config") or {}).items():
            ranks = config.get("ranks") or "[]"
            if listed := json.loads(ranks) if isinstance(ranks, str) else ranks:
                found.setdefault(str(name), sorted(int(rank) for rank in listed))
    return found
