"""Diagnosis of runs that do not end: deadlock and livelock.

*Reports* show which rank waits for which, in which call, since when, and where in the program; they read tasks and
change nothing.

*Livelock*: the rule in `engine.kernel` decides whether polls can ever succeed. A *fruitless* poll has no result, and
knows of no message on its way to it. `kernel.idle` counts fruitless polls; any progress anywhere resets it.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from traceback import walk_stack
from types import CodeType, FrameType

from spawnsim.errors import Deadlock, Livelock, SpawnsimError, UsageError
from spawnsim.virtual.engine.event_queue import ScheduledCall
from spawnsim.virtual.engine.kernel import Kernel, Task, Wait
from spawnsim.virtual.engine.matching import undelivered
from spawnsim.virtual.engine.waiting import Waiting, WaitingForAny
from spawnsim.virtual.engine.world import Rank, World
from spawnsim.waits import PACKAGE, Row, line, ranks_text, ring, ring_text, table

SIMULATOR = tuple(PACKAGE + folder + os.sep for folder in ("virtual", "models"))
SHOWN_LEFT = 4  # kinds of messages that match no receive
WRAPPER = "watching"  # the function in which `timeline` wraps calls


def deadlock(tasks: Sequence[Task], ended: Sequence[int], died: str = "") -> Deadlock:
    """Return the error of a run in which every remaining task waits.

    `ended` are the ranks that have finished, `died` is the text from `dead`.
    """
    found = cycle(tasks)
    reason = ring_text(found) if found else _dead_end(tasks, ended)
    wait = "waits" if len(tasks) == 1 else "wait"
    error = Deadlock(
        f"deadlock: {len(tasks)} of {len(tasks) + len(ended)} ranks {wait} and nothing can end it; {reason}\n"
        + standing(tasks, found)
        + _remedy([task for task in tasks if task.rank in found])
        + _unmatched(tasks)
        + died
    )
    ends = _waiting_for_ended(tasks, ended)
    causes = [task for task in tasks if task.rank in found] or ends[:1] or tasks
    error.causes = tuple(sorted({f"{_call(task, None).partition('(')[0]} {where(task)}" for task in causes}))
    return error


def dead(ranks: Sequence[Rank]) -> str:
    """Return a line on the dead ranks, for which other ranks may wait; "" if no rank has died."""
    died = [f"rank {rank.id} at {rank.death_s:.6g} s" for rank in ranks if rank.dead]
    more = f", and {len(died) - 8} more" if len(died) > 8 else ""
    return f"\nDied: {', '.join(died[:8])}{more}" if died else ""


def _remedy(tasks: Sequence[Task]) -> str:
    """Return advice for ranks that wait for each other in one call, if there is any."""
    calls = {task.wait.describe().partition("(")[0] for task in tasks if task.wait is not None}
    if calls and calls <= {"Send", "send", "Ssend", "ssend"}:
        return (
            "\nA Send ends when its message is received, unless the message is short enough to be sent eagerly: "
            "use Sendrecv, or Isend and Waitall"
        )
    # If messages were sent to them, the ranks do not all receive first: the receives do not match, as `_unmatched`
    # reports.
    if calls and calls <= {"Recv", "recv"} and len(tasks) > 1 and not _unmatched(tasks):
        return "\nEach waits to receive before it sends: let one send first, or use Sendrecv"
    return ""


def _unmatched(tasks: Sequence[Task]) -> str:
    """List the messages in front of receives that do not match them: most likely one of the two is wrong."""
    waits = [(task.rank, each) for task in tasks if task.wait is not None for each in _receives(task.wait)]
    left = Counter(
        f"rank {message.source} to rank {wait.members.index(rank)}, tag {message.tag}, on {wait.comm}"
        for (rank, _), wait in {(rank, wait.context): wait for rank, wait in waits}.items()
        if (mailbox := wait.context.mailboxes.get(rank)) is not None and rank in wait.members
        for message in undelivered(mailbox)
    )
    if not left:
        return ""
    shown = [f"{f'{count} times ' if count > 1 else ''}{text}" for text, count in left.items()]
    more = f"; and {len(shown) - SHOWN_LEFT} more" if len(shown) > SHOWN_LEFT else ""
    return (
        f"\nSent, but no receive matches: {'; '.join(shown[:SHOWN_LEFT])}{more}. A receive must name the "
        "message's source and tag"
    )


def _receives(wait: Wait) -> list[Waiting]:
    parts = wait.parts if isinstance(wait, WaitingForAny) else (wait,)
    return [each for each in parts if isinstance(each, Waiting) and each.keyword == "source"]


def livelock(tasks: Sequence[Task], polls: int, since_s: float, died: str = "") -> Livelock:
    """Return the error of a run in which every remaining task polls or waits, and no further event is possible."""
    return Livelock(
        f"livelock: {polls:,} polls in a row found nothing, since {since_s:.6g} s; no rank does anything else, and "
        "no message is in flight: the program polls for something that will never happen\n"
        + standing(tasks)
        + died
    )


def amid_backward(task: Task) -> UsageError:
    """Return the error of the running task's wait within torch's backward pass, where only a thread can wait."""
    where = place(sys._getframe())
    line = f" ({where})" if where else ""
    error = UsageError(
        f"{task.name} has to wait in {_call(task, None)} at {task.clock:.6g} s{line}, within backward(), where a rank "
        "that is a greenlet cannot wait for other ranks (a hook of gradients, or an autograd.Function's backward): "
        "communicate when backward() is over, or give each rank a thread, which programs without main(comm) can have: "
        '--carrier threads (--whole runs any file so), or spawnsim.run(file, ..., options={"carrier": "threads"})'
    )
    error.__dict__["placed"] = True  # the message has rank, time and line
    return error


def standing(tasks: Sequence[Task], first: Collection[int] = (), below: FrameType | None = None) -> str:
    """Return a table of where tasks stand: first the ranks in `first`. The running task's place is searched from
    `below` on.

    Of many ranks in one call at one line, a row shows the first, and a line below the table counts the rest.
    """
    rows = [
        Row(task.rank, task.name, f"{task.clock:.6g} s", _call(task, below), where(task, below))
        for task in tasks
    ]
    # A waiting rank's clock shows since when it waits; at the debugger's prompt, a computing rank's clock is ahead, and
    # the user wants to see each rank's.
    return table(rows, first, time="since" if below is None else "clock", alike=below is None)


def doing(world: World) -> list[tuple[str, str]]:
    """Return each rank's activity: a word, and for a waiting rank the call and since when. Callable from any thread."""
    return [_doing(rank) for rank in world.ranks]


