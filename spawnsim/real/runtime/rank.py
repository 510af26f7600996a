"""What all communicators of one real rank share, and a rank's run from its first line to its end.

`RankRuntime` holds the rank's services, counters, open requests and abort protocol; a backend adds how to poll, to wait
and to meet the other ranks. `guarded(comm)` runs the program: it ends together with those of all other ranks
(`finalize`), or the whole job ends with an error (`abort`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from spawnsim.comm.objects import DIED, ENDED, SILENT
from spawnsim.errors import SpawnsimError
from spawnsim.real.runtime.abort import AbortProtocol, stoppable
from spawnsim.real.runtime.checkpoints import Checkpoints
from spawnsim.real.runtime.requests import RequestRegistry, wait_until
from spawnsim.real.runtime.services import Counters, Options, RankServices, Task
from spawnsim.real.runtime.watchdog import Channel

RECEIVES = ("recv", "Recv")
LAST_LOOKS = 64  # at messages that may still be under way when all have met: under 1 ms


class RankRuntime:
    """One per rank and run; `comm.runtime` of every communicator of that run.

    Attributes:
        counters: what this rank has sent and received; `clear()` starts the counts at zero.
        give_up: drops ranks that are silent at the end, so that the others end without them; None in a job that ends
            with any of its ranks.
    """

    def __init__(
        self, services: RankServices, options: Options, channel: Channel, end_job: Callable[[int], None]
    ) -> None:
        self.services, self.clock, self.options = services, services.clock, options
        self.check_calls, self.ordered = options.check_calls, options.reduction == "ordered"
        self.registry, self.counters = RequestRegistry(), Counters()
        self.abort = AbortProtocol(channel, end_job)
        self.watchdog = self.abort.watchdog
        self.watchdog.note = self._note
        self.give_up: Callable[[set[int]], object] | None = None
        self.checkpoints = Checkpoints()  # nowhere, unless the run has a folder
        self._settled = self._finalized = False
        self._leftovers = 0
        services.on_error = self.abort.fail
        services.clock.poll = self.poll

    # ------------------------------------------------------------------------------------------ of each backend
    def poll(self) -> None:
        """Let go of requests that are complete, and let others make progress."""
        raise NotImplementedError

    def wait(
        self, done: Callable[[], bool], limit_s: float, call: tuple[str, int, Any], peer: int | None = None
    ) -> bool:
        """Wait for `done`, at most `limit_s`; a wait that is not over at once is known to the watchdog.

        `peer`: the rank of the communicator that it waits for, ANY_SOURCE for any; None: for all, as a collective.
        """
        raise NotImplementedError

    def begin_barrier(self) -> Callable[[], bool]:
        """Begin to wait for all ranks; the result says whether all have come."""
        raise NotImplementedError

    def take_leftovers(self) -> int:
        """Drop messages that have arrived and were not received; return how many."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back what the run holds: the last step, after which the rank is alone."""
        raise NotImplementedError

    def lowest(self) -> int:
        """Return the lowest rank that has come to the last barrier."""
        return 0

    # ------------------------------------------------------------------------------------------- for what runs it
    def on_abort(self, save: Callable[[str], object]) -> None:
        """Call `save(summary)` if the job ends early, before this rank's process does.

        Args:
            save: keeps what would be lost; it gets one line that says why the job ends. All ranks together have
                `SAVE_S` seconds.
        """
        self.abort.saves.append(save)

    def totals(self) -> dict[str, Any]:
        """Return what this rank has done so far: "messages", "bytes", "events" and "clock_s"."""
        return self.counters.totals(self.services)

    def settle(self) -> None:
        """Wait until all programs have ended; complete or drop what they left open, and record how much it was.

        Collective; from then on no program sends. Ranks may still send to each other on behalf of the run.
        """
        if self._settled:
            return
        self._settled = self.abort.program_ended = True
        # The order matters. Once all have met, no message can come for a receive that is open: it is cancelled, or
        # the drain would wait for it until its deadline. What was sent and not received has to be taken out of the
        # library afterwards, since MPICH aborts in `Finalize` when it still holds any.
        self.barrier()
        cancelled = self._cancel_receives()
        # A job that survives deaths does not finalize MPI, and must not wait for the dead.
        if self.give_up is None:
            self._drain()
        for kind, count in (
            ("leftover_requests", cancelled + len(self.registry)),
            ("leftover_messages", self._leftovers),
        ):
            if count:
                self.services.record.event(kind, count=count)

    def finalize(self) -> None:
        """End this rank's part in the job; collective, and more than once is fine."""
        self.settle()
        if not self._finalized:
            self._finalized = True
            self.release()

    def barrier(self) -> None:
        """Wait for all ranks, while requests go on."""
        self._barrier(self.registry.sweep)

    def absent(self) -> dict[int, str]:
        """Return by world rank why nothing can be expected of it now; all watchdogs are asked."""
        found = self.watchdog.ask_all()
        silent = self._still({where.rank for where in found if not where.answered})
        reasons = {where.rank: ENDED for where in found if where.note == ENDED}
        gone = self.abort.lost | self.abort.dead()
        return reasons | dict.fromkeys(silent, SILENT) | dict.fromkeys(gone, DIED)

    # ------------------------------------------------------------------------------------------------ at the end
    def _note(self) -> str:
        """Return what the rank does outside any call, for other ranks' messages."""
        began = self.services.compute.began_s
        if self.abort.program_ended:
            return ENDED
        return "" if began is None else f"computing for {time.perf_counter() - began:.1f} s"

    def _drain(self) -> None:
        # Sends complete when their receivers have taken the messages, so all drain until all have: hence the second
        # barrier, during which each goes on taking.
        wait_until(self._drained, self.clock.limit_s())
        self._barrier(self._drained)
        for _ in range(LAST_LOOKS):
            self._drained()

    def _barrier(self, meanwhile: Callable[[], object]) -> None:
        """Wait for all. A rank that is silent (not one that is slow) ends the job, or is given up if jobs survive."""
        all_here = self.begin_barrier()

        def look() -> bool:
            self.abort.hold()
            meanwhile()
            return all_here()

        while not wait_until(look, max(self.clock.limit_s(), 1.0)):
            silent = [where for where in self.watchdog.ask_all() if not where.answered]
            if self.give_up is not None:
                self.give_up(self._still({where.rank for where in silent}))
            elif silent and not all_here():
                table = "\n".join(f"  {where}" for where in silent)
                self.abort.end(f"spawnsim: the job cannot end\n{table}")

    def _still(self, silent: set[int]) -> set[int]:
        """Return which of those who were silent are so when they are asked again."""
        if not silent - self.abort.lost:
            return set()
        return {where.rank for where in self.watchdog.ask_all() if not where.answered} & silent

    def _cancel_receives(self) -> int:
        """Cancel the receives that are open, to which no message can come; return how many there were."""
        waiting: list[Any] = [each for each in self.registry.held() if each._what[0].endswith(RECEIVES)]
        waiting = [request for request in waiting if not request.advance()]
        for request in waiting:
            request.Cancel()
        return len(waiting)

    def _drained(self) -> bool:
        self._leftovers += self.take_leftovers()
        self.registry.sweep()
        return not self.registry


