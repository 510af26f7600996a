"""What all communicators of one real rank share, and a rank's run from its first line to its end.

`RankRuntime` holds the rank's services, counters, open requests and abort protocol; a backend adds how to poll, to wait
and to meet the other ranks. `guarded(comm)` runs the program: it ends together with those of all other ranks
(`finalize`), or the whole job ends with an error (`abort`).

`checkpoint` and `restore`: each rank writes a shard of its own, while training goes on. All drain their policies and
meet; then each copies its states, and a thread writes the copy. A checkpoint counts once the shards of all ranks are
there, so no rank need tell another that it has written its own. What a program has sent and not received at that time
stays in the library, and is not saved.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from spawnsim import checkpoints
from spawnsim.checkpoints import Saved, Shard
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG
from spawnsim.comm.objects import DIED, ENDED, SILENT
from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.random import gpu_states, set_gpu_states
from spawnsim.real.runtime.abort import AbortProtocol, stoppable
from spawnsim.real.runtime.requests import RequestRegistry, wait_until
from spawnsim.real.runtime.services import Counters, Options, RankServices, Task
from spawnsim.real.runtime.watchdog import Channel


class Checkpoints:
    """The checkpoints of one real rank.

    Args:
        folder: the run folder; None: the run has none.
        resumed: whether the run begins with the newest checkpoint of the folder.
    """

    def __init__(self, folder: Path | None = None, *, resumed: bool = False) -> None:
        self.folder, self.resumed = folder, resumed
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, comm: Any, iteration: int, shard: Shard, *, save: str, clock_s: float) -> None:
        """Write this rank's shard in a thread, after the one before; `save` tells this checkpoint from all others."""
        self.finish()
        assert self.folder is not None
        # Survivors have other numbers among themselves; their rows have those of the world.
        world = comm.members[comm.rank]
        about = {"iteration": iteration, "rank": comm.rank, "save": save}
        about |= {"ranks": [world], "members": list(comm.members), "clocks_s": [clock_s]}
        path = checkpoints.shard_path(self.folder, iteration, comm.size, comm.rank)
        self._writer = threading.Thread(
            target=self._written, args=(path, shard, about, comm.rank == 0), name="checkpoint"
        )
        self._writer.start()

    def _written(self, path: Path, shard: Shard, about: Mapping[str, Any], prunes: bool) -> None:
        try:
            checkpoints.write(path, shard, about)
            if prunes and self.folder is not None:
                checkpoints.prune(self.folder)
        except Exception as error:  # noqa: BLE001  told by the rank's next call: here nobody hears it, MemoryError included
            self._error = error

    def finish(self) -> None:
        """Wait for what is being written.

        Raises:
            StorageError: the file system has refused it.
            Exception: what else has kept it from being written (no memory, a number too long for JSON).
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error


def checkpoint(
    comm: Any,
    *,
    iteration: int,
    model: Any = None,
    optimizer: Any = None,
    policy: Any = None,
    extra: Any = None,
) -> None:
    """Save this rank's part; see `spawnsim.Comm.checkpoint`."""
    iteration = checkpoints.require_iteration(iteration)
    saving: Checkpoints = comm.runtime.checkpoints
    if saving.folder is None:
        raise ParameterError("checkpoint(): where to? Give the run a folder (--out DIR)")
    if policy is not None and hasattr(policy, "drain"):
        policy.drain()
    # An iteration may be saved again (after a recovery, or by a second job in the folder) and be cut short: the shards
    # that are there then are of two saves, which nothing else would tell.
    save = comm.bcast(uuid.uuid4().hex if comm.rank == 0 else None, root=0)
    comm.Barrier()  # from here on no rank is at an earlier iteration
    shard = Shard()
    states = checkpoints.states_of(model=model, optimizer=optimizer, policy=policy, extra=extra)
    for name, state in {"iteration": iteration, **states}.items():
        shard.put(name, state)
    comm.record.event("checkpoint", iteration=iteration, nbytes=shard.nbytes)
    # One reading of the clock, behind the event: a run that goes on takes what is earlier for recorded already.
    own = _rank_state(comm)
    shard.put("rank", own)
    saving.write(comm, iteration, shard, save=save, clock_s=own["clock_s"])


def restore(comm: Any, *, model: Any = None, optimizer: Any = None, policy: Any = None) -> Saved | None:
    """Return what was saved, or None; see `spawnsim.Comm.restore`."""
    saving: Checkpoints = comm.runtime.checkpoints
    if not saving.resumed or saving.folder is None:
        return None
    # Rank 0 chooses: another may look at a moment in which a file system shows it more, or less.
    chosen = checkpoints.newest(saving.folder)[:2] if comm.rank == 0 else None
    iteration, ranks = comm.bcast(chosen, root=0)
    seen = (each for each in checkpoints.whole(saving.folder) if each[:2] == (iteration, ranks))
    found = next(seen, None)
    if found is None:
        raise ParameterError(
            f"{saving.folder}: rank {comm.rank} does not see the checkpoint of iteration {iteration}: the folder must "
            "be the same for all ranks, on a file system that they share"
        )
    part = checkpoints.part_of(found, comm.rank, size=comm.size)
    saved = part.saved()
    own = part.get("rank")
    if part.donor == comm.rank:
        _set_rank(comm, own)
    checkpoints.load(saved, model=model, optimizer=optimizer, policy=policy)
    comm.clock.set_forward(float(own["clock_s"]))
    return saved


def _rank_state(comm: Any) -> dict[str, Any]:
    torch = sys.modules.get("torch")
    generators = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": None if torch is None else torch.get_rng_state(),
        "gpus": None if torch is None else gpu_states(torch),
    }
    return {
        "clock_s": comm.clock.now(),
        "streams": checkpoints.streams_state(comm.rng),
        "generators": generators,
    }


def _set_rank(comm: Any, state: Mapping[str, Any]) -> None:
    checkpoints.set_streams(comm.rng, state["streams"])
    generators = state["generators"] or {}
    if generators.get("python") is not None:
        random.setstate(generators["python"])
    if generators.get("numpy") is not None:
        np.random.set_state(generators["numpy"])
    torch: Any = sys.modules.get("torch")
    if generators.get("torch") is not None:
        torch.set_rng_state(generators["torch"])
    if generators.get("gpus") and torch.cuda.is_available():
        torch.cuda.init()  # or else the seed of this process would count, which torch has put off
        set_gpu_states(torch, generators["gpus"])


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

    checkpoint, restore = checkpoint, restore

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

    def sendrecv(
        self: Any, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
        source: int = ANY_SOURCE, recvtag: int = ANY_TAG, status: Any = None,
    ) -> Any:  # fmt: skip
        outgoing = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        outgoing.Wait()
        return received

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
