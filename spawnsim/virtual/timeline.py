"""The timeline of a run: each call of its ranks from begin to end, each message from its send to its arrival.

Rows go to a separate recorder, so the timeline is not part of the run's results or digest:

* a call: `call` (its name), `number` (on its rank), `end_s`, and where known: `task` (of background tasks),
  `comm`, `dest` or `source` (ranks of the world), `tag`, `sent` and `received` (bytes), `messages`, `root`,
  `context` and `collective` (numbers, equal for all parts of one), `times` (of polls in a row), `error` (the
  exception it raised), `waits` (if it never returned);
* a message, by its receiver: `source`, `out` and `into` (numbers of the calls that sent and received it), `sent_s`,
  `arrival_s`, `tag`, `bytes`.

Calls in which no time passes and nothing moves are omitted. Only the outermost of nested calls is kept. A rank that
has used up its share of `MOST` is recorded no further, so memory and file size are bounded.

While a run is watched, by the timeline or by the accounting of computing between calls, every call of the virtual MPI
is wrapped, and the watchers of the calling rank's world make it. Runs without watchers are not instrumented.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from greenlet import GreenletExit

from spawnsim.models.faults.events import Pause
from spawnsim.virtual.engine.completion import Message
from spawnsim.virtual.engine.kernel import RankDied, Task, current_task
from spawnsim.virtual.engine.world import Rank, Recorder, World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.mpi import context as members
from spawnsim.virtual.mpi.communicators import CurrentComm
from spawnsim.virtual.mpi.context import Member, total
from spawnsim.virtual.mpi.instance import Call as Collective
from spawnsim.virtual.mpi.instance import CollectiveInstance
from spawnsim.virtual.mpi.module import CLASSES
from spawnsim.virtual.mpi.requests import Request
from spawnsim.virtual.mpi.rma import Epochs
from spawnsim.virtual.mpi.rma_service import Access, WindowState
from spawnsim.virtual.services import Background, Clock, Compute

# Calls that are not timed: queries of handles, in which no time passes, and methods that are not MPI's.
UNWATCHED = (
    "Get_", "Set_", "Is_", "Compare", "Create_keyval",
    "Free_keyval", "Delete_attr", "Call_errhandler", "enter", "called", "over", "start", "prepare",
)  # fmt: skip
Watcher = Callable[[str, Any, Callable[[], Any]], Any]
"""Makes a call, given its name, its object, and a function that executes it; returns the function's result."""


def _calls() -> Iterator[tuple[type, str, Any]]:
    """Yield class, name and function of all calls of the virtual MPI's classes and their base classes."""
    for owner in dict.fromkeys(each for cls in CLASSES for each in cls.__mro__):
        if owner.__module__.startswith("spawnsim.virtual") and owner is not CurrentComm:
            for name, raw in list(vars(owner).items()):
                function = isinstance(raw, (classmethod, FunctionType))
                if function and not name.startswith("_") and not name.startswith(UNWATCHED):
                    yield owner, name, raw


