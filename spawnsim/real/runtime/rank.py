"""The state that all communicators of one real rank share, and a rank's run from start to end.

`RankRuntime` holds the rank's services, counters, open requests and abort protocol. A backend adds polling, waiting and
a barrier. `guarded(comm)` runs the program: either all programs end together (`finalize`), or the whole job ends with
an error (`abort`).

`checkpoint` and `restore`: each rank writes its own shard while training continues. All ranks drain their policies and
meet in a barrier; then each copies its states, and a thread writes the copy. A checkpoint is valid once the shards of
all ranks exist, so ranks need not confirm their writes to each other. Messages that are sent and not yet received at
that time stay in the library and are not saved.
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
from spawnsim.comm.properties import stated as property_of
from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.random import gpu_states, set_gpu_states
from spawnsim.real.runtime.abort import AbortProtocol, stoppable
from spawnsim.real.runtime.requests import RequestRegistry, wait_until
from spawnsim.real.runtime.services import Counters, Options, RankServices, Task
from spawnsim.real.runtime.watchdog import Channel


class Checkpoints:
    """The checkpoints of one real rank.

    Args:
        folder: the run folder; None for a run without one.
        resumed: whether the run begins with the newest checkpoint of the folder.
    """

    def __init__(self, folder: Path | None = None, *, resumed: bool = False) -> None:
        self.folder, self.resumed = folder, resumed
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, comm: Any, iteration: int, shard: Shard, *, save: str, clock_s: float) -> None:
        """Write this rank's shard in a thread, after the previous one; `save` identifies this checkpoint."""
        self.finish()
        assert self.folder is not None
        # Survivors are renumbered, but their recorded rows use world ranks.
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
        except Exception as error:  # noqa: BLE001  the rank's next call raises it, MemoryError included: a thread cannot
            self._error = error

    def finish(self) -> None:
        """Wait for the current write.

        Raises:
            StorageError: the file system refused the write.
            Exception: the write failed for another reason (no memory, a number too long for JSON).
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
        raise ParameterError("checkpoint(): the run has no folder: give it one (--out DIR)")
    if policy is not None and hasattr(policy, "drain"):
        policy.drain()
    # An iteration may be saved again (after a recovery, or by a second job in the folder), and that save may be cut
    # short. The folder then holds shards of two saves, and only this identifier distinguishes them.
    save = comm.bcast(uuid.uuid4().hex if comm.rank == 0 else None, root=0)
    comm.Barrier()  # from here on no rank is at an earlier iteration
    shard = Shard()
    states = checkpoints.states_of(model=model, optimizer=optimizer, policy=policy, extra=extra)
    for name, state in {"iteration": iteration, **states}.items():
        shard.put(name, state)
    comm.record.event("checkpoint", iteration=iteration, nbytes=shard.nbytes)
    # One clock reading, after the event: a resumed run assumes that everything earlier is already recorded.
    own = _rank_state(comm)
    shard.put("rank", own)
    saving.write(comm, iteration, shard, save=save, clock_s=own["clock_s"])


def restore(comm: Any, *, model: Any = None, optimizer: Any = None, policy: Any = None) -> Saved | None:
    """Return the saved state, or None; see `spawnsim.Comm.restore`."""
    saving: Checkpoints = comm.runtime.checkpoints
    if not saving.resumed or saving.folder is None:
        return None
    # Rank 0 chooses, since a file system may show different files to different ranks at different times.
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
        torch.cuda.init()  # otherwise torch would later apply the seed of this process, which it has deferred
        set_gpu_states(torch, generators["gpus"])


RECEIVES = ("recv", "Recv")
LAST_POLLS = 64  # polls for messages that may still be in flight after the barrier: under 1 ms


class RankRuntime:
    """One per rank and run; `comm.runtime` of every communicator of that run.

    Attributes:
        counters: messages and bytes that this rank has sent and received; `clear()` resets them.
        give_up: drops ranks that are silent at the end, so that the other ranks end without them; None in a job that
            does not survive deaths.
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
        """Wait for `done`, at most `limit_s`; a wait that does not end immediately is registered with the watchdog.

        `peer`: the awaited rank of the communicator, ANY_SOURCE for any rank; None for all ranks, as in a collective.
        """
        raise NotImplementedError

    def begin_barrier(self) -> Callable[[], bool]:
        """Begin to wait for all ranks; the result returns whether all have arrived."""
        raise NotImplementedError

    def take_leftovers(self) -> int:
        """Drop messages that have arrived but were not received; return their number."""
        raise NotImplementedError

    def release(self) -> None:
        """Release the run's resources. This is the last step; afterwards the rank cannot communicate."""
        raise NotImplementedError

    def lowest(self) -> int:
        return 0

    # ---------------------------------------------------------------------------------------------- for the runner
    def on_abort(self, save: Callable[[str], object]) -> None:
        """Call `save(summary)` if the job ends early, before this rank's process does.

        Args:
            save: saves data that would be lost; its argument is a one-line reason for the end. All ranks together
                have `SAVE_S` seconds.
        """
        self.abort.saves.append(save)

    def totals(self) -> dict[str, Any]:
        """Return this rank's totals so far: "messages", "bytes", "events" and "clock_s"."""
        return self.counters.totals(self.services)

    def settle(self) -> None:
        """Wait until all programs have ended; complete or drop open requests and messages, and record their number.

        Collective; afterwards no program sends. The run itself may still send messages between ranks.
        """
        if self._settled:
            return
        self._settled = self.abort.program_ended = True
        # The order matters. After the barrier, no message can arrive for an open receive; it is cancelled, since the
        # drain would otherwise wait for it until its deadline. Unreceived messages must then be taken out of the
        # library, since MPICH aborts in `Finalize` when it still holds any.
        self.barrier()
        cancelled = self._cancel_receives()
        # A job that survives deaths does not finalize MPI and must not wait for dead ranks.
        if self.give_up is None:
            self._drain()
        for kind, count in (
            ("leftover_requests", cancelled + len(self.registry)),
            ("leftover_messages", self._leftovers),
        ):
            if count:
                self.services.record.event(kind, count=count)

    def finalize(self) -> None:
        """End this rank's part in the job; collective. Further calls have no effect."""
        self.settle()
        if not self._finalized:
            self._finalized = True
            self.release()

    def barrier(self) -> None:
        self._barrier(self.registry.sweep)

    def absent(self) -> dict[int, str]:
        """Return the reason for each absent rank, by world rank; queries all watchdogs."""
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
        # Sends complete when their receivers have taken the messages, so every rank must drain until all have finished.
        # That is why there is a second barrier, during which each rank continues to drain.
        wait_until(self._drained, self.clock.limit_s())
        self._barrier(self._drained)
        for _ in range(LAST_POLLS):
            self._drained()

    def _barrier(self, meanwhile: Callable[[], object]) -> None:
        """Wait for all ranks. A silent (not a slow) rank ends the job, or is given up if the job survives deaths."""
        all_here = self.begin_barrier()

        def poll() -> bool:
            self.abort.hold()
            meanwhile()
            return all_here()

        while not wait_until(poll, max(self.clock.limit_s(), 1.0)):
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
        """Cancel open receives, for which no message can arrive; return their number."""
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
    """The non-MPI methods of every communicator of a real rank. `label`: its name, the same on all its ranks."""

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
            The task; see its `alive` and `join`.
        """
        return self.runtime.services.background(fn)

    def check(self: Any, condition: Any, message: str = "", **stated: Any) -> None:
        """Record a warning unless a condition holds: a real job continues, whereas a virtual run ends.

        Args:
            condition: the condition that must hold; the name, if a property of the whole run is stated.
            message: the text of the warning.
            stated: a property of the whole run. Real ranks do not judge it, and rank 0 records a warning.
        """
        if stated:
            name = property_of(condition, message, **stated).name
            if self.rank == 0:
                self.record.event("warning", text=f"comm.check({name!r}) is judged on virtual ranks only")
        elif not condition:
            self.record.event("warning", text=message or "a check failed")

    def absent(self) -> dict[int, str]:
        """Return the ranks that are absent now. A rank that computes or waits is not absent.

        Returns:
            The reason by rank of this communicator: it has died, it has ended its program, or it does not answer.
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
        """Let requests make progress now; every operation and the end of every compute block also do so."""
        self.runtime.poll()


C = TypeVar("C", bound=Any)


def close(comm: Any) -> None:
    """End this rank's part in the job: wait for all ranks, complete open requests, stop the watchdog. Collective.

    Args:
        comm: a communicator of `world()` or `wrap()`; all communicators of the same run end with it.
    """
    comm.runtime.finalize()


@contextmanager
def guarded(comm: C) -> Iterator[C]:
    """Run a rank's program: an exception or a non-zero exit ends the whole job; the end of the block calls `close`.

    Args:
        comm: the communicator of `world()`, which the block receives.
    """
    abort: AbortProtocol = comm.runtime.abort
    # A job that survives deaths also survives a rank that is stopped by a signal, so the signal keeps its default
    # effect there.
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
    except SpawnsimError as error:  # for example, the other ranks have given this rank up
        abort.fail(error)