def _doing(rank: Rank) -> tuple[str, str]:
    if rank.dead:
        return "died", f"at {rank.death_s:.6g} s"
    if rank.ended_s < math.inf:
        return "finished", f"at {rank.ended_s:.6g} s"
    if not rank.tasks:
        return "starting", ""
    # Read once: the run continues while this thread reads, and the wait may be complete at a second read.
    task = rank.tasks[0]
    wait = task.wait
    if wait is None:
        return "computing", f"until {task.clock:.6g} s"
    return "waiting", f"{wait.describe()} since {task.clock:.6g} s"


def _dead_end(tasks: Sequence[Task], ended: Sequence[int]) -> str:
    """Return which wait no rank can end, when the waits form no cycle."""
    for task in _waiting_for_ended(tasks, ended)[:1]:
        peers = _others(task)
        program = "program has" if len(peers) == 1 else "programs have"
        return f"{task.name} waits for {ranks_text(peers)}, whose {program} ended"
    return "no other rank can act"


def _waiting_for_ended(tasks: Sequence[Task], ended: Sequence[int]) -> list[Task]:
    gone = set(ended)
    return [task for task in tasks if (peers := _others(task)) and gone.issuperset(peers)]


def _others(task: Task) -> list[int]:
    """Return the ranks that could end a task's wait; its own rank only if no other rank could."""
    peers = list(dict.fromkeys(task.wait.peers())) if task.wait is not None else []
    return [peer for peer in peers if peer != task.rank] or peers


def cycle(tasks: Sequence[Task]) -> list[int]:
    """Return ranks that wait for each other in a ring, or []. A wait for any of several ranks counts for the first."""
    return ring({task.rank: _others(task) for task in tasks if task.wait is not None})


def where(task: Task, below: FrameType | None = None) -> str:
    """Return the line of the program at which a task stands."""
    return place(_frames(task, below)[0]) or "?"


def place(frame: FrameType | None) -> str:
    """Return the line of the program, as file:line, from which a frame comes, or ""; see `waits.line`."""
    return line([(each.f_code.co_filename, number) for each, number in walk_stack(frame)])


def _call(task: Task, below: FrameType | None) -> str:
    return task.wait.describe() if task.wait is not None else _frames(task, below)[1]


