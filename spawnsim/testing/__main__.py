"""`python -m spawnsim.testing --backend virtual -n 4`: hold a communicator to the contract."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from spawnsim.errors import SpawnsimError
from spawnsim.testing.cases import FAILED, PASSED, Outcome, find_cases
from spawnsim.testing.runners import BACKENDS, run_contract


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m spawnsim.testing", description="Hold a communicator to the contract."
    )
    known = f"{', '.join(BACKENDS)}, or module:function of yours"
    parser.add_argument("--backend", default="virtual", help=known)
    parser.add_argument("-n", "--ranks", type=int, default=4, metavar="N")
    parser.add_argument(
        "-k", "--match", metavar="WORDS", help="run the cases whose id holds one of these words"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="print every case, not only those that do not pass"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the cases and what they claim, and run none"
    )
    return parser


def _show(outcome: Outcome, verbose: bool) -> None:
    if verbose or outcome.status != PASSED:
        said = "".join(f"\n    {line}" for line in outcome.text.splitlines())
        sys.stdout.write(f"{outcome.status:8} {outcome.case}{said}\n")
        sys.stdout.flush()


def main(arguments: list[str] | None = None) -> int:
    """Run the contract and return 0 when no case failed."""
    options = _parser().parse_args(arguments)
    if options.list:
        for case in find_cases(options.ranks, options.match):
            sys.stdout.write(f"{case.id}: {case.claim}\n")
        return 0
    began_s, counts = time.perf_counter(), Counter[str]()
    try:
        for outcome in run_contract(options.backend, options.ranks, options.match):
            counts[outcome.status] += 1
            _show(outcome, options.verbose)
    except SpawnsimError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    total = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    took_s = time.perf_counter() - began_s
    sys.stdout.write(f"{total or 'no case'} on {options.ranks} {options.backend} ranks in {took_s:.1f} s\n")
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
