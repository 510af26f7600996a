"""The report on a hang: which rank waits for which, in which call, at which line, and which rank never arrived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spawnsim.explain.reading import read
from spawnsim.explain.recorder import Recorders, members
from spawnsim.explain.stacks import Standing, standing
from spawnsim.waits import Row, ranks_text, ring, ring_text, table


@dataclass(frozen=True)
class _Place:
    """Where a rank stands; `waits` has the ranks for which it waits, None if the dumps do not show them."""

    row: Row
    waits: Sequence[int] | None
    pending: bool


def explain(paths: Iterable[Path | str]) -> str:
    """Return the report on a hang.

    Args:
        paths: one file for each rank, or two (a flight recorder's dump and a stack), or folders of such files.
    """
    dumps = read(map(Path, paths))
    recorded = {rank: each.recorder for rank, each in dumps.items() if each.recorder is not None}
    world = 1 + max([*dumps, *(rank for group in members(recorded).values() for rank in group)])
    recorders = Recorders(recorded, world)
    stacks = {rank: standing(each.stack) for rank, each in dumps.items() if each.stack}
    places = {rank: _place(rank, recorders, stacks, world) for rank in dumps}
    waiting = {rank: place.waits or [] for rank, place in places.items() if place.pending}
    cycle = ring(waiting)
    reason = recorders.mismatch() or _different(stacks, places) or (ring_text(cycle) if cycle else "")
    missing = [rank for rank in range(world) if rank not in dumps]
    reason = reason or _absent(places, waiting, missing)
    rows = [place.row for place in places.values()]
    first = cycle or [rank for rank, _ in _lacking(waiting).most_common(3)]
    lines = [
        f"hang: {len(waiting)} of {world} ranks {'waits' if len(waiting) == 1 else 'wait'}; {reason}",
        table(rows, first, time="since" if any(row.since for row in rows) else ""),
        *_notes(places, missing, recorders),
    ]
    return "\n".join(lines)


def _place(rank: int, recorders: Recorders, stacks: Mapping[int, Standing], world: int) -> _Place:
    """Return where a rank stands: by its first pending call, else by its stack, else after its last call."""
    stack = stacks.get(rank)
    call = recorders.pending(rank) if rank in recorders.calls else None
    name = f"rank {rank}"
    if call is not None:
        line = stack.line if stack is not None and call.line == "?" else call.line
        waits = recorders.peers(call) if recorders.knows(call) else None
        return _Place(Row(rank, name, call.since, call.text, line), waits, pending=True)
    if stack is not None:
        return _Place(
            Row(rank, name, "", stack.call, stack.line), _peers(rank, stack, stacks, world), stack.waits
        )
    last = next(iter(recorders.calls[rank][::-1]), None)
    text, line = (f"no call; last: {last.text}", last.line) if last is not None else ("no call recorded", "?")
    return _Place(Row(rank, name, last.since if last is not None else "", text, line), [], pending=False)


def _peers(rank: int, stack: Standing, stacks: Mapping[int, Standing], world: int) -> list[int] | None:
    """Return the ranks for which a stack waits, as far as stacks show it."""
    if stack.peer is not None:
        return [stack.peer]
    if not stack.collective or stack.in_group:
        return None
    return [each for each in range(world) if each not in stacks or stacks[each].name != stack.name]


def _different(stacks: Mapping[int, Standing], places: Mapping[int, _Place]) -> str:
    """Return a sentence on ranks that stand in different collectives by their stacks, or ""."""
    found = {rank: each for rank, each in stacks.items() if each.collective and not each.in_group}
    by_stack = {rank: each for rank, each in found.items() if places[rank].row.call == each.call}
    kinds = Counter(each.name for each in by_stack.values())
    if len(kinds) < 2:
        return ""
    usual = kinds.most_common(1)[0][0]
    others = [rank for rank, each in by_stack.items() if each.name == usual]
    rank, wrong = next((rank, each) for rank, each in by_stack.items() if each.name != usual)
    is_or_are = "is" if len(others) == 1 else "are"
    usual_one = by_stack[others[0]]
    return (
        f"rank {rank} is in {wrong.call} at {wrong.line} where {ranks_text(others)} {is_or_are} in {usual_one.call} "
        f"at {usual_one.line}"
    )


def _lacking(waiting: Mapping[int, Sequence[int]]) -> Counter[int]:
    """Return how many ranks wait for each rank that waits for none."""
    return Counter(peer for peers in waiting.values() for peer in peers if peer not in waiting)


def _absent(
    places: Mapping[int, _Place], waiting: Mapping[int, Sequence[int]], missing: Sequence[int]
) -> str:
    """Return for which rank others wait, when the waits form no cycle."""
    if not waiting:
        return "each has finished its calls, or stands outside of communication"
    lacking = _lacking(waiting)
    if not lacking:
        unknown = any(places[rank].waits is None for rank in waiting)
        return "the dumps do not show for whom" if unknown else (
            "all ranks have made the call for which they wait: look at the network, or for a rank that died"
        )  # fmt: skip
    rank = max(lacking, key=lambda each: (each not in missing, lacking[each], -each))
    waiters = [each for each, peers in waiting.items() if rank in peers]
    why = "whose dump is missing" if rank in missing else "which did not make the call"
    return f"{ranks_text(waiters)} {'waits' if len(waiters) == 1 else 'wait'} for rank {rank}, {why}"


def _notes(places: Mapping[int, _Place], missing: Sequence[int], recorders: Recorders) -> Iterator[str]:
    """Yield what the dumps lack, a line for each kind."""
    if missing:
        yield f"No dump: {ranks_text(missing)}"
    unknown = [rank for rank, place in places.items() if place.pending and place.waits is None]
    groups = sorted({
        call.group_text for rank in unknown if rank in recorders.calls and (call := recorders.pending(rank)) is not None
    })  # fmt: skip
    if groups:
        yield f"The ranks of {', '.join(groups)} are not recorded (gloo records the default group only)"
    elif unknown or (recorders.calls == {} and not any(place.pending for place in places.values())):
        yield (
            "For whom they wait is not in the stacks: `py-spy dump --native --locals` shows more, and so does "
            "the program's file, if it lies here"
        )
    silent = [rank for rank, each in recorders.calls.items() if not each]
    if silent:
        yield f"Nothing recorded by {ranks_text(silent)}: set TORCH_FR_BUFFER_SIZE=2000 before the job starts"
    if any(place.row.line == "?" and place.pending for place in places.values()):
        yield "A flight recorder's JSON has no lines: give its pickle, or the stacks of py-spy as well"
