"""Follows the calls of a run's ranks, and collects the races of their accesses to exposed memory.

A rank runs on only when a call of it returns, so bytes that have changed between two of its calls were changed by its
program: that is a local store. Loads leave no trace; `loads` reports those in the program's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from spawnsim.comm.buffers import Buffer, as_buffer
from spawnsim.comm.constants import LOCK_EXCLUSIVE, WIN_FLAVOR_SHARED
from spawnsim.comm.memory import as_bytes
from spawnsim.errors import DataRace
from spawnsim.virtual.engine.causality import Stamp, joined
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.rma import Epochs
from spawnsim.virtual.ordering import Ordering
from spawnsim.virtual.races.accesses import (
    EXCLUSIVE,
    SHARED,
    Access,
    Runs,
    line_of_program,
    overlap,
    runs_of,
    text_of,
)
from spawnsim.virtual.races.calls import STARTED, buffers_of, noticing
from spawnsim.virtual.races.memory import Part, Private, touching
from spawnsim.virtual.timeline import being_watched

# Calls that start an access and order nothing: stores before and after them are alike, except to the bytes they access.
STARTING = frozenset(
    (
        "Put", "Get", "Accumulate", "Get_accumulate", "Fetch_and_op", "Compare_and_swap", "Rput", "Rget", "Raccumulate",
        "Rget_accumulate",
    )
)  # fmt: skip
SHOWN = 20  # races that are shown


@dataclass(eq=False, slots=True)
class Issued:
    """A one-sided call: its access to the target's memory, and those to its own buffers."""

    remote: Access
    place: int
    own: list[Access]
    fetches: bool  # only reads the target: complete at the target when it is complete at the origin
    acquired: Stamp | None = None  # of the atomic writes whose values it has read
    parts: list[Part] = field(default_factory=list)


