"""The progress bar of a run: virtual seconds done, ranks finished, time left; of real ranks, how far rank 0 is.

How much there is to do is known only where `main` has a parameter `iterations` and records one row for each;
elsewhere the bar counts finished ranks.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

FORMAT = "{percentage:3.0f}%|{bar:30}| {desc} [{elapsed}<{remaining}]"
UNKNOWN = "{desc} [{elapsed}]"  # where it is not known how much there is to do
TICK_S = 0.3
Progress = Callable[[float, int, int], None]
"""Called now and then with virtual seconds, ranks that have finished, and ranks."""


def listener(
    progress: bool | Progress, recorder: Recorded, ranks: int, iterations: Any = None
) -> AbstractContextManager[Progress | None]:
    """Return a block that gives what is told of a run's progress: a bar (True), the caller's function, or None."""
    return (
        Bar(recorder, ranks=ranks, iterations=iterations)
        if progress is True
        else nullcontext(progress or None)
    )


def beside_the_bar() -> AbstractContextManager[Any]:
    """Return a block in which text may be printed on standard error: a bar that stands there is redrawn below it."""
    # Looked up, not imported: where no bar was made there is none to step aside for, and loading tqdm takes time.
    tqdm: Any = sys.modules.get("tqdm")
    return nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stderr)


class _NoCollection:
    """Keeps Python's collector from beginning in a thread beside the run's; for several threads at once.

    It would run finalizers of ranks there, which live in another.
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


class Recorded(Protocol):
    """What is looked at: a recorder, or a rank's journal."""

    @property
    def rows(self) -> int:
        """Rows so far."""

    @property
    def time_s(self) -> float:
        """The time of the latest row."""


class Bar:
    """A bar on standard error, gone when the block ends. A thread of its own looks at the recorder."""

    def __init__(self, recorder: Recorded, *, ranks: int, iterations: Any = None) -> None:
        self._recorder, self._ranks, self._finished = recorder, ranks, 0
        # A count of rows alone would promise an end that a program with other iterations never reaches.
        self._rows = ranks * iterations if isinstance(iterations, int) and iterations > 0 else None
        self._virtual_s = 0.0
        self._over = threading.Event()

    def __enter__(self) -> Progress:
        from tqdm import tqdm

        self._bar = tqdm(total=self._rows or self._ranks, bar_format=FORMAT, leave=False, dynamic_ncols=True)
        # A daemon: a process that ends amid the block must not wait for the bar.
        self._thread = threading.Thread(target=self._watch, name="spawnsim-bar", daemon=True)
        self._thread.start()
        return self.tell

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        # Joined before the bar is closed, or a last look would draw it again.
        self._thread.join()
        self._bar.close()

    def tell(self, virtual_s: float, finished: int, _ranks: int) -> None:
        """Hear how far the run is; costs nothing until the next look."""
        # Called from the engine's loop, so it draws nothing: the thread does, a few times a second.
        self._virtual_s, self._finished = virtual_s, finished

    def look(self) -> None:
        """Show how far the run is."""
        done = self._recorder.rows if self._rows else self._finished
        # The engine tells seldom; a row may be later than what it has told.
        virtual_s = max(self._virtual_s, self._recorder.time_s)
        text = f"{virtual_s:.4g} virtual s, {self._finished}/{self._ranks} ranks done"
        self._bar.set_description_str(text, refresh=False)
        # Programs may record more rows than one for each iteration.
        self._bar.n = min(done, self._bar.total)
        self._bar.refresh()

    def _watch(self) -> None:
        while not self._over.wait(TICK_S):
            with no_collection:
                self.look()


class Steps(Bar):
    """The bar of one real rank: rows that it has recorded, and the time of the latest. `shown=False`: no bar."""

    def __init__(self, recorder: Recorded, iterations: Any, *, shown: bool) -> None:
        super().__init__(recorder, ranks=1, iterations=iterations)
        self._shown = shown

    def __enter__(self) -> Progress:
        return super().__enter__() if self._shown else self.tell

    def __exit__(self, *error: object) -> None:
        if self._shown:
            super().__exit__(*error)

    def look(self) -> None:
        """Show how far the rank is."""
        text = f"rank 0: {self._recorder.rows:,} rows, {self._recorder.time_s:.4g} s"
        self._bar.set_description_str(text, refresh=False)
        if self._rows is None:
            self._bar.bar_format = UNKNOWN
        else:
            self._bar.n = min(self._recorder.rows, self._rows)
        self._bar.refresh()
