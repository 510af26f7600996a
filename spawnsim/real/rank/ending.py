"""How a real job ends: all together, or loudly, with one message and a non-zero status.

A rank that raises, exits early or waits past a deadline must not leave the others hanging. The lowest rank's watchdog
grants the floor to one speaker; every rank says its last words (the recorder saves what it has), then the speaker
aborts the job. Knows the watchdog and an abort function; knows neither MPI nor torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spawnsim.errors import Deadlock, InternalError, Livelock, Timeout, UsageError, WorldError
from spawnsim.real.rank.watchdog import Call, Channel, Watchdog, Where, verdict

HOUSE = str(Path(__file__).parents[2]) + os.sep  # where files of this package lie
FLOOR_S = 1.0  # how long rank 0 may take to grant the floor
LAST_WORDS_S = 3.0  # how long all ranks together may take to save what they have
SILENT_S = 8.0  # a rank that may not speak leaves by itself after this long


def status_of(error: BaseException) -> int:
    """Return the exit status for an error that ends the job; the command line documents these numbers."""
    table = ((Deadlock, 3), (Livelock, 3), (UsageError, 2), (WorldError, 4), (InternalError, 5))
    return next((status for family, status in table if isinstance(error, family)), 1)


class Ending:
    """The end of one rank's run. `abort(status)` ends all ranks of the job and does not return."""

    def __init__(self, channel: Channel, abort: Callable[[int], None]) -> None:
        self.watchdog = Watchdog(channel, self._expired)
        self.watchdog.heard |= {
            "claim": self._claimed, "floor": self._floor, "words": self._words, "said": self._said,
        }  # fmt: skip
        self.last_words: list[Callable[[str], object]] = []
        self.over = self.begun = False
        self.doomed = False  # another rank has said that it ends the job
        self.lost: set[int] = set()  # ranks that the others have given up, in a job that survives them
        self.given_up: Callable[[], bool] = bool  # whether this rank is one of them
        self._abort = abort
        self._lock = threading.Lock()
        self._speaker = -1  # the lowest rank keeps who has the floor
        self._granted: list[bool] = []
        self._quiet: set[int] = set()

    # ------------------------------------------------------------------------------------------- for the program
    def fail(self, error: BaseException, context: str = "") -> None:
        """End the job because of an exception of this rank: one traceback, last words, abort. Does not return."""
        self.end(
            f"{_told(error)}\n{context or self._who()}",
            summary=f"{type(error).__name__}: {error}",
            status=status_of(error),
        )

    def end(self, text: str, *, status: int = 1, summary: str = "") -> None:
        """End the job with this message; called by any thread, does not return."""
        if self.given_up():  # the others go on, and keep what is theirs
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            os._exit(0)
        self.begun = True
        if threading.current_thread() is self.watchdog:
            self._end(text, summary or text, status)
        elif self.watchdog.is_alive():
            self.watchdog.do(lambda: self._end(text, summary or text, status))
            time.sleep(FLOOR_S + LAST_WORDS_S + SILENT_S)
        else:
            self._speak(text, summary or text)
        self._abort(status)

    def hold(self) -> None:
        """Keep the program's thread here if another one is ending the job: it must not part from the others now."""
        while self.begun:
            time.sleep(0.05)

    def _who(self) -> str:
        after = "this rank leaves" if self.given_up() else "the job ends"
        return f"spawnsim: rank {self.watchdog.channel.rank} of {self.watchdog.channel.size} raised; {after}"

    # ------------------------------------------------------------------------------------ in the watchdog thread
    def _expired(self, call: Call, found: list[Where]) -> None:
        missing, text = verdict(call, found)
        error = Timeout(missing, call[0], call[1], text)
        self._end(f"spawnsim: {type(error).__name__}: {error}", f"Timeout: {error}", status_of(error))

    def _end(self, text: str, summary: str, status: int) -> None:
        self._granted, self.begun = [], True
        channel = self.watchdog.channel
        chair = min(rank for rank in range(channel.size) if rank not in self.lost)
        if channel.rank == chair:
            self._claimed(chair, {})
        else:
            channel.send(chair, {"kind": "claim"})
        self.watchdog.serve_until(lambda: bool(self._granted), FLOOR_S)
        if self._granted == [False]:  # another rank has the floor: help it to end, or leave if it cannot
            self.watchdog.serve_until(lambda: False, SILENT_S)
        self._speak(text, summary)
        self.watchdog.tell_all({"kind": "words", "summary": summary})
        self.watchdog.serve_until(lambda: len(self._quiet) >= channel.size - 1 - len(self.lost), LAST_WORDS_S)
        self._abort(status)

    def _speak(self, text: str, summary: str) -> None:
        if text:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        self._say(summary)

    def _say(self, summary: str) -> None:
        with self._lock:
            words, self.last_words = self.last_words, []
        for word in words:
            try:
                word(summary)
            except Exception as error:  # noqa: BLE001  the job is ending: one broken recorder must not stop it
                sys.stderr.write(f"spawnsim: could not save at the end: {error!r}\n")

    def _claimed(self, sender: int, _message: dict[str, Any]) -> None:
        first = self._speaker in (-1, sender)
        self._speaker = sender if first else self._speaker
        if sender == self.watchdog.channel.rank:
            self._granted.append(first)
        else:
            self.watchdog.channel.send(sender, {"kind": "floor", "granted": first})

    def _floor(self, _sender: int, message: dict[str, Any]) -> None:
        self._granted.append(message["granted"])

    def _words(self, sender: int, message: dict[str, Any]) -> None:
        self.doomed = True
        self._say(message["summary"])
        self.watchdog.channel.send(sender, {"kind": "said"})

    def _said(self, sender: int, _message: dict[str, Any]) -> None:
        self._quiet.add(sender)


def _told(error: BaseException) -> str:
    """Return the traceback from the program's own first line on: how it was started is no news."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(HOUSE):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).rstrip()
