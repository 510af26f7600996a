"""`comm.checkpoint` and `comm.restore` on real ranks: each writes a shard of its own, while training goes on.

All drain their policies and meet; then each copies its states, and a thread writes the copy. A checkpoint counts once
the shards of all ranks are there, so no rank need tell another that it has written its own. What a program has sent
and not received at that time stays in the library, and is not saved.
"""

from __future__ import annotations

import random
import sys
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spawnsim import checkpoints
from spawnsim.checkpoints import Saved, Shard
from spawnsim.errors import ParameterError
from spawnsim.random import gpu_states, set_gpu_states


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