class RankComm:
    """What every communicator of a real rank has beside MPI's calls. `label`: its name, the same on all its ranks."""

    runtime: RankRuntime
    members: tuple[int, ...]  # the world ranks

    def __init__(self, runtime: RankRuntime, label: str) -> None:
        self.runtime, self.label, services = runtime, label, runtime.services
        self.clock, self.rng, self.record = services.clock, services.rng, services.record
        self.compute = services.compute

    def background(self, fn: Callable[[], object]) -> Task:
        """Run `fn()` in a thread of this rank; an exception in it ends the job.

        Args:
            fn: is called once, without arguments.

        Returns:
            The task, which says whether it is `alive` and can be joined.
        """
        return self.runtime.services.background(fn)

    def check(self, condition: Any, message: str = "") -> None:
        """Record a warning unless a condition holds: a real job goes on, where a virtual run ends.

        Args:
            condition: what must hold.
            message: what is wrong if it does not.
        """
        if not condition:
            self.record.event("warning", text=message or "a check failed")

    def absent(self) -> dict[int, str]:
        """Tell of which ranks nothing can be expected now. A rank that computes or waits is not among them.

        Returns:
            By rank of this communicator why: it has died, it has ended its program, or it does not answer.
        """
        reasons = self.runtime.absent()
        return {rank: reasons[member] for rank, member in enumerate(self.members) if member in reasons}

    def poll(self) -> None:
        """Let requests make progress now; every operation and the end of every compute block do it anyhow."""
        self.runtime.poll()


C = TypeVar("C", bound=Any)


def close(comm: Any) -> None:
    """End this rank's part in the job: wait for all ranks, complete what is open, stop the watchdog. Collective.

    Args:
        comm: a communicator of `world()` or `wrap()`; all others of the same run end with it.
    """
    comm.runtime.finalize()


@contextmanager
def guarded(comm: C) -> Iterator[C]:
    """Run a rank's program: an exception or a non-zero exit ends the whole job, the end of the block is `close`.

    Args:
        comm: the communicator of `world()`, which the block gets.
    """
    abort: AbortProtocol = comm.runtime.abort
    # A job that survives deaths also survives a rank that a signal stops, so there the signal keeps its own meaning.
    signals = nullcontext() if comm.runtime.options.survive else stoppable(abort)
    with signals:
        try:
            yield comm
            abort.end_forked()
        except SystemExit as leaving:
            abort.end_forked(leaving)
            if leaving.code not in (None, 0):
                status = leaving.code if isinstance(leaving.code, int) else 1
                abort.end(f"spawnsim: rank {comm.rank} called sys.exit({leaving.code!r})", status=status)
            _finalize(comm, abort)
            raise
        except BaseException as error:
            abort.end_forked(error)
            abort.fail(error)
            raise
        _finalize(comm, abort)


def _finalize(comm: Any, abort: AbortProtocol) -> None:
    try:
        close(comm)
    except SpawnsimError as error:  # such as: the others have given this rank up
        abort.fail(error)