def watched(name: str, raw: Any) -> Any:
    """Return a call that the watchers of the calling rank's world make, the first watcher outermost."""
    if isinstance(raw, classmethod):
        return classmethod(watched(name, raw.__func__))

    # Wrapped for the time of a run and not tested for in each call: two branches a message would slow down every run,
    # traced or not. The wrapper determines the calling world, since several runs may be active at once.
    @functools.wraps(raw)
    def watching(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        call = functools.partial(raw, *args, **kwargs)
        for watcher in reversed(task.kernel.owner.watchers if task is not None else ()):
            call = functools.partial(watcher, name, args[0] if args else None, call)
        return call()

    return watching


def _watch_calls(put: Put) -> None:
    for owner, name, raw in _calls():
        put(owner, name, watched(name, raw))


being_watched = Patches(_watch_calls).in_place


# Calls and messages of a run: some 150 MB on disk during the run, a fifth of that or less afterwards. Each rank may
# record an equal share, beginning with its first rows: the order in which ranks run must not decide which rows are
# kept.
MOST = 2_000_000
OWN = ((Compute, "spend", "compute"), (Clock, "sleep", "sleep"), (Background, "join", "join"))


class CallRecord:
    """One active or just completed call; `task` is the index of its task, `facts` describe the data it moves."""

    __slots__ = ("begin_s", "comm", "end_s", "error", "facts", "name", "number", "task", "times")

    def __init__(self, name: str, number: int, begin_s: float, *, comm: str, task: int) -> None:
        self.name, self.number, self.begin_s, self.end_s = name, number, begin_s, begin_s
        self.comm, self.task = comm, task
        self.facts: dict[str, Any] = {}
        self.times, self.error = 1, ""

    def moved(self, peer: str, rank: int, tag: int | None, nbytes: int) -> None:
        """Record a message or an access: `peer` is "dest" or "source". Peers and tags that differ are dropped."""
        facts, amount = self.facts, "sent" if peer == "dest" else "received"
        facts["messages"] = facts.get("messages", 0) + 1
        facts[amount] = facts.get(amount, 0) + nbytes
        for name, value in ((peer, rank), ("tag", tag)):
            if value is not None:
                facts[name] = value if facts.get(name, value) == value else None

    def follows(self, last: CallRecord) -> bool:
        """Return whether this is another poll in a row that moved no data."""
        quiet = not (self.facts or last.facts or self.error or last.error)
        return quiet and self.name == last.name and self.begin_s == last.end_s and self.name not in _OWN_NAMES

    def row(self) -> dict[str, Any]:
        """Return the row to record; facts with conflicting values are omitted."""
        values: dict[str, Any] = {"call": self.name, "number": self.number, "end_s": self.end_s}
        values |= {name: value for name, value in self.facts.items() if value is not None}
        if values.get("messages") == 1:
            del values["messages"]
        more = {
            "comm": self.comm, "task": self.task, "error": self.error, "times": self.times if self.times > 1 else 0
        }  # fmt: skip
        return values | {name: value for name, value in more.items() if value}


_OWN_NAMES = {called for _, _, called in OWN}


class Timeline:
    """Records the calls and messages of a world's ranks in `sink`."""

    def __init__(self, world: World, sink: Recorder) -> None:
        self._world, self._sink, self._over = world, sink, False
        self._calls: dict[Task, CallRecord] = {}  # active calls
        self._last: dict[Task, CallRecord] = {}  # completed calls; a poll may follow
        self._places: dict[Task, int] = {}  # index among the tasks of its rank
        self._left = [max(1, MOST // len(world.ranks))] * len(world.ranks)
        self._numbers: Counter[int] = Counter()

    def add_ranks(self, count: int) -> None:
        """Record ranks that the program has spawned, too."""
        self._left += [self._left[0]] * count

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Record the ranks while the block runs, inside the other watchers."""
        self._world.timeline = self
        self._world.watchers.append(self.watching)
        with being_watched(), _noting():
            yield

    def watching(self, name: str, subject: Any, call: Callable[[], Any]) -> Any:
        """Make a call, and record it."""
        task = current_task()
        assert task is not None
        rank = self._world.ranks[task.rank]
        if self._over or task in self._calls or rank.dead or self._left[rank.id] <= 0:
            return call()
        if task not in self._places:
            self._places[task] = rank.tasks.index(task) if task in rank.tasks else 0
        self._numbers[rank.id] += 1
        number, place = self._numbers[rank.id], self._places[task]
        # A task has one call at a time: nested calls find `task in self._calls` and are not recorded.
        own = self._calls[task] = CallRecord(name, number, task.clock, comm=_comm(subject), task=place)
        try:
            return call()
        except BaseException as error:
            own.error = "died" if isinstance(error, RankDied) else type(error).__name__
            raise
        finally:
            if not self._over:
                del self._calls[task]
                own.end_s = task.clock
                self._done(task, own)

    def _done(self, task: Task, own: CallRecord) -> None:
        """Keep a completed call, unless it took no time and moved nothing."""
        if own.end_s == own.begin_s and not own.facts and not own.error:
            return
        last = self._last.get(task)
        if last is not None and own.follows(last):
            last.end_s, last.times = own.end_s, last.times + 1
            return
        self._last[task] = own
        if last is not None:
            self._row(task.rank, last.begin_s, last.row())

    def _row(self, rank: int, time_s: float, values: dict[str, Any]) -> None:
        self._left[rank] -= 1
        if self._left[rank] >= 0:
            self._sink.row(rank, time_s, values)
        if self._left[rank] == 0:
            self._sink.event(rank, time_s, "full", {})

    # -- data that moves in a call -----------------------------------------------------------------------------

    def call_of(self, task: Task, rank: int) -> CallRecord | None:
        return self._calls.get(task) if task.rank == rank else None

    def sent(self, call: CallRecord, mailbox: Any, message: Message, task: Task) -> None:
        """Record an outgoing message; the message carries the number of the call and the time of its send."""
        call.moved("dest", mailbox.rank, message.tag, message.nbytes)
        message.origin = task.rank, call.number, task.clock

    def received(self, call: CallRecord, message: Message, rank: int, now_s: float) -> None:
        """Record a message that was received."""
        origin = getattr(message, "origin", None)
        if origin is None:  # a copy made by a fault, or a message of a call that is not recorded
            return
        message.origin = None  # recorded once, though a blocking receive both accepts it and takes it
        source, out, sent_s = origin
        call.moved("source", source, message.tag, message.nbytes)
        values = {
            "source": source, "out": out, "into": call.number, "sent_s": sent_s,
            "arrival_s": now_s if message.arrival_s is None else message.arrival_s,
            "tag": message.tag, "bytes": message.nbytes,
        }  # fmt: skip
        self._row(rank, now_s, values)

    # -- the end -----------------------------------------------------------------------------------------------

    def finish(self, end_s: float) -> None:
        """Record, at the end of the run, the last calls, calls that never return, exceptions of ranks, and pauses."""
        world, self._over = self._world, True
        ending = getattr(world.kernel.failure, "_task", None)
        for task in world.kernel.tasks:
            if task in self._last:
                own = self._last[task]
                self._row(task.rank, own.begin_s, own.row())
            if task in self._calls:
                own = self._calls[task]
                own.end_s, own.error = max(end_s, own.begin_s), "not over when the run ended"
                if task.wait is not None:
                    own.facts["waits"] = task.wait.describe()
                self._row(task.rank, own.begin_s, own.row())
            error = task.error or (world.kernel.failure if task is ending else None)
            if error is not None and not isinstance(error, (GreenletExit, KeyboardInterrupt)):
                said = f"{type(error).__name__}: {error}"
                self._sink.event(task.rank, min(task.clock, end_s), "raised", {"error": said})
        for fault in world.plan.faults if world.plan is not None else ():
            if isinstance(fault, Pause) and fault.at_s <= end_s:
                lasts_s = min(fault.for_s, end_s - fault.at_s)
                self._sink.event(fault.rank, fault.at_s, "pause", {"seconds": lasts_s})


def _comm(subject: Any) -> str:
    """Return the name of the communicator that a call's object belongs to, if any."""
    if isinstance(subject, (Member, Epochs)):
        return subject._label if subject._identity is not None else ""
    if isinstance(subject, Request):
        waiting = getattr(subject, "_waiting", None)
        return str(getattr(getattr(waiting, "instance", waiting), "comm", ""))
    return ""


# ---------------------------------------------------------------------------------------------------------- noting
def _followed(name: str, raw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that is not one of MPI's (compute, sleep, join), recorded by the timeline."""

    @functools.wraps(raw)
    def watching(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        timeline: Timeline | None = None if task is None else task.kernel.owner.timeline
        if timeline is None:
            return raw(*args, **kwargs)
        return timeline.watching(name, None, functools.partial(raw, *args, **kwargs))

    return watching


def _noted(
    raw: Callable[..., Any], note: Callable[[Timeline, Task, Any], None], *, after: bool = False
) -> Any:
    """Return a function of spawnsim that also reports to the timeline the data it moves within a call.

    `note` receives the function's arguments, or with `after` its first argument and its result.
    """

    @functools.wraps(raw)
    def noted(*args: Any, **kwargs: Any) -> Any:
        task = current_task()
        timeline: Timeline | None = None if task is None else task.kernel.owner.timeline
        if timeline is None or task is None:
            return raw(*args, **kwargs)
        if not after:
            note(timeline, task, args)
            return raw(*args, **kwargs)
        result = raw(*args, **kwargs)
        note(timeline, task, (args[0], result))
        return result

    return noted


def _sent(timeline: Timeline, task: Task, given: tuple[World, Any, Message]) -> None:
    call = timeline.call_of(task, task.rank)
    if call is not None:
        timeline.sent(call, given[1], given[2], task)


def _received(timeline: Timeline, task: Task, given: tuple[Member, Message]) -> None:
    call = timeline.call_of(task, given[0]._rank.id)
    if call is not None:
        timeline.received(call, given[1], task.rank, task.clock)


def _joined(timeline: Timeline, task: Task, given: tuple[Member, Collective]) -> None:
    member, collective = given
    call = timeline.call_of(task, member._rank.id)
    if call is not None and member._identity is not None:
        context = member._context
        number = context.calls.get(member._rank.id, 0)
        call.facts |= {"context": context.number, "collective": number, "sent": total(collective.nbytes)}
        if collective.root >= 0:
            call.facts["root"] = collective.root


def _left(timeline: Timeline, task: Task, given: tuple[CollectiveInstance, int]) -> None:
    instance, me = given
    call = timeline.call_of(task, instance.members[me])
    if call is not None and instance.context is not None:
        call.facts |= {"context": instance.context.number, "collective": instance.number}


def _asked(timeline: Timeline, task: Task, given: tuple[WindowState, Rank, int, Access]) -> None:
    windows, origin, place, access = given
    call = timeline.call_of(task, origin.id)
    if call is not None:
        there, back = access.nbytes
        call.moved("dest", windows.targets[place].rank.id, None, there)
        if back:
            call.facts["received"] = call.facts.get("received", 0) + back


def _note_moves(put: Put) -> None:
    for owner, name, called in OWN:
        put(owner, name, _followed(called, getattr(owner, name)))
    # The functions that move data. `send` is replaced where `Member` looks it up.
    put(members, "send", _noted(vars(members)["send"], _sent))
    put(Member, "_accept", _noted(Member._accept, _received, after=True))
    put(Member, "_taken", _noted(Member._taken, _received))
    put(Member, "_join", _noted(Member._join, _joined))
    put(CollectiveInstance, "outcome", _noted(CollectiveInstance.outcome, _left))
    put(WindowState, "request", _noted(WindowState.request, _asked))


_noting = Patches(_note_moves).in_place
