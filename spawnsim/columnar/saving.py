"""Checkpoints of models over columns, which continue on another number of processes.

A checkpoint holds the rows of every process, and the answers that models have given so far: metrics, columns of the
reports, whether models are equal. A resumed run begins again. Up to the checkpoint its models repeat these answers and
draw the batches, but make no step; everything else (clocks, decisions, records) is computed again. Knows models by
their answers; must not know policies.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spawnsim import checkpoints
from spawnsim.checkpoints import Found, Shard
from spawnsim.columnar.rows import Members
from spawnsim.columnar.shards import Shards, bounds
from spawnsim.columnar.training import Trained
from spawnsim.errors import ParameterError
from spawnsim.record import folder
from spawnsim.record.recorder import document

PLAIN = ("sizes", "described", "checksum")  # neither change models nor depend on their weights before the end
VOLATILE = ("versions", "made", "notes")  # parts of a run's description that may differ


class Saved:
    """Models that are saved at turns, and continue from the newest checkpoint.

    Args:
        models: the models of this process.
        place: the run folder.
        every: number of iterations after which they are saved, at the next turn; None: never.
        resume: whether they continue from the newest checkpoint of the folder, if there is one.

    Attributes:
        replays: whether the run has yet to reach the checkpoint.
    """

    def __init__(self, models: Trained, place: Path, *, every: int | None, resume: bool) -> None:
        self._models, self._place, self._every, self._resume = models, place, every, resume
        self._answers: list[Any] = []
        self._given = 0  # answers repeated so far
        self._begun = 0  # iteration of the latest checkpoint
        self.replays = False

    @property
    def _shards(self) -> Shards:
        return self._models.shards

    def begin(self, what: Mapping[str, Any]) -> None:
        """Begin the run folder, or read its newest checkpoint; `what` describes the run.

        Raises:
            ParameterError: the checkpoint is damaged, or belongs to another run.
        """
        self._what = document({name: each for name, each in what.items() if name not in VOLATILE})
        found = checkpoints.whole(self._place)[:1] if self._resume and not self._shards.process else []
        found = self._shards.each(found)[0]
        if found:
            self._read(found[0])
        elif not self._shards.process:
            folder.begin(self._place, what)
        self._shards.each(None)  # nobody writes before

    # ------------------------------------------------------------------------------------------------------- models
    def train(self, first: int, count: int, members: Members) -> None:
        """Train as the models do, save them before that if it is due; up to the checkpoint, draw the batches alone."""
        if self.replays and first < self._begun:
            self._models.skip(first, count, members)
            return
        if self.replays:
            self.replays = False
        elif self._every is not None and first - self._begun >= self._every:
            self._write(first)
        self._models.train(first, count, members)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the models; a method repeats its answers up to the checkpoint."""
        inner = getattr(self._models, name)
        return inner if name in PLAIN else self._answering(inner)

    def _answering(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            if self.replays:
                found = self._answers[self._given]
                self._given += 1
                return self._whole(found)
            found = inner(*args, **kwargs)
            if self._every is not None:
                self._answers.append(self._own(found))
            return found

        return answer

    def _own(self, answer: Any) -> Any:
        """Return this process's part of an answer: columns over all ranks are divided like rows."""
        if isinstance(answer, dict):
            return {name: self._own(each) for name, each in answer.items()}
        if not isinstance(answer, np.ndarray):
            return answer
        return answer[self._shards.first : self._shards.first + self._shards.count].copy()

    def _whole(self, answer: Any) -> Any:
        if isinstance(answer, dict):
            return {name: self._whole(each) for name, each in answer.items()}
        return self._shards.gathered(answer) if isinstance(answer, np.ndarray) else answer

    # -------------------------------------------------------------------------------------------------------- files
    def _write(self, iteration: int) -> None:
        shards, rows = self._shards, self._models.rows()
        about = {
            "iteration": iteration, "rank": shards.process, "save": shards.each(uuid.uuid4().hex)[0],
            "ranks": [shards.process], "members": [*range(shards.processes)], "clocks_s": [0.0],
            "chunk": shards.chunk, "what": self._what,
        }  # fmt: skip
        shard = Shard()
        shard.put("answers", self._answers)
        shard.put("shared", self._models.shared())
        for name, each in rows.items():
            shard.view(f"rows/{name}", each)
        checkpoints.write(
            checkpoints.shard_path(self._place, iteration, shards.processes, shards.process), shard, about
        )
        self._begun = iteration
        shards.each(None)  # all are written
        if not shards.process:
            checkpoints.prune(self._place)

    def _read(self, found: Found) -> None:
        """Read the rows of this process from the files of all processes that had some of them."""
        shards, rows = self._shards, self._models.rows()
        first, end = shards.first, shards.first + shards.count
        parts, saves = [], set()
        for path, (low, high) in zip(
            found.files, pairwise(bounds(shards.ranks, shards.chunk, found.ranks)), strict=True
        ):
            if high <= first or end <= low:
                continue
            shard, about = checkpoints.read(path)
            self._require(path, about)
            saves.add(str(about.get("save")))
            inner, outer = (
                slice(max(low, first) - low, min(high, end) - low),
                slice(max(low, first) - first, min(high, end) - first),
            )
            for name, each in rows.items():  # until the run reaches the checkpoint, nobody looks at them
                each[outer] = _viewed(shard, f"rows/{name}", each, high - low)[inner]
            parts.append(_cut(shard.get("answers"), inner))
            self._models.set_shared(shard.get("shared"))
        if len(set().union(*shards.each(saves))) > 1:
            raise ParameterError(
                f"the files in {found.files[0].parent} were not saved together: remove it to continue from the "
                "checkpoint before"
            )
        self._answers = _joined(parts)
        self._begun, self.replays = found.iteration, True

    def _require(self, path: Path, about: Mapping[str, Any]) -> None:
        """Raise `ParameterError` if a checkpoint belongs to another run."""
        saved = about.get("what")
        if not isinstance(saved, dict) or about.get("chunk") != self._shards.chunk:
            raise ParameterError(f"{path} is not a checkpoint of these models over columns")
        for name in {**saved, **self._what}:
            if saved.get(name) != self._what.get(name):
                raise ParameterError(
                    f"{path} is of a run with {name}={saved.get(name)}, and this one has {self._what.get(name)}: "
                    "resume it with the same parameters"
                )


def _viewed(shard: Shard, name: str, like: Tensor, rows: int) -> Tensor:
    """Return saved rows, without a copy."""
    try:
        data = torch.from_numpy(shard.tensors[name][2]).view(like.dtype)
        return data.view(rows, *like.shape[1:])
    except (KeyError, RuntimeError) as error:
        raise ParameterError(f"the checkpoint does not fit these models: {name}: {error}") from error


def _cut(answer: Any, rows: slice) -> Any:
    """Return an answer's columns over some rows."""
    if isinstance(answer, dict):
        return {name: _cut(each, rows) for name, each in answer.items()}
    if isinstance(answer, list):
        return [_cut(each, rows) for each in answer]
    return answer[rows] if isinstance(answer, np.ndarray) else answer


def _joined(parts: list[Any]) -> Any:
    """Return the answers of consecutive rows as one."""
    if isinstance(parts[0], dict):
        return {name: _joined([each[name] for each in parts]) for name in parts[0]}
    if isinstance(parts[0], list):
        return [_joined([*each]) for each in zip(*parts, strict=True)]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else parts[0]
