"""One thread for numeric libraries: virtual ranks compute one after another, and sums depend on how they are split.

So the same seed gives the same digest on machines of 2 and of 64 cores. Whoever sets OMP_NUM_THREADS is obeyed, and
run.json says how many threads there were. This room knows the environment and torch, if that is loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TOLD = "OMP_NUM_THREADS"
VARIABLES = (TOLD, "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def use_one_thread() -> None:
    """Let libraries that are not loaded yet use one thread, unless the user has told them otherwise."""
    if TOLD not in os.environ:
        os.environ.update(dict.fromkeys(VARIABLES, "1"))


@contextmanager
def one_thread() -> Iterator[None]:
    """While the block runs, torch uses one thread, loaded or not, unless the user has told it otherwise."""
    if TOLD in os.environ:
        yield
        return
    torch: Any = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    os.environ[TOLD] = "1"
    try:
        if torch is not None:
            torch.set_num_threads(1)
        yield
    finally:
        del os.environ[TOLD]
        if torch is not None:
            torch.set_num_threads(before)
