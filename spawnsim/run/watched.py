"""How a run is watched while it runs: a progress bar, and observers.

The bar shows virtual seconds done, ranks finished, and time left; for real ranks, the progress of rank 0. The total
is known only if `main` has a parameter `iterations` and records one row for each iteration; otherwise the bar counts
finished ranks.

`spawnsim watch` serves observers (`OBSERVERS`): a separate process reads the run folder while the run writes it. The
run only writes its ranks' states once a second. Observers therefore change neither results nor digest, and no rank
waits for a slow page or for a logger's disk.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.options import nearest

STATES_S = 1.0  # interval between writes of the ranks' states
SHARE = 0.01  # of a core, at most, that describing the states takes
PATIENCE_S = 60.0  # for the observers to write remaining data, at the end
PIPE = (
    "SPAWNSIM_WATCHED"  # set once a run has started `spawnsim watch`: the registry of its real ranks, or ""
)


class Observer(NamedTuple):
    """An observer: the package that it needs, the extra that installs it, and where its files go."""

    package: str
    extra: str
    what: str


OBSERVERS = {
    "live": Observer("jinja2", "report", "a page on 127.0.0.1, for a browser"),
    "tensorboard": Observer("tensorboard", "tensorboard", "RUN/tensorboard"),
    "wandb": Observer(
        "wandb", "wandb", "Weights & Biases, offline unless WANDB_MODE says otherwise: RUN/wandb"
    ),
}


def require_observers(names: Sequence[str], out: object) -> None:
    """Raise an error, before anything runs, if these observers cannot watch the run."""
    for name in names:
        known = OBSERVERS.get(name)
        if known is None:
            hint = nearest(name, OBSERVERS) or f"the observers are: {', '.join(OBSERVERS)}"
            raise ParameterError(f"observe={name!r}: no such observer; {hint}")
        if find_spec(known.package) is None:
            raise UnsupportedError(
                f"observe={name!r} needs {known.package}: pip install 'spawnsim[{known.extra}]'"
            )
    if names and out is None:
        raise ParameterError("an observer reads the run folder: give one (--out DIR)")


@contextmanager
def watched(out: Path | None, names: Sequence[str], registry: str = "") -> Iterator[None]:
    """Let another process watch a run folder while the block runs; the end of the block is the end of the run.

    `registry`: where the launcher of real ranks keeps their progress.
    """
    if out is None or not names:
        yield
        return
    import subprocess  # here, since every rank of a job imports this file

    chosen = [part for name in names for part in ("--observe", name)]
    line = [sys.executable, "-m", "spawnsim", "watch", str(out), *chosen]
    # In its own session: Ctrl-C is for the run, and the observers see how it ends. If this process is killed, the
    # system closes the pipe.
    watching = subprocess.Popen(
        line, stdin=subprocess.PIPE, start_new_session=True, env=os.environ | {PIPE: registry}
    )
    try:
        yield
    finally:
        assert watching.stdin is not None
        watching.stdin.close()
        try:
            watching.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            watching.kill()
            watching.wait()
            sys.stderr.write(f"spawnsim: warning: the observers were still active after {PATIENCE_S:.0f} s\n")


class _NoCollection:
    """Keeps Python's collector from starting in a thread parallel to the run's; several threads may use it at once.

    A collection there would run finalizers of ranks, which belong to another thread.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._before:
                gc.enable()


no_collection = _NoCollection()


