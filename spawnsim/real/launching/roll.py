"""The roll of a job: a folder of its launcher's, in which its processes leave who they are, how far they have come, and
who has ended first.

Ranks of other nodes may not reach it, and then leave nothing. Knows files alone; loads neither MPI nor torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spawnsim.errors import WorldError

ROLL = "SPAWNSIM_ROLL"
"""Names the folder. Each process leaves a file: its process id is the name, its rank the content, if it has one."""
SURVIVE = "SPAWNSIM_SURVIVE"
"""Set where the launcher lets the others live when a rank dies."""
BEGUN = "begun"  # the rank has met all others, and its program begins: from here on others may survive it
ENDED = "ended"  # its program has ended, and nothing is left to do
DEAD = "dead"  # it has ended in any other way
FIRST_END = (
    "first end"  # of a rank by which the job ends: status and sentence; later ends may be the launcher's work
)
WORLD = WorldError.exit_status  # the status of a job that something outside of its programs has ended
LOOK_S = 0.01  # how often at most a rank reads who has died
KNOWN_S = 0.5  # how much later than its peers a keeper may learn of a rank's death


@dataclass(frozen=True)
class Roll:
    """What the launcher reads."""

    folder: Path

    @property
    def processes(self) -> list[int]:
        """Return the process ids of all who have signed."""
        return [int(signed.name) for signed in self.folder.iterdir() if signed.name.isdigit()]

    @property
    def launchers(self) -> list[int]:
        """Return the parents of keepers, which these have signed for: the launcher's own processes on this node."""
        return [process for process in self.processes if not self.rank_of(process)]

    @property
    def ranks(self) -> set[int]:
        """Return the ranks that have signed."""
        return {int(rank) for process in self.processes if (rank := self.rank_of(process))}

    @property
    def ended_well(self) -> bool:
        """Whether a rank has come to the end of its program; so it is where nobody has signed."""
        return bool(_reached(self.folder, ENDED)) or not any(self.folder.iterdir())

    @property
    def begun(self) -> set[int]:
        """Return the ranks whose program has begun."""
        return _reached(self.folder, BEGUN)

    def first_end(self) -> tuple[int, str] | None:
        """Return the status and the sentence of the first end; the sentence is empty if the rank has said it all."""
        return _first(self.folder)

    def rank_of(self, process: int) -> str:
        """Return the rank that a process is, or keeps; "" if that is not known."""
        signed = self.folder / str(process)
        return signed.read_text() if signed.is_file() else ""


def sign(rank: int | str, environ: Mapping[str, str], process: int) -> None:
    """Say which process a rank is, where the launcher asked for it and its folder can be reached from here."""
    if folder := _folder(environ):
        (folder / str(process)).write_text(str(rank))


def sign_stage(stage: str, rank: int, environ: Mapping[str, str]) -> None:
    """Say how far a rank has come: BEGUN, ENDED or DEAD."""
    if folder := _folder(environ):
        (folder / f"{stage} {rank}").touch()


def reached(stage: str, environ: Mapping[str, str]) -> set[int] | None:
    """Return the ranks that have come to a stage; None where that cannot be known from here."""
    folder = _folder(environ)
    return None if folder is None else _reached(folder, stage)


def sign_first_end(status: int, sentence: str, environ: Mapping[str, str]) -> bool | None:
    """Say how a rank has ended, unless another was first.

    Whoever writes may be killed at any time, so the record appears whole or not at all. Returns whether this one was
    the first; None where there is no place to say so.
    """
    folder = _folder(environ)
    if folder is None:
        return None
    own = folder / f"{FIRST_END} seen by {os.getpid()}"
    own.write_text(f"{status} {sentence}")
    try:
        os.link(own, folder / FIRST_END)
    except FileExistsError:
        return False
    finally:
        own.unlink()  # else what this process writes next would be the record
    return True


def first_end(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the status and the sentence of the first end, if there was one."""
    folder = _folder(environ)
    return None if folder is None else _first(folder)


def await_first_end(environ: Mapping[str, str]) -> None:
    """Wait until the first end is known, for as long as a keeper may need to tell it; not where it cannot be told."""
    due_s = time.monotonic() + KNOWN_S
    while _folder(environ) and first_end(environ) is None and time.monotonic() < due_s:
        time.sleep(LOOK_S)


def scratch(environ: Mapping[str, str]) -> Path | None:
    """Return a run folder for a job that survives its ranks and keeps none: it is gone with the launcher."""
    folder = _folder(environ)
    return folder / "run" if folder and SURVIVE in environ else None


class Deaths:
    """Who has died, as their keepers say: to be asked as often as one likes."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._folder, self._due_s = _folder(environ), 0.0
        self._known = frozenset[int]()

    def __call__(self) -> frozenset[int]:
        """Return the world ranks."""
        now_s = time.monotonic()
        if self._folder is not None and now_s > self._due_s:
            self._due_s = now_s + LOOK_S
            with suppress(FileNotFoundError):  # the launcher is gone
                self._known = frozenset(_reached(self._folder, DEAD))
        return self._known


def _reached(folder: Path, stage: str) -> set[int]:
    words = (name.partition(" ") for name in os.listdir(folder))
    return {int(rank) for word, _, rank in words if word == stage}


def _first(folder: Path) -> tuple[int, str] | None:
    try:
        status, _, sentence = (folder / FIRST_END).read_text().partition(" ")
    except FileNotFoundError:
        return None
    return int(status), sentence


def _folder(environ: Mapping[str, str]) -> Path | None:
    folder = Path(environ.get(ROLL, "/nowhere"))
    return folder if folder.is_dir() else None
