"""Follows the calls of a run's ranks, and collects the races of their accesses to exposed memory.

A rank runs on only when a call of it returns, so bytes that have changed between two of its calls were changed by its
program: that is a local store. Loads leave no trace; `loads` reports those in the program's own file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from spawnsim.comm.buffers import Buffer, as_buffer
from spawnsim.comm.constants import LOCK_EXCLUSIVE, WIN_FLAVOR_SHARED
from spawnsim.comm.memory import as_bytes
from spawnsim.comm.ops import NO_OP
from spawnsim.errors import DataRace
from spawnsim.virtual.engine.causality import Known, Stamp, joined
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.rma import Epochs, Use
from spawnsim.virtual.ordering import Ordering
from spawnsim.virtual.races.accesses import (
    EXCLUSIVE,
    SHARED,
    Access,
    Begin,
    Line,
    Runs,
    line_of_program,
    overlap,
    runs_of,
    shown,
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
    stamp: Stamp | None  # of its begin, if it is an atomic write
    parts: list[Part]
    acquired: Stamp | None = None  # of the atomic writes whose values it has read


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
        self.exposed: dict[
            Any, list[Part]
        ] = {}  # the same, with the parts of other windows in the same memory
        self.private: list[list[Private]] = [[] for _ in range(size)]
        # What each rank knew after its last call, and the line of that.
        self.since: list[tuple[Known, Line]] = [(self.clocks.known(rank), None) for rank in range(size)]
        self.seen_now: list[set[Any]] = [set() for _ in range(size)]  # loads and stores since its last call
        self.calls: dict[Task, tuple[str, Line]] = {}  # the active call of each task
        self.issuing: Issued | None = None  # the one-sided call that is about to be sent
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
        line = line_of_program(2)  # above this method and its caller
        self.calls[task] = name, line
        try:
            result = call()
            if name in STARTED and result._completion is not None:
                for array, writes in buffers_of(name, call):
                    self.starts(rank, result._completion, as_buffer(array), call=name, writes=writes)
            return result
        finally:
            del self.calls[task]
            if orders and (self.parts[rank] or self.private[rank]):
                self._after(rank, (name, line), stores=not isinstance(subject, Epochs))

    def leaves(self, task: Task) -> None:
        """Record the stores of a rank that lets others run, who may overwrite them, or in shared memory pass for it."""
        call = self.calls.get(task)
        if call is None:  # a sleep, or a charge for the computing before a call
            self.look(task.rank)
        elif any(part.shared for part in self.parts[task.rank]):
            if call[0] in STARTING:
                self.look(task.rank)
            else:
                self._stored_in(task.rank, call)

    def look(self, rank: int) -> None:
        """Record the local stores of a rank since its last call."""
        for part in self.parts[rank]:
            if runs := part.changes():
                self._check(self._stored(rank, runs), part)
        for own in [*self.private[rank]]:
            if (runs := own.changes()) and own.access.end is None:
                self._check_own(self._stored(rank, runs), own)

    def _stored(self, rank: int, runs: Runs) -> Access:
        """Return the access of stores since a rank's last call."""
        number, (known, line) = self.clocks.count(rank), self.since[rank]
        begin = Begin(rank, f"a store after {shown(line)}", None, number, known)
        return Access(begin, runs, writes=True, end=number)

    def _look_at(self, rank: int, runs: Runs) -> None:
        """Record the local stores to these bytes, which a one-sided call is about to access."""
        for part in touching(self.parts[rank], runs):
            if found := part.changes_in(runs):
                self._check(self._stored(rank, found), part)

    def _after(self, rank: int, call: tuple[str, Line], *, stores: bool) -> None:
        """Record what a call itself has stored, if it may, such as Recv; what follows is after it."""
        if stores:
            self._stored_in(rank, call)
        for part in self.parts[rank]:
            part.prune(self.clocks.known_to_all)
        self.since[rank] = self.clocks.known(rank), call[1]

    def _stored_in(self, rank: int, call: tuple[str, Line]) -> None:
        """Record what a call itself has stored in exposed memory."""
        for part in self.parts[rank]:
            if runs := part.changes():
                begin = self._begin(rank, *call)
                self._check(Access(begin, runs, writes=True, end=begin.number), part)
        for own in self.private[rank]:
            own.changes()

    def _begin(self, rank: int, call: str, line: Line) -> Begin:
        """Begin an event of a rank."""
        return Begin(rank, call, line, self.clocks.count(rank), self.clocks.known(rank))

    def seen(self, rank: int, runs: Runs, *, writes: bool, line: Line) -> None:
        """Record a load or store that the program makes now."""
        access, seen = (runs, writes, line), self.seen_now[rank]
        if access in seen:  # again, since its last call
            return
        seen.add(access)
        parts, private = touching(self.parts[rank], runs), touching(self.private[rank], runs)
        if not parts and not private:
            return
        begin = self._begin(rank, "a store" if writes else "a load", line)
        use = Access(begin, runs, writes, end=begin.number)
        for part in parts:
            self._check(use, part)
        for own in private:
            self._check_own(use, own)

    def exposes(self, rank: int) -> bool:
        """Whether a rank has memory in which races can be."""
        return bool(self.parts[rank] or self.private[rank])

    def accept(self, rank: int, runs: Runs) -> None:
        """Copy what a one-sided call, or a store that was seen, has written."""
        for part in (*self.parts[rank], *self.private[rank]):
            part.accept(runs)

    def _check_own(self, use: Access, own: Private) -> None:
        """Report an access to the buffer of a pending call, if they conflict."""
        pending = own.access.end is None and (own.access.writes or use.writes)
        if pending and overlap(own.access.runs, use.runs) is not None:
            self._report(own.access, use, "the buffer of the call", shared=False)

    def _check(self, new: Access, part: Part) -> None:
        if self.held:
            new.lock = self.held.get((new.begin.rank, part.target), new.lock)
        for old, (low, high) in part.races(new):
            self._report(old, new, part.named(low, high), shared=part.shared)

    def _report(self, old: Access, new: Access, where: str, *, shared: bool) -> None:
        key = old.begin.call, old.begin.line, new.begin.call, new.begin.line
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
        self.since[rank] = self.clocks.known(rank), line_of_program()
        self.exposed.clear()

    def attached(self, window: Any, memory: Any) -> None:
        """Watch memory that is attached to a dynamic window."""
        target, rank = window._windows.targets[window._place], window._comm._rank.id
        part = Part(as_bytes(memory), window._label, rank, target)
        self.targets.setdefault(target, []).append(part)
        self.parts[rank].append(part)
        self.exposed.clear()

    def closed(self, window: Any) -> None:
        """Stop watching the parts of a window that this rank has freed."""
        ours = {id(part) for target in window._windows.targets for part in self.targets.get(target, ())}
        rank = window._comm._rank.id
        self.parts[rank] = [part for part in self.parts[rank] if id(part) not in ours]
        self.pending.pop(window._epoch, None)
        self.exposed.clear()

    def begin(self, window: Any, place: int, call: str, use: Use) -> None:
        """Record a one-sided call that is about to be sent; `call` is the access that is sent."""
        rank, task, epoch = window._comm._rank.id, self.world.kernel.current, window._epoch
        part, operation, reads, result = use
        self.seen_now[rank].clear()
        # Get_accumulate alone is not watched.
        name, line = self.calls.get(task) or ("Get_accumulate", line_of_program())
        begin = self._begin(rank, name, line)
        target = window._windows.targets[place]
        lock = self.held.get((rank, target), SHARED * epoch.locked_all)
        kind = (
            "lock" if place in epoch.locked else "lock_all" if epoch.locked_all
            else "Start" if place in epoch.started else "fence"
        )  # fmt: skip
        # Rput and Put are not atomic; Accumulate(op=REPLACE), which is sent as they are, is.
        plain = call == "Get" or name in ("Put", "Rput")
        writes = operation not in ("GET", NO_OP.name)
        remote = Access(
            begin, runs_of(part), writes, None, kind, atomic=None if plain else _atomic(operation, part), remote=True,
            lock=lock,
        )  # fmt: skip
        runs = remote.runs
        if target.rank.id == rank:
            self._look_at(rank, runs)
        exposed = self.exposed.get(target)
        if exposed is None:  # also the parts of other windows on the same memory
            parts = dict.fromkeys([*self.targets.get(target, ()), *self.parts[target.rank.id]])
            exposed = self.exposed[target] = [*parts]
        stamp = self.clocks.stamp(rank) if writes and not plain else None
        issued = self.issuing = Issued(remote, place, [], stamp, touching(exposed, runs))
        for each in issued.parts:
            self._check(remote, each)
        for buffer in reads:
            self._begin_own(issued, buffer, stores=False)
        if result is not None:
            self._begin_own(issued, result, stores=True)
        self.pending.setdefault(epoch, []).append(issued)

    def _begin_own(self, issued: Issued, buffer: Buffer, *, stores: bool) -> None:
        """Record the access of a one-sided call to one of the buffers of its rank."""
        own = Access(issued.remote.begin, runs_of(buffer), stores, None, issued.remote.epoch, origin=True)
        issued.own.append(own)
        self._use(own, buffer)

    def _use(self, own: Access, buffer: Buffer) -> None:
        """Record the access of a call to a buffer of its rank, in exposed or in other memory."""
        rank, runs = own.begin.rank, own.runs
        if parts := touching(self.parts[rank], runs):
            self._look_at(rank, runs)
            for part in parts:
                self._check(own, part)
        if parts or not runs:
            return
        for other in self.private[rank]:
            old = other.access
            pending = old.end is None and old.begin is not own.begin and (own.writes or old.writes)
            if pending and overlap(old.runs, runs) is not None:
                self._report(old, own, "one buffer", shared=False)
        if buffer.datatype.layout.dense and buffer.array.flags.c_contiguous:
            self.private[rank].append(Private(as_bytes(buffer.array), own))

    def starts(self, rank: int, completion: Any, buffer: Buffer, *, call: str, writes: bool) -> None:
        """Record a send or receive that uses a buffer until its request is complete."""
        use = Access(self._begin(rank, call, line_of_program()), runs_of(buffer), writes, origin=True)
        self._use(use, buffer)
        self.transfers.setdefault(completion, []).append(use)

    def ends(self, completion: Any) -> None:
        """End the use of the buffers of a request, or of several in one."""
        for part in (completion, *getattr(completion, "parts", ())):
            for use in self.transfers.pop(part, ()):
                rank = use.begin.rank
                use.end = self.clocks.count(rank)
                self.private[rank] = [each for each in self.private[rank] if each.access.end is None]

    def complete_here(self, access: Any) -> None:
        """Complete a call at its origin: its buffers may be used again."""
        issued = self.sent.pop(access, None)
        if issued is None:
            return
        rank = issued.remote.begin.rank
        if issued.acquired is not None:
            self.clocks.learn(rank, issued.acquired)
        number = self.clocks.count(rank)
        for own in issued.own:
            own.end = number
            if own.writes:
                self.accept(rank, own.runs)
        if not issued.remote.writes:  # it is complete at the target, too
            issued.remote.end = number
        self.private[rank] = [each for each in self.private[rank] if each.access.end is None]

    def complete_there(self, epoch: Any, place: int | None) -> None:
        """Complete the calls to a target, or to all, at their targets."""
        waiting = self.pending.get(epoch)
        if not waiting:
            return
        number = self.clocks.count(waiting[0].remote.begin.rank)
        for issued in waiting:
            if place is None or issued.place == place:
                issued.remote.end = issued.remote.end or number
        self.pending[epoch] = [] if place is None else [each for each in waiting if each.place != place]

    def served(self, access: Any, target: Any) -> None:
        """Apply a call that its target has served: it has changed the memory, and order by atomic calls."""
        issued = self.sent.get(access)
        if issued is None:
            return
        remote = issued.remote
        for part in issued.parts if remote.atomic is not None else ():
            low = remote.runs[0][0]
            if access.nbytes[1]:
                issued.acquired = joined((issued.acquired, part.released.get(low)))
            if issued.stamp is not None:
                part.released[low] = joined((part.released.get(low), issued.stamp))
        if remote.writes:
            for part in issued.parts:
                part.accept(remote.runs)
            for own in self.private[target.rank.id]:
                own.accept(remote.runs)

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


def _atomic(operation: str, buffer: Buffer) -> tuple[str, str, int]:
    """Return what atomic calls must share to be atomic with each other: operation, type and its size."""
    basic = buffer.datatype.basic
    if basic is None or basic.dtype is None:
        return operation, buffer.type_name, 1
    return operation, _name(basic.dtype), int(basic.size)


_name = cache(str)  # of a dtype: numpy takes 10 µs
