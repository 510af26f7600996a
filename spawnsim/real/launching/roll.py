"""The roll of a job: a folder of its launcher's, in which its processes leave who they are and who has died first.

Ranks of other nodes may not reach it, and then leave nothing. Knows files alone; loads neither MPI nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROLL = "SPAWNSIM_ROLL"
"""Names the folder. Each process leaves a file: its process id is the name, its rank the content, if it has one."""
SURVIVE = "SPAWNSIM_SURVIVE"
"""Set where the launcher lets the others live when a rank dies."""
ENDED_WELL = "ended well"  # some rank's program has ended, and nothing is left to do
FIRST_DEATH = "first death"  # by a signal: status and sentence; later deaths may be the launcher's work
FIRST_EXIT = "first exit"  # likewise of a rank that has left with a status of its own, which is no death


@dataclass(frozen=True)
class Roll:
    """What the launcher reads."""

    folder: Path

    @property
    def processes(self) -> list[int]:
        """Return the process ids of all who have signed."""
        return [int(signed.name) for signed in self.folder.iterdir() if signed.name.isdigit()]

    @property
    def ended_well(self) -> bool:
        """Whether a rank has come to the end of its program; so it is where nobody has signed."""
        return (self.folder / ENDED_WELL).exists() or not any(self.folder.iterdir())

    @property
    def kept(self) -> bool:
        """Whether ranks have keepers, which sign for their launcher, and leave empty which rank it is."""
        return any(not (self.folder / str(process)).stat().st_size for process in self.processes)

    def first(self, end: str) -> tuple[int, str] | None:
        """Return the status and the sentence of the first such end: FIRST_DEATH or FIRST_EXIT."""
        try:
            status, _, sentence = (self.folder / end).read_text().partition(" ")
        except FileNotFoundError:
            return None
        return int(status), sentence

    def rank_of(self, process: int) -> str:
        """Return the rank that a process is, or keeps; "" if that is not known."""
        signed = self.folder / str(process)
        return signed.read_text() if signed.is_file() else ""


def sign(rank: int | str, environ: Mapping[str, str], process: int) -> None:
    """Say which process a rank is, where the launcher asked for it and its folder can be reached from here."""
    if folder := _folder(environ):
        (folder / str(process)).write_text(str(rank))


def sign_end(environ: Mapping[str, str]) -> None:
    """Say that this rank's program has ended well: what a job that survives its ranks is asked for in the end."""
    if folder := _folder(environ):
        (folder / ENDED_WELL).touch()


def sign_first(end: str, status: int, sentence: str, environ: Mapping[str, str]) -> bool:
    """Say how a rank has ended, unless another was first; return whether there is a place to say so.

    Whoever writes may be killed at any time, so the record appears whole or not at all.
    """
    folder = _folder(environ)
    if folder is None:
        return False
    own = folder / f"{end} seen by {os.getpid()}"
    own.write_text(f"{status} {sentence}")
    with suppress(FileExistsError):
        os.link(own, folder / end)
    return True


def _folder(environ: Mapping[str, str]) -> Path | None:
    folder = Path(environ.get(ROLL, "/nowhere"))
    return folder if folder.is_dir() else None
