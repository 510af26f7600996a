"""Changes to modules of Python that last as long as any run does: of several runs at once, or one inside another, the
first makes them and the last takes them back.

This room knows attributes. What stands in their place tells virtual ranks from other callers itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Put = Callable[[Any, str, Any], None]  # put(owner, name, value), until the end


class Patches:
    """A set of changes: `install(put)` makes them."""

    def __init__(self, install: Callable[[Put], None]) -> None:
        self._install, self._lock, self._runs, self._undo = install, threading.Lock(), 0, ExitStack()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Keep the changes while the block runs."""
        with self._lock:
            self._runs += 1
            if self._runs == 1:
                self._install(self._put)
        try:
            yield
        finally:
            with self._lock:
                self._runs -= 1
                if not self._runs:
                    self._undo.close()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)  # a class method as it is
        self._undo.callback(setattr, owner, name, before)
        setattr(owner, name, value)
