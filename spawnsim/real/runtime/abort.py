"""The early end of a real job: all ranks together, with one message and a non-zero status.

A rank that raises, exits early or waits past a deadline must not leave the other ranks hanging. One rank reports the
error: the first that asks the lowest rank's watchdog. Every rank then saves its data (`on_abort`), and the reporting
rank aborts the job. A rank that only finds ranks missing reports nothing if the launcher knows which rank has died. A
rank that gets SIGINT (Ctrl-C) or SIGTERM ends the job in the same way. Launchers load this module: no numpy, MPI or
torch.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from spawnsim.errors import (
    SpawnsimError,
    Timeout,
    UnsupportedError,
    WorldError,
    exit_status_of,
    program_traceback,
    reported_place,
)
from spawnsim.real.runtime.registry import (
    KNOWN_S,
    REGISTRY,
    WORLD_ERROR,
    KnownDeaths,
    first_end,
    record_first_end,
)
from spawnsim.real.runtime.watchdog import Call, Channel, Watchdog, Where, verdict
from spawnsim.signals import heard, outcome_of_signal

GRANT_S = 1.0  # how long the lowest rank may take to answer a request
SAVE_S = 3.0  # how long all ranks together may take to save their data
SILENT_S = 8.0  # how long a rank that may not report waits before it leaves by itself


class AbortProtocol:
    """One rank's side. `end_job(status)` ends all ranks of the job and does not return.

    A rank that ends the job sends "request" to the lowest rank, which answers "grant" (`granted`: whether the sender
    may report). The rank that may report sends "save" to all; each saves its data and answers "saved". Requests go to
    one rank because many ranks fail at once: if a collective misses a member, all others exceed the deadline within
    milliseconds, and without an arbiter a job of 64 ranks would print 63 reports. The protocol runs in the watchdog
    threads, since the program's thread may be inside a blocking call of the library. Every wait has a limit, since any
    rank may be dead: a rank that gets no answer within `GRANT_S` reports anyway, as two reports are better than none.
    """

    def __init__(self, channel: Channel, end_job: Callable[[int], None]) -> None:
        self.watchdog = Watchdog(channel, self._expired)
        self.watchdog.handlers |= {
            "request": self._on_request, "grant": self._on_grant, "save": self._on_save, "saved": self._on_saved,
        }  # fmt: skip
        # Each function is called once, with a one-line reason for the end of the job.
        self.saves: list[Callable[[str], object]] = []
        self.program_ended = self.begun = False
        self.remote = False  # another rank ends the job
        self.lost: set[int] = set()  # ranks that the other ranks have given up, in a job that survives deaths
        self.given_up: Callable[[], bool] = bool  # whether this rank is one of them
        # ranks that are known to have died
        self.dead: Callable[[], AbstractSet[int]] = KnownDeaths(os.environ)
        self._end_job, self._process = end_job, os.getpid()
        self._lock = threading.Lock()
        self._reporter = -1  # the rank that the lowest rank has allowed to report
        self._granted: list[bool] = []
        self._saved: set[int] = set()  # the other ranks that have saved their data

    # ------------------------------------------------------------------------------------------- for the program
    def fail(self, error: BaseException, context: str = "") -> None:
        """End the job because of an exception of this rank: report, save, abort. Does not return."""
        _hear_no_children()
        self.end(
            f"{program_traceback(error)}\n{context or self._who(error)}",
            summary=f"{type(error).__name__}: {error}",
            status=exit_status_of(error, of_program=True),
        )

    def refuse(self, error: SpawnsimError) -> None:
        """End a job that cannot start, with a one-line report; no program has begun. Does not return."""
        self.end(
            f"spawnsim: {error}", summary=f"{type(error).__name__}: {error}", status=exit_status_of(error)
        )

    def end(self, text: str, *, status: int = 1, summary: str = "") -> None:
        """End the job with this message. Any thread may call it; it does not return."""
        _hear_no_children()
        if self.given_up():  # the other ranks continue and keep their data
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
            os._exit(0)
        self.begun = True
        if threading.current_thread() is self.watchdog:
            self._end(text, summary or text, status)
        elif self.watchdog.is_alive():
            self.watchdog.do(lambda: self._end(text, summary or text, status))
            time.sleep(GRANT_S + SAVE_S + SILENT_S)
        else:
            self._report(text, summary or text)
        self._leave(status)

    def end_forked(self, error: BaseException | None = None) -> None:
        """End this process, as Python would, if the program forked it and let it continue: it is not a rank.

        Args:
            error: the exception that ended the program.
        """
        if os.getpid() == self._process:
            return
        status = 0
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
        elif error is not None:
            sys.excepthook(type(error), error, error.__traceback__)
            status = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def hold(self) -> None:
        """Block the program's thread while another thread is ending the job: it must not leave in the meantime."""
        while self.begun:
            time.sleep(0.05)

    def _who(self, error: BaseException) -> str:
        after = "this rank leaves" if self.given_up() else "the job ends"
        who = f"rank {self.watchdog.channel.rank} of {self.watchdog.channel.size}"
        return f"spawnsim: {who} raised {reported_place(error)}; {after}"

    # ------------------------------------------------------------------------------------ in the watchdog thread
    def _expired(self, call: Call, found: list[Where]) -> None:
        missing, text = verdict(call, found)
        error = Timeout(missing, call[0], call[1], text)
        self._end(f"spawnsim: {type(error).__name__}: {error}", f"Timeout: {error}", exit_status_of(error))

    def _end(self, text: str, summary: str, status: int) -> None:
        self._granted, self.begun = [], True
        # A `WorldError` reports missing ranks, but no cause. If monitors record the ends of ranks, the launcher names
        # the dead rank and the signal, and a report of this rank would only duplicate that. The monitor may notice the
        # death up to `KNOWN_S` later than this rank, which sees a closed connection.
        known = (
            status == WORLD_ERROR
            and REGISTRY in os.environ
            and self.watchdog.serve_until(_is_end_known, KNOWN_S)
        )
        if not known:
            self._request()
        self._report("" if known else text, summary)
        self.watchdog.notify_all({"kind": "save", "summary": summary})
        limit_s = GRANT_S if known else SAVE_S
        self.watchdog.serve_until(lambda: self._present() <= self._saved, limit_s)
        self._leave(status)

    def _request(self) -> None:
        """Request to report; if another rank reports, serve it while it ends the job, and continue if it fails to."""
        channel, leader = self.watchdog.channel, self.leader
        if channel.rank == leader:
            self._on_request(leader, {})
        else:
            channel.send(leader, {"kind": "request"})
        self.watchdog.serve_until(lambda: bool(self._granted), GRANT_S)
        if self._granted == [False]:
            self.watchdog.serve_until(lambda: False, SILENT_S)

    def _leave(self, status: int) -> None:
        record_first_end(status, "", os.environ)  # no sentence: the end is already reported
        self._end_job(status)

    @property
    def leader(self) -> int:
        return min({self.watchdog.channel.rank, *self._present()})

    def _present(self) -> set[int]:
        channel = self.watchdog.channel
        absent = self.lost | self.watchdog.silent | {channel.rank, *self.dead()}
        return set(range(channel.size)) - absent

    def _report(self, text: str, summary: str) -> None:
        if text:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
        self._save(summary)

    def _save(self, summary: str) -> None:
        with self._lock:
            saves, self.saves = self.saves, []
        for save in saves:
            try:
                save(summary)
            except Exception as error:  # noqa: BLE001  the job is ending: one broken recorder must not stop it
                sys.stderr.write(f"spawnsim: could not save at the end: {error!r}\n")

    def _on_request(self, sender: int, _message: dict[str, Any]) -> None:
        first = self._reporter in (-1, sender)
        self._reporter = sender if first else self._reporter
        if sender == self.watchdog.channel.rank:
            self._granted.append(first)
        else:
            self.watchdog.channel.send(sender, {"kind": "grant", "granted": first})

    def _on_grant(self, _sender: int, message: dict[str, Any]) -> None:
        self._granted.append(message["granted"])

    def _on_save(self, sender: int, message: dict[str, Any]) -> None:
        self.remote = True
        self._save(message["summary"])
        self.watchdog.channel.send(sender, {"kind": "saved"})

    def _on_saved(self, sender: int, _message: dict[str, Any]) -> None:
        self._saved.add(sender)