class Races:
    """The accesses and races of one world."""

    def __init__(self, world: World) -> None:
        self.world, self.ordering = world, Ordering(world)
        self.clocks = self.ordering.clocks
        size = len(world.ranks)
        self.parts: list[list[Part]] = [
            [] for _ in range(size)
        ]  # the memory that each rank can load and store
        self.targets: dict[Any, list[Part]] = {}  # by target of a window
        self.private: list[list[Private]] = [[] for _ in range(size)]
        self.since: list[Stamp] = [
            self.clocks.stamp(rank) for rank in range(size)
        ]  # of each rank's last call
        self.since_line = [""] * size
        self.seen_now: list[set[Any]] = [set() for _ in range(size)]  # loads and stores since its last call
        self.calls: dict[Task, str] = {}  # the active call of each task
        self.issuing: dict[Task, Issued] = {}
        self.sent: dict[Any, Issued] = {}  # by `rma_service.Access`
        self.transfers: dict[Any, list[Access]] = {}  # sends and receives with a request, by completion
        self.pending: dict[Any, list[Issued]] = {}  # by epoch
        self.held: dict[tuple[int, Any], int] = {}  # locks, by rank and target
        self.freed: dict[
            Any, tuple[Stamp | None, Stamp | None]
        ] = {}  # of shared and exclusive locks, by target
        self.leaving: dict[tuple[int, Any], Stamp] = {}
        # By calls and lines: the two accesses, the bytes in words, and whether the memory is shared.
        self.found: dict[Any, tuple[Access, Access, str, bool]] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the ranks while the block runs."""
        self.world.races = self
        self.world.watchers.append(self.watching)
        with self.ordering.followed(), being_watched(), noticing():
            yield

    def error(self) -> DataRace | None:
        """Return the error that lists the races, if there are any."""
        if not self.found:
            return None
        # Only now it is known whether an access was completed at all.
        texts = [text_of(old, new, where, shared=shared) for old, new, where, shared in self.found.values()]
        more = f"\nand {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        head = "1 data race" if len(texts) == 1 else f"{len(texts)} data races"
        return DataRace(f"{head}:\n" + "\n".join(texts[:SHOWN]) + more, tuple(texts))

    # -- calls -------------------------------------------------------------------------------------------------

    def watching(self, name: str, subject: Any, call: Callable[[], Any]) -> Any:
        """Make a call; before it, look for the stores that the program has made since the last one."""
        task = current_task()
        assert task is not None
        if task in self.calls:
            return call()
        rank, orders = task.rank, name not in STARTING
        self.seen_now[rank].clear()
        if orders and (self.parts[rank] or self.private[rank]):
            self.look(rank)
        self.calls[task] = name
        try:
            result = call()
            if name in STARTED and result._completion is not None:
                for array, writes in buffers_of(name, call):
                    self.starts(rank, result._completion, as_buffer(array), call=name, writes=writes)
            return result
        finally:
            del self.calls[task]
            if orders and (self.parts[rank] or self.private[rank]):
                self._after(rank, name, stores=not isinstance(subject, Epochs))

    def look(self, rank: int) -> None:
        """Record the local stores of a rank since its last call."""
        for part in self.parts[rank]:
            runs = part.changes()
            if runs:
                self._stored(rank, part, runs, f"a store after {self.since_line[rank]}")
        for own in [*self.private[rank]]:
            runs = own.changes()
            if runs and own.access.end is None:
                self._stored(rank, own, runs, f"a store after {self.since_line[rank]}")

    def _stored(self, rank: int, where: Part | Private, runs: Runs, call: str) -> None:
        number = self.clocks.count(rank)
        use = Access(rank, call, "", number, self.since[rank], runs, writes=True, end=number)
        self._local(
            use, [where] if isinstance(where, Part) else [], where if isinstance(where, Private) else None
        )

    def _look_at(self, rank: int, runs: Runs) -> None:
        """Record the local stores to these bytes, which a one-sided call is about to access."""
        for part in touching(self.parts[rank], runs):
            found = part.changes_in(runs)
            if found:
                self._stored(rank, part, found, f"a store after {self.since_line[rank]}")

    def _after(self, rank: int, name: str, *, stores: bool) -> None:
        """Record what a call itself has stored in exposed memory, if it may, such as Recv."""
        line = ""
        for part in self.parts[rank]:
            runs = part.changes() if stores else ()
            if runs:
                line = line or line_of_program()
                number = self.clocks.count(rank)
                stamp = self.clocks.stamp(rank)
                self._local(Access(rank, name, line, number, stamp, runs, writes=True, end=number), [part])
            part.prune(self.clocks.known_to_all)
        if stores:
            for own in self.private[rank]:
                own.changes()
        self.since[rank], self.since_line[rank] = self.clocks.stamp(rank), line_of_program()

    def seen(self, runs: Runs, *, writes: bool, line: str) -> None:
        """Record a load or store that the program makes now."""
        task = current_task()
        if task is None or not runs:
            return
        rank, access = task.rank, (runs, writes, line)
        if access in self.seen_now[rank]:  # again, since its last call
            return
        self.seen_now[rank].add(access)
        parts = touching(self.parts[rank], runs)
        private = [each for each in self.private[rank] if overlap(((each.low, each.high),), runs)]
        if not parts and not private:
            return
        number = self.clocks.count(rank)
        call = "a store" if writes else "a load"
        use = Access(rank, call, line, number, self.clocks.stamp(rank), runs, writes=writes, end=number)
        self._local(use, parts)
        for own in private:
            self._local(use, [], own)

    def exposes(self, rank: int) -> bool:
        """Whether a rank has memory in which races can be."""
        return bool(self.parts[rank] or self.private[rank])

    def accept(self, rank: int, runs: Runs) -> None:
        """Copy what a one-sided call, or a store that was seen, has written."""
        for part in (*self.parts[rank], *self.private[rank]):
            part.accept(runs)

    def _local(self, use: Access, parts: Sequence[Part], own: Private | None = None) -> None:
        for part in parts:
            self._check(use, part)
        if own is not None and own.access.end is None and (own.access.writes or use.writes):
            found = overlap(own.access.runs, use.runs)
            if found is not None:
                self._report(own.access, use, "the buffer of the call", shared=False)

    def _check(self, new: Access, part: Part) -> None:
        new.lock = self.held.get((new.rank, part.target), new.lock)
        for old, (low, high) in part.races(new):
            self._report(old, new, part.named(low, high), shared=part.shared)

    def _report(self, old: Access, new: Access, where: str, *, shared: bool) -> None:
        key = old.call, old.line, new.call, new.line
        if key not in self.found:
            self.found[key] = old, new, where, shared

    # -- windows -----------------------------------------------------------------------------------------------

    def opened(self, window: Any) -> None:
        """Watch this rank's part of a window, and of shared memory the other parts."""
        windows, rank = window._windows, window._comm._rank.id
        shared = windows.flavor == WIN_FLAVOR_SHARED
        for place, target in enumerate(windows.targets):
            if not target.memory.nbytes:
                continue
            # The parts of all ranks, since this rank may access one before its owner returns.
            if target not in self.targets:
                self.targets[target] = [Part(target.memory, window._label, target.rank.id, target, shared)]
            if shared or place == window._place:
                self.parts[rank].append(self.targets[target][0])
        self.since[rank], self.since_line[rank] = self.clocks.stamp(rank), line_of_program()

    def attached(self, window: Any, memory: Any) -> None:
        """Watch memory that is attached to a dynamic window."""
        target, rank = window._windows.targets[window._place], window._comm._rank.id
        part = Part(as_bytes(memory), window._label, rank, target)
        self.targets.setdefault(target, []).append(part)
        self.parts[rank].append(part)

    def closed(self, window: Any) -> None:
        """Stop watching the parts of a window that this rank has freed."""
        ours = {id(part) for target in window._windows.targets for part in self.targets.get(target, ())}
        rank = window._comm._rank.id
        self.parts[rank] = [part for part in self.parts[rank] if id(part) not in ours]
        self.pending.pop(window._epoch, None)

    def begin(
        self, window: Any, place: int, part: Buffer, *, atomic: tuple[str, str, int] | None, writes: bool,
        reads: Sequence[Buffer], results: Sequence[Buffer],
    ) -> Issued:  # fmt: skip
        """Record a one-sided call that is about to be sent."""
        rank, task, epoch = window._comm._rank.id, current_task(), window._epoch
        assert task is not None
        self.seen_now[rank].clear()
        number, line = self.clocks.count(rank), line_of_program()
        stamp, call = (
            self.clocks.stamp(rank),
            self.calls.get(task, "Get_accumulate"),
        )  # whose name alone is not watched
        target = window._windows.targets[place]
        lock = self.held.get((rank, target), SHARED * epoch.locked_all)
        kind = next(kind for kind, holds in (
            ("lock", place in epoch.locked), ("lock_all", epoch.locked_all), ("Start", place in epoch.started),
            ("fence", True),
        ) if holds)  # fmt: skip
        remote = Access(
            rank, call, line, number, stamp, runs_of(part), writes=writes, atomic=atomic, lock=lock, epoch=kind,
            remote=True,
        )  # fmt: skip
        if target.rank.id == rank:
            self._look_at(rank, remote.runs)
        issued = Issued(remote, place, [], not writes)
        # Also the parts of other windows on the same memory.
        exposed = dict.fromkeys([*self.targets.get(target, []), *self.parts[target.rank.id]])
        issued.parts = touching([*exposed], remote.runs)
        for each in issued.parts:
            self._check(remote, each)
        for buffer, stores in [*((each, False) for each in reads), *((each, True) for each in results)]:
            runs = runs_of(buffer)
            self._look_at(rank, runs)
            own = Access(
                rank, call, line, number, stamp, runs, writes=stores, epoch=kind, origin=True, lock=0
            )
            self._begin_own(own, buffer)
            issued.own.append(own)
        self.pending.setdefault(epoch, []).append(issued)
        self.issuing[task] = issued
        return issued

    def _begin_own(self, own: Access, buffer: Buffer) -> None:
        """Record the access of a one-sided call to its own buffer, in exposed or in other memory."""
        rank = own.rank
        parts = touching(self.parts[rank], own.runs)
        for part in parts:
            self._check(own, part)
        if parts or not own.runs:
            return
        for other in self.private[rank]:
            old = other.access
            pending = old.end is None and old.number != own.number and (own.writes or old.writes)
            if pending and overlap(old.runs, own.runs) is not None:
                self._report(old, own, "one buffer", shared=False)
        if buffer.datatype.layout.dense and buffer.array.flags.c_contiguous:
            self.private[rank].append(Private(as_bytes(buffer.array), own))

    def starts(self, rank: int, completion: Any, buffer: Buffer, *, call: str, writes: bool) -> None:
        """Record a send or receive that uses a buffer until its request is complete."""
        number = self.clocks.count(rank)
        runs = runs_of(buffer)
        use = Access(
            rank, call, line_of_program(), number, self.clocks.stamp(rank), runs, writes=writes, origin=True
        )
        self._look_at(rank, runs)
        self._begin_own(use, buffer)
        self.transfers.setdefault(completion, []).append(use)

    def ends(self, completion: Any) -> None:
        """End the use of the buffers of a request, or of several in one."""
        for part in (completion, *getattr(completion, "parts", ())):
            for use in self.transfers.pop(part, ()):
                use.end = self.clocks.count(use.rank)
                pending = self.private[use.rank]
                self.private[use.rank] = [each for each in pending if each.access.end is None]

    def complete_here(self, access: Any) -> None:
        """Complete a call at its origin: its buffers may be used again."""
        issued = self.sent.pop(access, None)
        if issued is None:
            return
        rank = issued.remote.rank
        if issued.acquired is not None:
            self.clocks.learn(rank, issued.acquired)
        number = self.clocks.count(rank)
        for own in issued.own:
            own.end = number
            if own.writes:
                self.accept(rank, own.runs)
        if issued.fetches:
            issued.remote.end = number
        self.private[rank] = [each for each in self.private[rank] if each.access.end is None]

    def complete_there(self, epoch: Any, place: int | None) -> None:
        """Complete the calls to a target, or to all, at their targets."""
        waiting = self.pending.get(epoch)
        if not waiting:
            return
        number = self.clocks.count(waiting[0].remote.rank)
        left = []
        for issued in waiting:
            if place is None or issued.place == place:
                issued.remote.end = issued.remote.end or number
            else:
                left.append(issued)
        self.pending[epoch] = left

    def served(self, access: Any, target: Any) -> None:
        """Apply a call that its target has served: it has changed the memory, and order by atomic calls."""
        issued = self.sent.get(access)
        if issued is None:
            return
        remote = issued.remote
        for part in issued.parts:
            if remote.atomic is None or not remote.runs:
                continue
            low = remote.runs[0][0]
            if access.nbytes[1]:
                issued.acquired = joined((issued.acquired, part.released.get(low)))
            if remote.writes:
                part.released[low] = joined((part.released.get(low), remote.stamp))
        if remote.writes:
            self.accept(target.rank.id, remote.runs)
            for part in issued.parts:
                part.accept(remote.runs)

    # -- locks -------------------------------------------------------------------------------------------------

    def granted(self, rank: int, target: Any, lock: int) -> None:
        """Order the releases of a lock before what its new holder does."""
        shared, exclusive = self.freed.get(target, (None, None))
        self.held[rank, target] = EXCLUSIVE if lock == LOCK_EXCLUSIVE else SHARED
        stamp = joined((shared, exclusive)) if lock == LOCK_EXCLUSIVE else exclusive
        if stamp is not None:
            self.clocks.learn(rank, stamp)

    def unlocks(self, rank: int, target: Any) -> None:
        """Keep the stamp of a release, which takes effect at the target later."""
        self.held.pop((rank, target), None)
        self.leaving[rank, target] = self.ordering.event(rank)

    def released(self, rank: int, target: Any) -> None:
        """Let a release take effect."""
        stamp = self.leaving.pop((rank, target), None)
        shared, exclusive = self.freed.get(target, (None, None))
        if target.exclusive == rank:
            self.freed[target] = shared, joined((exclusive, stamp))
        else:
            self.freed[target] = joined((shared, stamp)), exclusive