class StateWriter:
    """A block in which a thread writes the states of virtual ranks, from the moment when it receives their world.

    Args:
        out: the run folder; None: nothing is written.
        flush: writes what the ranks have recorded; without it, rows of ranks that record seldom stay invisible.
    """

    def __init__(self, out: Path | None, flush: Callable[[], None]) -> None:
        self._out, self._flush, self._over = out, flush, threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Callable[[Any], None] | None:
        return None if self._out is None else self.begin

    def begin(self, world: Any) -> None:
        """Begin to poll a world whose ranks are about to start."""
        self._thread = threading.Thread(
            target=self._write, args=(world,), name="spawnsim-states", daemon=True
        )
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _write(self, world: Any) -> None:
        from spawnsim.record.journal import RankStates, write_states
        from spawnsim.virtual.engine.diagnosis import doing

        assert self._out is not None
        wait_s = STATES_S
        while not self._over.wait(wait_s):
            begin_s = time.thread_time()
            # The ranks continue meanwhile, so an object may vanish during its description: the next poll writes the
            # state.
            with no_collection, suppress(Exception):
                write_states(self._out, RankStates(world.kernel.env.now, doing(world)))
                self._flush()
            wait_s = max(STATES_S, (time.thread_time() - begin_s) / SHARE)


# ------------------------------------------------------------------------------------------------- progress bar
FORMAT = "{percentage:3.0f}%|{bar:30}| {desc} [{elapsed}<{remaining}]"
UNKNOWN = "{desc} [{elapsed}]"  # if the total is unknown
TICK_S = 0.3
Progress = Callable[[float, int, int], None]
"""Called now and then with virtual seconds, ranks that have finished, and ranks."""


def listener(
    progress: bool | Progress, recorder: Recorded, ranks: int, iterations: Any = None
) -> AbstractContextManager[Progress | None]:
    """Return a block that gives the receiver of progress reports: a bar (True), the caller's function, or None."""
    return (
        Bar(recorder, ranks=ranks, iterations=iterations)
        if progress is True
        else nullcontext(progress or None)
    )


def above_bar() -> AbstractContextManager[Any]:
    """Return a block in which text may be printed on standard error: a visible bar is redrawn below it."""
    # Looked up, not imported: a bar exists only if tqdm is loaded, and loading tqdm takes time.
    tqdm: Any = sys.modules.get("tqdm")
    return nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)


class Recorded(Protocol):
    """The source of the bar's progress: a recorder, or a rank's journal."""

    @property
    def rows(self) -> int:
        """Rows so far."""

    @property
    def time_s(self) -> float:
        """The time of the latest row."""


class Bar:
    """A bar on standard error, removed when the block ends. Its own thread polls the recorder.

    `ranks` None: the bar of one real rank, whose recorder holds all the progress.
    """

    def __init__(self, recorder: Recorded, *, ranks: int | None, iterations: Any = None) -> None:
        self._recorder, self._ranks, self._finished = recorder, ranks, 0
        # A count of rows alone would promise an end that a program with other iterations never reaches.
        self._rows = (ranks or 1) * iterations if isinstance(iterations, int) and iterations > 0 else None
        self._virtual_s = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        total = self._rows or self._ranks
        shown = FORMAT if total else UNKNOWN
        self._bar = tqdm(total=total, bar_format=shown, leave=False, dynamic_ncols=True)
        # A daemon: a process that exits within the block must not wait for the bar.
        self._thread = threading.Thread(target=self._watch, name="spawnsim-bar", daemon=True)
        self._thread.start()
        return self.report

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        # Joined before the bar is closed: a last poll would draw it again.
        self._thread.join()
        self._bar.close()

    def report(self, virtual_s: float, finished: int, _ranks: int) -> None:
        """Store how far the run is; costs nothing until the next poll."""
        # Called from the engine's loop, so it draws nothing: the thread does, a few times a second.
        self._virtual_s, self._finished = virtual_s, finished

    def draw(self) -> None:
        """Show how far the run is."""
        done = self._recorder.rows if self._rows else self._finished
        if self._ranks is None:
            text = f"rank 0: {self._recorder.rows:,} rows, {self._recorder.time_s:.4g} s"
        else:
            # The engine reports seldom; a row may be later than its last report.
            virtual_s = max(self._virtual_s, self._recorder.time_s)
            text = f"{virtual_s:.4g} virtual s, {self._finished}/{self._ranks} ranks done"
        self._bar.set_description_str(text, refresh=False)
        # Programs may record more rows than one for each iteration.
        self._bar.n = min(done, self._bar.total or 0)
        self._bar.refresh()

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            with no_collection:
                self.draw()