def _hear_no_children() -> None:
    """Reset SIGCHLD: torch's loaders raise at the end of each worker, even while the first such error is reported."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _is_end_known() -> bool:
    return first_end(os.environ) is not None


def refuse_recovery(why: str) -> NoReturn:
    """Refuse `recover()` in a job that cannot survive deaths: re-raise the handled `WorldError` with a note, if any."""
    failed = sys.exc_info()[1]
    if not isinstance(failed, WorldError):
        raise UnsupportedError(why)
    failed.add_note(why)
    raise failed


SIGNALS = (signal.SIGINT, signal.SIGTERM)
STARTED = "SPAWNSIM_STARTED"
"""Set by `launch`: the process that started the job reports that it was stopped, so its ranks need not."""


@contextmanager
def stoppable(abort: AbortProtocol) -> Iterator[None]:
    """While the block runs, a stop signal ends the whole job. Outside of the main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, _ignore) for number in SIGNALS}

    def act(number: int) -> None:
        if number in SIGNALS and signal.getsignal(number) is _ignore:
            _stop(number, abort)

    def undo() -> None:
        for number, handler in former.items():
            if signal.getsignal(number) is _ignore:
                signal.signal(number, handler)

    with heard(act, undo):
        yield


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing in the program's thread: the thread that reads the signal acts on it."""


def _stop(number: int, abort: AbortProtocol) -> None:
    rank, name = abort.watchdog.channel.rank, signal.Signals(number).name
    everyone = "SLURM_STEP_ID" in os.environ  # Slurm sends the signal to all ranks: rank 0 reports it
    known = STARTED in os.environ or (everyone and rank > 0)
    cause = f"rank {rank} was asked to stop ({name})"
    if STARTED in os.environ and not abort.remote:  # our launcher reports it, unless it got the signal itself
        record_first_end(128 + number, cause, os.environ)
    text = "" if known or abort.remote else f"spawnsim: {cause}; the job ends"
    abort.end(text, summary=outcome_of_signal(number), status=128 + number)