def _frames(task: Task, below: FrameType | None = None) -> tuple[FrameType | None, str]:
    """Return a task's innermost frame outside spawnsim, and the name of the function that it calls."""
    # A task has no stored frame while it runs: then this function reads the current frame.
    return outside(task.carrier.gr_frame or below or sys._getframe())


def outside(frame: FrameType | None) -> tuple[FrameType | None, str]:
    """Return the innermost frame outside spawnsim from this one on, and the name of the function that it calls."""
    call = ""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        call = _name(frame.f_code) if frame.f_code.co_name != WRAPPER else call
        frame = frame.f_back
    return frame, call


def _name(code: CodeType) -> str:
    """Return a function's name; for a special method, the class: "compute" for `with comm.compute()`."""
    owner, _, name = code.co_qualname.rpartition(".")
    return owner.rpartition(".")[2].lower() if name.startswith("__") and owner else name


def calling(frame: FrameType | None) -> str:
    """Return the name of the virtual MPI call that the caller's rank makes; "" for an event outside any call."""
    name = ""
    while frame is not None:
        if frame.f_code.co_filename.startswith(SIMULATOR):
            name = _name(frame.f_code) if frame.f_code.co_name != WRAPPER else name
        elif name:
            break  # the outermost call: its caller is not part of the simulator
        frame = frame.f_back
    return name if name[:1].isalpha() and name not in ("run", "simulate", "run_program") else ""


# In general it is undecidable whether a loop of polls will end, so the limits are such that a program which ends by
# itself will hardly reach them. A million polls in a row take a few seconds of real time; in their second half each
# task that does not wait must have polled, or it may still do something else. A program that reads its clock between
# polls may wait for a time: its limit is a day of virtual time, or a hundred times as many polls, which takes minutes.
# The first rule counted polls regardless of due events, and reported a livelock for 63 ranks that polled while one
# worked for 10 s.
LIVELOCK_POLLS = 1_000_000
POLLS_EACH = 10_000
TIMED_FACTOR = 100
DAY_S = 86_400.0


class LivelockWatchdog:
    """Ends the run of a kernel that is in a livelock.

    Args:
        kernel: The kernel whose polls are counted.
        under_way: Returns whether any message is on its way.
        report: Creates the error from the number of polls in a row and the virtual time of the first.
    """

    def __init__(
        self, kernel: Kernel, under_way: Callable[[], bool], report: Callable[[int, float], SpawnsimError]
    ) -> None:
        self._kernel, self._under_way, self._report = kernel, under_way, report
        self._began_s, self._polls = 0.0, 0  # begin and earlier polls of the present run of polls
        self._before: dict[Task, int] = {}  # polls of each task at the last mark
        kernel.fruitless = self.fruitless

    def fruitless(self) -> None:
        """Count a fruitless poll of the running task; check the whole run from time to time."""
        kernel = self._kernel
        kernel.current.polls += 1
        kernel.idle += 1
        if kernel.idle == 1:
            self._began_s, self._polls = kernel.current.clock, 0
        elif kernel.idle == LIVELOCK_POLLS // 2:
            self._mark()
        elif kernel.idle >= LIVELOCK_POLLS:
            self._judge()

    def _mark(self) -> None:
        """Begin to observe which tasks poll."""
        kernel = self._kernel
        self._polls, kernel.idle = self._polls + LIVELOCK_POLLS // 2, LIVELOCK_POLLS // 2
        self._before = {task: task.polls for task in kernel.tasks}
        for task in kernel.tasks:
            task.timed = False

    def _judge(self) -> None:
        """End the run if it is in a livelock; otherwise begin anew."""
        kernel = self._kernel
        running = [task for task in kernel.tasks if task.alive and not task.parked and task.clock < math.inf]
        endless = (
            all(task.polls - self._before.get(task, task.polls) >= POLLS_EACH for task in running)
            and not any(map(self._matters, kernel.env.events()))
            and not self._under_way()
        )
        timed = any(task.timed for task in running)
        self._mark()
        if not endless:
            kernel.idle = 0
        elif not timed or self._long():
            kernel.stop(self._report(self._polls, self._began_s))

    def _long(self) -> bool:
        """Whether even programs that wait for a time have polled for too long."""
        return (
            self._polls >= TIMED_FACTOR * LIVELOCK_POLLS
            or self._kernel.current.clock - self._began_s >= DAY_S
        )

    def _matters(self, event: ScheduledCall) -> bool:
        """Whether an event could change the result of polls. A task's return cannot: the task's polls are counted."""
        action = event.action
        if not isinstance(action, partial):
            return action is not None
        return self._kernel.ends_a_wait(action)
