"""`PYTHONPATH=tests python -m contract --backend virtual -n 4`: hold a communicator to the contract."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from contract.cases import FAILED, PASSED, cases_by_id, find_cases, run_together
from contract.runners import BACKENDS, REAL_BACKENDS, WRAPPED, run_contract
from spawnsim.errors import ParameterError, SpawnsimError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m contract", description="Hold a communicator to the contract.")
    known = f"{', '.join(BACKENDS)}, or module:function of yours"
    parser.add_argument("--backend", default="virtual", help=known)
    parser.add_argument("-n", "--ranks", type=int, default=4, metavar="N")
    parser.add_argument("-k", "--match", metavar="WORDS", help="run cases whose id holds one of these words")
    parser.add_argument("-v", "--verbose", action="store_true", help="print also the cases that pass")
    parser.add_argument(
        "--list", action="store_true", help="print the cases and what they claim, and run none"
    )
    parser.add_argument(
        "--member", type=Path, help=argparse.SUPPRESS
    )  # a real rank, and the folder of its job
    return parser


def open_backend(backend: str) -> tuple[Any, Any]:
    """Return (namespace, communicator of all ranks) of a real backend, whose library is loaded here and now."""
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


def run_member(backend: str, folder: Path) -> None:
    """Run the cases that the folder of a job names on this rank, with a log of its own."""
    mpi, comm = open_backend(backend)
    cases = cases_by_id(json.loads((folder / "cases.json").read_text(encoding="utf-8")))
    for _ in run_together(mpi, comm, cases, folder / f"{comm.Get_rank()}.jsonl"):
        pass


def main(arguments: list[str] | None = None) -> int:
    """Run the contract and return 0 when no case failed."""
    options = _parser().parse_args(arguments)
    if options.member is not None:
        run_member(options.backend, options.member)
        return 0
    if options.list:
        for case in find_cases(options.ranks, options.match):
            print(f"{case.id}: {case.claim}")
        return 0
    began_s, counts = time.perf_counter(), Counter[str]()
    try:
        for outcome in run_contract(options.backend, options.ranks, options.match):
            counts[outcome.status] += 1
            if options.verbose or outcome.status != PASSED:
                said = "".join(f"\n    {line}" for line in outcome.text.splitlines())
                print(f"{outcome.status:8} {outcome.case}{said}", flush=True)
    except SpawnsimError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    total = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    took_s = time.perf_counter() - began_s
    print(f"{total or 'no case'} on {options.ranks} {options.backend} ranks in {took_s:.1f} s")
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
