"""The program that a contract job starts on each real rank: `python -m spawnsim.testing.worker BACKEND FOLDER`.

Finds a backend's namespace and communicator. Libraries are loaded by name, here and now.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.testing.cases import cases_by_id, run_together
from spawnsim.testing.runners import REAL_BACKENDS, WRAPPED


def open_backend(backend: str) -> tuple[Any, Any]:
    """Return (namespace, communicator of all ranks) of a real backend.

    Beside "mpi", "real" and "torch", "module:function" names a function of yours that returns both.
    """
    if ":" in backend:
        module, _, function = backend.partition(":")
        found: tuple[Any, Any] = getattr(importlib.import_module(module), function)()
        return found
    if backend not in REAL_BACKENDS:
        raise ParameterError(
            f"backend {backend!r}: choose one of {', '.join(REAL_BACKENDS)} or module:function"
        )
    # The bare library: a case that fails on it is wrong itself, whatever spawnsim does.
    if backend == "mpi":
        mpi = importlib.import_module("mpi4py.MPI")
        return mpi, mpi.COMM_WORLD
    package = WRAPPED[backend].load()
    comm = package.world()
    return package.namespace(comm), comm


def main(backend: str, folder: Path) -> None:
    """Run the cases that the folder names, with a log per rank."""
    mpi, comm = open_backend(backend)
    cases = cases_by_id(json.loads((folder / "cases.json").read_text(encoding="utf-8")))
    for _ in run_together(mpi, comm, cases, folder / f"{comm.Get_rank()}.jsonl"):
        pass


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
