"""A run that is watched: `spawnsim watch` in a process of its own reads the run folder while the run writes it.

The run does nothing for it but say, once a second, what its ranks do: so neither results nor digest can differ, and a
page that draws slowly or a logger that waits for its disk keeps no rank waiting. What there is to watch with is in
one table, `OBSERVERS`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.options import nearest
from spawnsim.run.progress_bar import no_collection

if TYPE_CHECKING:
    import subprocess

LOOK_S = 1.0  # how often the states of ranks are written
SHARE = 0.01  # of a core, at most, that looking at them takes
PATIENCE_S = 60.0  # for the observers to write what is left, at the end


class Observer(NamedTuple):
    """What can watch a run: the package that it needs, the extra that brings it, and where its files go."""

    package: str
    extra: str
    what: str


OBSERVERS = {
    "live": Observer("jinja2", "report", "a page on 127.0.0.1, for a browser"),
    "tensorboard": Observer("tensorboard", "tensorboard", "RUN/tensorboard"),
    "wandb": Observer(
        "wandb", "wandb", "Weights & Biases, offline unless WANDB_MODE says otherwise: RUN/wandb"
    ),
    "mlflow": Observer("mlflow", "mlflow", "RUN/mlflow.db, or what MLFLOW_TRACKING_URI names"),
    "aim": Observer("aim", "aim", "RUN/.aim"),
}


def require_observers(names: Sequence[str], out: object) -> None:
    """Raise an error, before anything runs, if a run cannot be watched with these observers.

    Raises:
        ParameterError: an observer has another name, or the run has no folder that it could read.
        UnsupportedError: the package that it needs is not installed.
    """
    for name in names:
        known = OBSERVERS.get(name)
        if known is None:
            hint = nearest(name, OBSERVERS) or f"there are: {', '.join(OBSERVERS)}"
            raise ParameterError(f"observe={name!r}: no such observer; {hint}")
        if find_spec(known.package) is None:
            raise UnsupportedError(
                f"observe={name!r} needs {known.package}: pip install 'spawnsim[{known.extra}]'"
            )
    if names and out is None:
        raise ParameterError("a run is watched through its run folder: give one (--out DIR)")


@contextmanager
def watched(out: Path | None, names: Sequence[str], *more: str) -> Iterator[None]:
    """While the block runs, let another process watch a run folder; when it ends, the run has.

    Args:
        out: the run folder, or None where nobody watches.
        names: the observers.
        more: further arguments of `spawnsim watch`.
    """
    if out is None or not names:
        yield
        return
    import subprocess  # here, since every rank of a job imports this file

    chosen = [part for name in names for part in ("--observe", name)]
    line = [sys.executable, "-m", "spawnsim", "watch", str(out), "--until-closed", *chosen, *more]
    # In a session of its own: Ctrl-C is for the run, and whoever watches sees how it ends. If this process is killed,
    # the pipe is closed for it.
    watching = subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        _end(watching)


def _end(watching: subprocess.Popen[bytes]) -> None:
    import subprocess

    assert watching.stdin is not None
    watching.stdin.close()
    try:
        watching.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        watching.kill()
        watching.wait()
        sys.stderr.write(f"spawnsim: warning: the observers had not ended after {PATIENCE_S:.0f} s\n")


class Looking:
    """A block in which a thread writes what virtual ranks do, from when it is given their world.

    Args:
        out: the run folder; None: nothing is written.
        flush: writes what the ranks have recorded; without it nothing is seen of ranks that record seldom.
    """

    def __init__(self, out: Path | None, flush: Callable[[], None]) -> None:
        self._out, self._flush, self._over = out, flush, threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Callable[[Any], None] | None:
        return None if self._out is None else self.begin

    def begin(self, world: Any) -> None:
        """Begin to look, at a world whose ranks are about to begin."""
        self._thread = threading.Thread(target=self._look, args=(world,), name="spawnsim-states", daemon=True)
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _look(self, world: Any) -> None:
        from spawnsim.record.journal import RankStates, write_states
        from spawnsim.virtual.engine.diagnosis import doing

        assert self._out is not None
        wait_s = LOOK_S
        while not self._over.wait(wait_s):
            begin_s = time.thread_time()
            # The ranks go on meanwhile, so what is described may be gone: then the next look has it.
            with no_collection, suppress(Exception):
                write_states(self._out, RankStates(world.kernel.env.now, doing(world)))
                self._flush()
            wait_s = max(LOOK_S, (time.thread_time() - begin_s) / SHARE)
