"""The registry of a job: a folder of the launcher, in which processes record their ranks and their progress.

It also holds the first end of a rank. Ranks on other nodes may be unable to reach the folder; they then write nothing.
Launchers load this module, so it uses only files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spawnsim.errors import WorldError

REGISTRY = "SPAWNSIM_REGISTRY"
"""Holds the path of the folder. Each process has a file named by its process id; its rank, if any, is the content."""
SURVIVE = "SPAWNSIM_SURVIVE"
"""Set if the launcher keeps the other ranks alive when a rank dies."""
CHECK_CALLS = "SPAWNSIM_CHECK_CALLS"
"""Set if collectives first compare their calls on all ranks."""
COMMAND = "SPAWNSIM_COMMAND"
"""The command that the user typed, for the record: ranks are started with other arguments."""
# The rank has met all other ranks, and its program begins: from now on the job may survive its death.
BEGUN = "begun"
ENDED = "ended"  # its program has ended, and no work remains
DEAD = "dead"  # it has ended in any other way
FIRST_END = "first end"  # of a rank, which ends the job: status and sentence
WORLD_ERROR = WorldError.exit_status  # the status of a job that was ended by a cause outside of its programs
REREAD_S = 0.01  # minimum interval at which a rank rereads the deaths
KNOWN_S = 0.5  # how much later than its peers a monitor may notice a rank's death


@dataclass(frozen=True)
class ProcessRegistry:
    """The registry as the launcher reads it."""

    folder: Path

    @property
    def processes(self) -> list[int]:
        return [int(file.name) for file in self.folder.iterdir() if file.name.isdigit()]

    @property
    def launchers(self) -> list[int]:
        """Return the parents of monitors, as registered by them: the launcher's own processes on this node."""
        return [process for process in self.processes if not self.rank_of(process)]

    @property
    def of_ranks(self) -> set[int]:
        return {process for process in self.processes if self.rank_of(process)}

    @property
    def ranks(self) -> set[int]:
        return {int(self.rank_of(process)) for process in self.of_ranks}

    @property
    def ended_well(self) -> bool:
        """Whether a rank has reached the end of its program, or the registry is empty."""
        return bool(_reached(self.folder, ENDED)) or not any(self.folder.iterdir())

    @property
    def begun(self) -> set[int]:
        return _reached(self.folder, BEGUN)

    def first_end(self) -> tuple[int, str] | None:
        """Return the status and the sentence of the first end; the sentence is empty if the rank has reported it."""
        return _first(self.folder)

    def rank_of(self, process: int) -> str:
        """Return the rank that a process runs or monitors; "" if unknown."""
        file = self.folder / str(process)
        return file.read_text() if file.is_file() else ""


def register(rank: int | str, environ: Mapping[str, str], process: int) -> None:
    """Record the process of a rank, if the launcher requested it and its folder is reachable from this node."""
    if folder := _folder(environ):
        # The file is moved into place as a whole: the launcher may read at any time, even during a re-registration.
        draft = folder / f"{process} by {os.getpid()}"
        draft.write_text(str(rank))
        draft.replace(folder / str(process))


def register_stage(stage: str, rank: int, environ: Mapping[str, str]) -> None:
    """Record the stage that a rank has reached: BEGUN, ENDED or DEAD."""
    if folder := _folder(environ):
        (folder / f"{stage} {rank}").touch()


def ranks_at_stage(stage: str, environ: Mapping[str, str]) -> set[int] | None:
    """Return the ranks that have reached a stage; None if the registry is not reachable from this node."""
    folder = _folder(environ)
    return None if folder is None else _reached(folder, stage)


def record_first_end(status: int, sentence: str, environ: Mapping[str, str]) -> bool | None:
    """Record how a rank has ended, unless an end is recorded; return whether it was the first, None without registry.

    Only the first end counts: once it is known, launchers kill the other ranks, and these ends do not reveal the cause.
    """
    folder = _folder(environ)
    if folder is None:
        return None
    # The writer may be killed at any time, and several processes may write at once. A hard link under the common name
    # is atomic and fails if the name exists, so a complete record appears at most once. Opening with O_EXCL and then
    # writing could leave an empty record permanently.
    draft = folder / f"{FIRST_END} seen by {os.getpid()}"
    draft.write_text(f"{status} {sentence}")
    try:
        os.link(draft, folder / FIRST_END)
    except FileExistsError:
        return False
    finally:
        draft.unlink()  # otherwise this process's next draft would change the record, which is the same file
    return True


def first_end(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and the sentence of the first end, if there was one."""
    folder = _folder(environ)
    return None if folder is None else _first(folder)


def wait_for_first_end(environ: Mapping[str, str]) -> None:
    """Wait until the first end is known, at most as long as a monitor may need to record it; not without a registry."""
    due_s = time.monotonic() + KNOWN_S
    while _folder(environ) and first_end(environ) is None and time.monotonic() < due_s:
        time.sleep(REREAD_S)


def scratch_folder(environ: Mapping[str, str]) -> Path | None:
    """Return a temporary run folder for a job that survives deaths and has no other; the launcher removes it."""
    folder = _folder(environ)
    return folder / "run" if folder and SURVIVE in environ else None


class KnownDeaths:
    """The world ranks that have died, as recorded by their monitors; reads at most every `REREAD_S` seconds."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._folder, self._due_s = _folder(environ), 0.0
        self._known = frozenset[int]()

    def __call__(self) -> frozenset[int]:
        now_s = time.monotonic()
        if self._folder is not None and now_s > self._due_s:
            self._due_s = now_s + REREAD_S
            with suppress(FileNotFoundError):  # the launcher is gone
                self._known = frozenset(_reached(self._folder, DEAD))
        return self._known


def _reached(folder: Path, stage: str) -> set[int]:
    names = (name.partition(" ") for name in os.listdir(folder))
    return {int(rank) for word, _, rank in names if word == stage}


def _first(folder: Path) -> tuple[int, str] | None:
    try:
        status, _, sentence = (folder / FIRST_END).read_text().partition(" ")
    except FileNotFoundError:
        return None
    return int(status), sentence


def _folder(environ: Mapping[str, str]) -> Path | None:
    folder = Path(environ.get(REGISTRY, "/nowhere"))
    return folder if folder.is_dir() else None
