"""How a real job ends early: all together, loudly, with one message and a non-zero status.

A rank that raises, exits early or waits past a deadline must not leave the others hanging. The lowest rank's watchdog
grants the word to one speaker; every rank runs its `last_words` (the recorder saves what it has), then the speaker
aborts the job. A rank that only finds others missing does not speak where the launcher knows which has died. A rank
that is told to stop by SIGINT (Ctrl-C) or SIGTERM ends the job likewise: it may be inside a library that runs no
Python, so a thread hears of the signal through the interpreter's wake-up pipe. Launchers load this module: no numpy,
no MPI, no torch here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from spawnsim.errors import Timeout, UnsupportedError, WorldError, exit_status_of
from spawnsim.real.launch.processes import (
    KNOWN_S,
    REGISTRY,
    WORLD_ERROR,
    KnownDeaths,
    first_end,
    record_first_end,
)
from spawnsim.real.runtime.watchdog import Call, Channel, Watchdog, Where, verdict

PACKAGE = str(Path(__file__).parents[2]) + os.sep  # where files of this package lie
GRANT_S = 1.0  # how long rank 0 may take to grant the floor
LAST_WORDS_S = 3.0  # how long all ranks together may take to save what they have
SILENT_S = 8.0  # a rank that may not speak leaves by itself after this long


class AbortProtocol:
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
        self.dead: Callable[[], AbstractSet[int]] = KnownDeaths(
            os.environ
        )  # ranks that are known to have died
        self._abort = abort
        self._lock = threading.Lock()
        self._speaker = -1  # the lowest rank keeps who has the floor
        self._granted: list[bool] = []
        self._quiet: set[int] = set()

    # ------------------------------------------------------------------------------------------- for the program
    def fail(self, error: BaseException, context: str = "") -> None:
        """End the job because of an exception of this rank: one traceback, last words, abort. Does not return."""
        self.end(
            f"{_traceback_of(error)}\n{context or self._who()}",
            summary=f"{type(error).__name__}: {error}",
            status=exit_status_of(error),
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
            time.sleep(GRANT_S + LAST_WORDS_S + SILENT_S)
        else:
            self._speak(text, summary or text)
        self._leave(status)

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
        self._end(f"spawnsim: {type(error).__name__}: {error}", f"Timeout: {error}", exit_status_of(error))

    def _end(self, text: str, summary: str, status: int) -> None:
        self._granted, self.begun = [], True
        known = (
            status == WORLD_ERROR
            and REGISTRY in os.environ
            and self.watchdog.serve_until(_is_end_known, KNOWN_S)
        )
        if not known:
            self._take_floor()
        self._speak("" if known else text, summary)
        self.watchdog.tell_all({"kind": "words", "summary": summary})
        limit_s = GRANT_S if known else LAST_WORDS_S
        self.watchdog.serve_until(lambda: self._present() <= self._quiet, limit_s)
        self._leave(status)

    def _take_floor(self) -> None:
        """Ask to be the one who speaks; if another rank is, help it to end, or go on if it cannot."""
        channel, leader = self.watchdog.channel, self.leader
        if channel.rank == leader:
            self._claimed(leader, {})
        else:
            channel.send(leader, {"kind": "claim"})
        self.watchdog.serve_until(lambda: bool(self._granted), GRANT_S)
        if self._granted == [False]:
            self.watchdog.serve_until(lambda: False, SILENT_S)

    def _leave(self, status: int) -> None:
        record_first_end(status, "", os.environ)  # all is said
        self._abort(status)

    @property
    def leader(self) -> int:
        """The lowest rank that lives, as far as this one knows."""
        return min({self.watchdog.channel.rank, *self._present()})

    def _present(self) -> set[int]:
        """Return the other ranks that can be expected to answer."""
        channel = self.watchdog.channel
        absent = self.lost | self.watchdog.silent | {channel.rank, *self.dead()}
        return set(range(channel.size)) - absent

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


def _is_end_known() -> bool:
    """Whether the launcher knows by which rank the job ends."""
    return first_end(os.environ) is not None


def refuse_recovery(why: str) -> NoReturn:
    """Refuse `recover()` where no job survives: what the program wanted to recover from goes on."""
    failed = sys.exc_info()[1]
    if not isinstance(failed, WorldError):
        raise UnsupportedError(why)
    failed.add_note(why)
    raise failed


def _traceback_of(error: BaseException) -> str:
    """Return the traceback from the program's own first line on: how it was started is no news."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(PACKAGE):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).rstrip()


SIGNALS = (signal.SIGINT, signal.SIGTERM)
STARTED = "SPAWNSIM_STARTED"
"""Set by `launch`: whoever started the job says that it was stopped, so its ranks need not."""


def outcome_of_signal(number: int) -> str:
    """Return the "outcome" of a run that a signal has stopped."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


@contextmanager
def stoppable(ending: AbortProtocol) -> Iterator[None]:
    """While the block runs, a signal to stop ends the whole job. Outside of the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    former = {number: signal.signal(number, _ignore) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=_listen, args=(heard, ending), name="spawnsim-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in former.items():
            if signal.getsignal(number) is _ignore:
                signal.signal(number, handler)
        os.close(told)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing in the program's thread: the listening one acts."""


def _listen(heard: int, ending: AbortProtocol) -> None:
    while number := os.read(heard, 1):
        if number[0] in SIGNALS and signal.getsignal(number[0]) is _ignore:
            _stop(number[0], ending)
    os.close(heard)


def _stop(number: int, ending: AbortProtocol) -> None:
    rank, name = ending.watchdog.channel.rank, signal.Signals(number).name
    everyone = "SLURM_STEP_ID" in os.environ  # Slurm tells all ranks at once: one of them says so
    known = STARTED in os.environ or (everyone and rank > 0)
    said = f"rank {rank} was told to stop ({name})"
    if (
        STARTED in os.environ and not ending.doomed
    ):  # who has started the job says it, unless it was told itself
        record_first_end(128 + number, said, os.environ)
    text = "" if known or ending.doomed else f"spawnsim: {said}; the job ends"
    ending.end(text, summary=outcome_of_signal(number), status=128 + number)
