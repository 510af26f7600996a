"""One collective in progress: the ranks of a communicator meet once, instead of exchanging N² messages.

Each arrival contributes its clock and its data. The result is computed once for all ranks; the algorithms of
`spawnsim.models.collectives` decide when each rank leaves. A rank leaves a rooted collective as soon as the ranks on
which its part depends have arrived, so that no rank waits for an unneeded rank. This module handles arrivals and
departures, and must not depend on buffers or algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from spawnsim.comm import ops
from spawnsim.errors import MismatchError
from spawnsim.models.collectives import CollectivePlan, Edges, Finish
from spawnsim.phantoms import is_phantom
from spawnsim.virtual.engine.completion import Uncertain
from spawnsim.virtual.engine.contention import Sharing
from spawnsim.virtual.engine.diagnosis import where
from spawnsim.virtual.engine.injection import CollectiveFaults
from spawnsim.virtual.engine.world import Rank, World


class Departure(Uncertain):
    """The end of a collective for one rank, and the rank's wait for it. Its NIC stays busy until `nic_free_s`."""

    # One object per rank and collective is both completion and wait: the objects of all ranks exist at the same time.
    __slots__ = ("instance", "me", "nic_free_s", "rank")

    def __init__(self, instance: CollectiveInstance, me: int, rank: Rank) -> None:
        self.kernel, self.rank, self.nic_free_s = rank.kernel, rank, -math.inf
        self.instance, self.me = instance, me
        self.finish_s: float | None = None
        self.waiter = self.dependents = None
        self.lost = False

    def leave(self, time_s: float) -> None:
        """Let the rank leave at a time, but not before the present time; NaN: a message that it needs is lost."""
        if time_s == time_s:
            self.complete(max(time_s, self.kernel.env.now))
        else:
            self.lose()

    def final(self) -> float:
        """Return the end; later sends of the rank queue behind its messages of the collective."""
        if self.nic_free_s > self.rank.nic_free_s:
            self.rank.nic_free_s = self.nic_free_s
        return self.finish_s  # type: ignore[return-value]

    def is_over(self, by_s: float) -> bool:
        return self.finish_s is not None and self.finish_s <= by_s

    def describe(self) -> str:
        """Return the call, its number and its communicator."""
        call = self.instance.calls[self.me]
        name = call.describe() if call is not None else "collective"
        return f"{name}, number {self.instance.number} on {self.instance.comm}"

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the ranks that had not yet arrived by a time, and the ranks whose messages had not been delivered."""
        instance = self.instance
        found = {rank for rank, arrival_s in enumerate(instance.arrivals.tolist()) if not arrival_s <= by_s}
        if instance.strikes is not None and not self.is_over(by_s):
            found |= set(instance.strikes.late(self.me))
        return sorted(found)

    def peers(self) -> Sequence[int]:
        """Return the world ranks that are absent, or whose messages are lost."""
        return [self.instance.members[rank] for rank in self.missing()]

    def doomed(self, by_s: float) -> Sequence[int]:
        """Return the ranks, known to be dead by a time, that will never arrive or deliver their messages."""
        members, gone = self.instance.members, self.instance.context.dead(by_s)
        return [rank for rank in self.missing() if members[rank] in gone] if gone else ()

    def contexts(self) -> Sequence[Any]:
        return (self.instance.context,)

    def sequence(self) -> int:
        """Return the number of the collective on its communicator."""
        return self.instance.number


UNKNOWN: Any = object()
# Some ranks may leave before all arrive.
EARLY = {"bcast", "reduce", "gather", "gatherv", "scatter", "scan", "exscan"}


def nothing(instance: CollectiveInstance, me: int) -> None:
    """Return None, as the outcome of a collective without a result."""


def refuse(instance: CollectiveInstance, me: int) -> NoReturn:
    """Raise the mismatch, as the outcome of a collective with calls that do not match."""
    raise MismatchError(instance.mismatch)


def drop(outcome: Any) -> None:
    """Ignore the outcome, on a rank that receives nothing."""


@dataclass(slots=True)  # frozen would cost three microseconds a call
class Call:
    """A collective as one rank calls it, and the handling of its outcome.

    `agree` holds the values that must be equal on all ranks; `terms` names each. `nbytes` is this rank's contribution:
    a number, or an array with a size per destination. `sizes` says how the ranks' `nbytes` are combined for the cost
    model: "root", "all" (the largest), "same" (equal on all ranks), "blocks" (equal on all ranks, with one block for
    each rank), "each" (an array by rank), "matrix" (rows by rank), "edges" (each rank lists its neighbours and their
    sizes).
    """

    name: str
    timing: str
    part: Any = None
    nbytes: Any = 0
    root: int = -1
    agree: tuple[Any, ...] = ()
    sizes: str = "all"
    borrowed: bool = False  # the part is the program's own memory: valid while this rank waits
    needs: tuple[int, ...] | None = None  # dependencies of a neighbour exchange; else the algorithm's
    outcome: Callable[[CollectiveInstance, int], Any] = nothing
    collect: Callable[[Any], object] = drop
    # For a reduction whose result all ranks get: contributions are combined once for all ranks, in the order of
    # `ops.reduce_tree`.
    op: Any = None
    datatype: Any = None
    dtype: str = ""  # of the elements that a reduction combines, if the platform may know its speed
    terms: tuple[str, ...] = ("op", "count", "datatype")
    line: str = ""  # of the program, if `describe` includes it

    def describe(self) -> str:
        """Return the call as in the program."""
        arguments = [f"root={self.root}"] if self.root >= 0 else []
        arguments += [f"{name}={value}" for name, value in zip(self.terms, self.agree, strict=False)]
        return f"{self.name}({', '.join(arguments)})"


def _advice(call: Call, held: Call) -> str:
    """Return the remedy for two calls that do not match."""
    if call.name != held.name:
        return "All ranks must make the same collective calls in the same order"
    pairs = zip(call.terms, call.agree, held.agree, strict=False)
    differing = ["root"] * (call.root != held.root) + [name for name, one, other in pairs if one != other]
    return f"All ranks must give the same {' and '.join(differing or ['arguments'])}"


@dataclass(eq=False, slots=True)
class CollectiveInstance:
    """One collective on one communicator. `members` are world ranks, in the order of the communicator."""

    world: World
    comm: str
    members: Sequence[int]
    number: int
    context: Any = None  # a revocation of it ends all waits for this collective
    calls: list[Call | None] = field(init=False)
    arrivals: np.ndarray[Any, np.dtype[np.float64]] = field(init=False)
    gone: list[Departure | None] = field(init=False)
    strikes: CollectiveFaults | None = field(init=False, default=None)  # if links have faults
    busy: dict[int, float] = field(default_factory=dict)  # by rank: end of its NIC's work at its arrival
    # Collectives that must end on a member before this one begins there.
    after: dict[int, Departure] = field(default_factory=dict)
    here: int = 0
    opening: int = -1  # the rank that arrived first
    mismatch: str = ""  # the message of the error that each member gets, if the calls do not match
    _shared: Any = UNKNOWN  # the result that is computed once for all ranks
    _tree: ops.ReductionTree | None = None  # of contributions that are combined on arrival
    _dirty: bool = False

    def __post_init__(self) -> None:
        size = len(self.members)
        self.calls, self.gone = [None] * size, [None] * size
        self.arrivals = np.full(size, math.nan)
        if self.world.links is not None:
            self._open_to_faults()

    def _open_to_faults(self) -> None:
        number = -1 if self.context is None else self.context.number
        fields = {"comm": self.comm, "number": self.number}
        self.strikes = CollectiveFaults(self.world, self.members, (number, self.number), fields)

    # -- arriving --------------------------------------------------------------------------------------------

    def join(self, me: int, call: Call) -> Departure:
        """Arrive as rank `me` of the communicator, at the running task's clock."""
        world = self.world
        kernel = world.kernel
        kernel.effect()  # before anything else: it may wait, and other ranks may arrive meanwhile
        task = kernel.current
        if self.opening < 0:
            self.opening = me
            if call.op is not None:
                self._tree = self._begin_tree(call)
        else:
            self._compare(me, call)
        self.calls[me], self.arrivals[me] = call, task.clock
        if self.mismatch:
            self.here += 1
            refuse(self, me)
        rank = world.ranks[task.rank]
        if self._tree is not None:
            self._combine(self._tree, rank)
        if rank.nic_free_s > task.clock:
            self.busy[me] = rank.nic_free_s
        departure = self.gone[me] = Departure(self, me, rank)
        if self.context is not None and self.context.queue is not None:
            before = self.context.queue.get(task.rank)
            if before is not None and not before.is_over(task.clock):
                self.after[me] = before
            self.context.queue[task.rank] = departure
        self.here += 1
        if self.here == len(self.members):
            self._end()
        elif call.timing in EARLY or call.needs is not None:
            self._expect_release()
        return departure

    def _begin_tree(self, call: Call) -> ops.ReductionTree | None:
        """Return a tree that combines contributions on arrival; None if they are combined after all have arrived."""
        # Short contributions stay in the cache. A program's own function must be called, and fail, in a rank that asks
        # for the result. Over faulty links the ranks' results may differ.
        if self.strikes is not None or call.op.function is not None or call.part.nbytes <= ops.SHORT_NBYTES:
            return None
        if self._as_allreduce_of_gloo(call):
            return None
        return ops.ReductionTree(call.op.merging(call.datatype), ops.surplus(len(self.members)))

    def _combine(self, tree: ops.ReductionTree, arrived: Rank) -> None:
        """Combine the available contributions in rank order, while the one that the digest has read is in the cache."""
        if arrived.observers:  # other ranks may write to its memory while it waits
            self._tree = None
            return
        calls = self.calls
        try:
            while tree.count < len(calls) and (call := calls[tree.count]) is not None:
                tree.add(call.part)
        except Exception:  # noqa: BLE001 - whatever it is, it is raised again when the result is requested
            self._tree = None

    def parts(self) -> list[Any]:
        """Return the contributions of all members; None for absent members."""
        return [None if call is None else call.part for call in self.calls]

    def shared(self, compute: Callable[[], Any]) -> Any:
        """Return a result that is computed once for all members."""
        if self._shared is UNKNOWN:
            self._shared = compute()
        return self._shared

    def combined(self, me: int) -> Any:
        """Return the combination of all contributions, computed once for all members."""
        if self._shared is UNKNOWN:
            self._shared = self._reduced(me) if self._tree is None else self._tree.result()
        return self._shared

    def _reduced(self, me: int) -> Any:
        call = self.calls[me]
        assert call is not None
        if self._as_allreduce_of_gloo(call):
            return ops.combined(self.parts(), call.op, call.datatype)
        return ops.reduce_tree(self.parts(), call.op.merging(call.datatype))

    def _as_allreduce_of_gloo(self, call: Call) -> bool:
        return call.name == "Allreduce" and self.sums_as_gloo(call.op, call.datatype, call.part)

    def sums_as_gloo(self, op: ops.Op, datatype: Any, part: Any) -> bool:
        """Return whether a sum uses gloo's order, and the order makes a difference."""
        as_gloo = self.context is not None and self.context.sums == "gloo"
        return as_gloo and ops.depends_on_order(op, datatype) and not is_phantom(part)

    def keep(self, me: int) -> None:
        """Copy a rank's borrowed part: the rank leaves before the collective is complete, and may then write to it."""
        call = self.calls[me]
        if call is not None and call.borrowed:
            call.part, call.borrowed = call.part.copy(), False
            self._tree = None  # its leaves are the borrowed parts

    def _compare(self, me: int, call: Call) -> None:
        """Record a call that does not match the earlier ones, and release the waiting ranks with an error."""
        held, now_s = self._first(), self.world.kernel.current.clock
        fits = held.name == call.name and held.root == call.root and held.agree == call.agree
        if fits or self.mismatch:
            return
        other, place = self._example()
        held = self.calls[other]  # type: ignore[assignment]
        self.mismatch = (
            f"collective number {self.number} on {self.comm}: rank {me} calls {call.describe()} at {now_s:.6g} s "
            f"where rank {other} called {held.describe()} at {self.arrivals[other]:.6g} s{place}. "
            f"{_advice(call, held)}"
        )
        # Released one message later than the caller, so that the caller's error is first and ends the run if uncaught.
        for rank, departure in enumerate(self.gone):
            if departure is not None and departure.finish_s is None:
                self.calls[rank].outcome = refuse  # type: ignore[union-attr]
                notice_s = self.world.network.cost(self.members[me], self.members[rank], 0)[2]
                departure.leave(max(float(self.arrivals[rank]), now_s + notice_s))

    def _example(self) -> tuple[int, str]:
        """Return a rank that has arrived and, if it waits in this call, its line in the program."""
        # Some ranks have left early, or wait for something else.
        waiting = {me: gone.waiter for me, gone in enumerate(self.gone) if gone is not None and gone.waiter}
        if not waiting:
            return self.opening, ""
        other = self.opening if self.opening in waiting else min(waiting)
        call = self.calls[other]
        has_line = call is not None and call.line
        return other, "" if has_line else f" and waits at {where(waiting[other])}"

    # -- leaving ---------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Fix all departures, now that all ranks have arrived."""
        # Nothing remains to be released, and ranks in step, which wait for no event, would keep the entry for long.
        if self._dirty:
            self._dirty = False
            self.world.kernel.releases.remove(self._release)
        # All ranks have arrived at the earlier collectives, since they arrive in one order: so their ends are known.
        for me, before in self.after.items():
            if before.finish_s is not None and before.finish_s > self.arrivals[me]:
                self.arrivals[me] = before.finish_s
        finish = self._finish()
        sender = self.world.ranks[self.members[0]]
        sender.messages += finish.messages
        sender.nbytes += finish.nbytes
        self._book(finish)
        # Departures refer to the instance: it drops them, or only the cycle collector would free them all.
        gone, self.gone = self.gone, []
        if isinstance(self.world.contention, Sharing) and finish.loads is not None:
            self._share(self.world.contention, finish, gone)
        else:
            self._depart(gone, finish.times)

    def _share(self, links: Sharing, finish: Finish, gone: list[Departure | None]) -> None:
        """Let other traffic on the links delay the ranks that leave at or after the end of the collective's bytes."""
        times, begin_s = finish.times, float(self.arrivals.max())
        early: list[Departure | None]
        early, late = [*gone], [*gone]
        through_s = math.inf

        def over(end_s: float) -> None:
            more_s = end_s - through_s
            self._depart(late, times + (more_s if more_s > 1e-9 * alone_s else 0.0))

        lasts_s = float(np.nanmax(times, initial=begin_s)) - begin_s
        assert finish.loads is not None
        alone_s = links.collective(begin_s, lasts_s, self.members[0], loads=finish.loads, over=over)
        if self._first().timing not in EARLY and alone_s:
            through_s = begin_s + alone_s
        for me, time_s in enumerate(times.tolist()):
            if time_s >= through_s * (1 - 1e-12):
                early[me] = None
            else:
                late[me] = None
        self._depart(early, times)

    def _depart(self, gone: Sequence[Departure | None], times: Any) -> None:
        """Release the waiting ranks, each at its time."""
        resume, now_s = self.world.kernel.resume, self.world.kernel.env.now
        for departure, time_s in zip(gone, times.tolist(), strict=True):
            if departure is None or departure.finish_s is not None:
                continue
            if departure.dependents is not None or time_s != time_s:
                departure.leave(time_s)
            else:  # `leave`, written out for the usual case
                departure.finish_s = time_s if time_s > now_s else now_s
                if departure.waiter is not None:
                    resume(departure.waiter)

    def _book(self, finish: Finish) -> None:
        """Record until when a rank's NIC still sends, for ranks that leave before that."""
        if not self.busy:
            return  # no rank leaves before its NIC is idle
        for me in np.flatnonzero(finish.out_free > finish.times).tolist():
            departure = self.gone[me]
            if departure is not None and departure.finish_s is None:
                departure.nic_free_s = float(finish.out_free[me])

    def _first(self) -> Call:
        call = self.calls[self.opening]
        assert call is not None
        return call

    def _finish(self) -> Finish:
        first, timing = self._first(), self.world.timing
        members = np.asarray(self.members)
        root, out_free, sizes = max(first.root, 0), self._out_free(), self._sizes(first)
        if self.strikes is None or first.timing not in EARLY:  # `_release` cannot foresee faults
            found = timing.finish(
                first.timing, self.arrivals, sizes, root, ranks=members, out_free=out_free, dtype=first.dtype
            )
            if self.strikes is None or self.world.plan.quiet(self.arrivals.min(), found.times.max()):
                return found
        plan = timing.plan(first.timing, len(members), sizes, root, ranks=members, dtype=first.dtype)
        return self._struck(plan, out_free)

    def _struck(self, plan: CollectivePlan, out_free: Any) -> Finish:
        assert self.strikes is not None
        return self.strikes.finish(plan, self.arrivals, out_free, self.calls)

    def _out_free(self) -> Any:
        """Return when each NIC can begin to inject; None if all were idle when their ranks arrived."""
        if not self.busy:
            return None
        out_free = np.full(len(self.members), -math.inf)
        out_free[list(self.busy)] = list(self.busy.values())
        return out_free

    def _sizes(self, first: Call) -> Any:
        """Combine the ranks' sizes. Absent ranks are assumed to contribute as much as the largest present one."""
        if first.sizes == "root":
            root = self.calls[first.root]
            return 0 if root is None else root.nbytes
        here = [call.nbytes for call in self.calls if call is not None]
        if first.sizes == "all":
            return max(here)
        if first.sizes == "same":
            return first.nbytes
        if first.sizes == "blocks":
            return first.nbytes // len(self.members)
        if first.sizes == "edges":
            return self._edges()
        if first.sizes == "each":
            most = max(here)
            return np.array([most if call is None else call.nbytes for call in self.calls], dtype=np.int64)
        return np.stack(
            [np.broadcast_to(call.nbytes, len(self.calls)) for call in self.calls if call]
        ).astype(np.int64)

    def _edges(self) -> Edges:
        """Return the messages of a neighbour exchange: each rank lists (dests, nbytes of each)."""
        here = [(rank, *call.nbytes) for rank, call in enumerate(self.calls) if call is not None]
        source = np.concatenate([np.full(len(dests), rank) for rank, dests, _ in here]).astype(np.int64)
        dest = np.concatenate([np.asarray(dests, np.int64) for _, dests, _ in here])
        return Edges(source, dest, np.concatenate([np.asarray(sizes, np.int64) for _, _, sizes in here]))

    def outcome(self, me: int) -> Any:
        """Return the result for member `me`, now that it leaves."""
        received = self if self.strikes is None else self._received_by(me, self.strikes)
        return self.calls[me].outcome(received, me)  # type: ignore[union-attr]

    def _received_by(self, me: int, strikes: CollectiveFaults) -> CollectiveInstance:
        """Return the instance as member `me` receives it: over faulty links, contributions arrive damaged."""
        strikes.note(me)
        calls = strikes.received_by(me, self.calls)
        if calls is None:
            return self
        received = copy(self)
        received.calls, received._shared = calls, UNKNOWN
        return received

    # -- leaving early -----------------------------------------------------------------------------------------

    def _expect_release(self) -> None:
        if not self._dirty:
            self._dirty = True
            self.world.kernel.releases.append(self._release)

    def _release(self) -> None:
        """Before time advances: release the ranks whose part is complete, although other ranks are absent."""
        self._dirty = False
        first = self._first()
        if (
            self.mismatch
            or self.here == len(self.members)
            or (first.sizes == "root" and self.calls[first.root] is None)
        ):
            return  # all have left; or the size is unknown, and all depend on the root
        members = np.asarray(self.members)
        plan = self.world.timing.plan(
            first.timing,
            len(members),
            self._sizes(first),
            max(first.root, 0),
            ranks=members,
            dtype=first.dtype,
        )
        free = [] if self.after else self._free_to_leave(plan)
        if free:
            out_free = self._out_free()
            if self.strikes is None:
                found = plan.finish(self.arrivals, self.world.network, members, out_free=out_free)
            else:
                found = self._struck(plan, out_free)
            self._book(found)
            for rank in free:
                self.gone[rank].leave(float(found.times[rank]))  # type: ignore[union-attr]

    def _free_to_leave(self, plan: CollectivePlan) -> list[int]:
        """Return the waiting ranks whose dependencies have all arrived."""
        # In a neighbour exchange, absent ranks have edges, too.
        if self._first().needs is not None:
            return [
                rank for rank, call in enumerate(self.calls) if self._waits(rank) and self._has_needed(call)
            ]
        free = plan.free_to_leave(~np.isnan(self.arrivals))
        return [rank for rank in np.flatnonzero(free).tolist() if self._waits(rank)]

    def _has_needed(self, call: Call | None) -> bool:
        assert call is not None and call.needs is not None
        return all(self.calls[other] is not None for other in call.needs)

    def _waits(self, rank: int) -> bool:
        departure = self.gone[rank]
        return departure is not None and departure.finish_s is None
