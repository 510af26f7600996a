"""One rank of a contract run: it runs cases together with the others, and agrees with them on how each ended.

This room knows a communicator's `Dup` and `allgather` beside the cases. It writes what happens to a log of its own at
once, so that whoever watches sees a failure even when the other ranks wait for ever.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from spawnsim.errors import UnsupportedError
from spawnsim.testing.cases import ABSENT, FAILED, PASSED, SKIPPED, Case, Outcome
from spawnsim.testing.claims import Skipped

_RANKING = (FAILED, ABSENT, SKIPPED, PASSED)


def judge(case: Case, MPI: Any, comm: Any) -> tuple[str, str]:  # mpi4py's name
    """Run a case on this rank; return its status and, if it did not pass, why."""
    try:
        case.test(MPI, comm)
    except Skipped as reason:
        return SKIPPED, str(reason)
    except UnsupportedError as reason:
        return ABSENT, str(reason)
    except Exception:  # noqa: BLE001  # whatever a case raises is its result
        return FAILED, traceback.format_exc(limit=-4)
    return PASSED, ""


def merged(case: str, verdicts: list[tuple[str, str]]) -> Outcome:
    """Return the outcome of a case from the verdicts of all ranks: the worst one, with what its ranks said."""
    worst = min((status for status, _ in verdicts), key=_RANKING.index)
    said: dict[str, list[str]] = {}
    for rank, (status, text) in enumerate(verdicts):
        if status == worst and text:
            said.setdefault(text, []).append(str(rank))
    return Outcome(case, worst, "\n".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items()))


def run_together(MPI: Any, comm: Any, cases: Iterable[Case], log: Path | None = None) -> Iterator[Outcome]:
    """Run cases on all ranks of a communicator, each on a duplicate of it, and yield the outcomes that all agree on.

    A rank that fails goes to the agreement at once; if others wait for it inside the case, the run stands still:
    let `spawnsim.testing.run_real` watch it, which starts a new job behind the case.
    """
    notes = Notes(log)
    for case in cases:
        notes.write(case=case.id)
        own = comm.Dup()
        verdict = judge(case, MPI, own)
        notes.write(case=case.id, status=verdict[0], text=verdict[1])
        own.Free()
        outcome = merged(case.id, comm.allgather(verdict))
        notes.write(case=case.id, agreed=outcome.status, text=outcome.text)
        yield outcome


class Notes:
    """A log of JSON lines, or none."""

    def __init__(self, path: Path | None) -> None:
        self._file = path.open("w", encoding="utf-8") if path is not None else None

    def write(self, **fields: Any) -> None:
        """Add a line that survives this process."""
        if self._file is not None:
            self._file.write(json.dumps({"time_s": time.time(), **fields}) + "\n")
            self._file.flush()
