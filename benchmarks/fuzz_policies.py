"""Every policy under drawn faults: the number of cases, the failures, and the kinds of faults that occurred.

    PYTHONPATH=.:tests python benchmarks/fuzz_policies.py --seconds 20 --out cases.json

The program is tests/programs/fuzzed_policies.py, the loop from docs/policies.md: it continues when ranks die and
calls meet deadlines. With --out, counts are added to the file's counts, and the next call continues with the next
seeds: a long campaign can run in short parts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

from support.random_policies import EVERY

from spawnsim.fuzzing.campaign import Target, campaign
from spawnsim.fuzzing.cases import Space
from spawnsim.units import text_table

PROGRAM = Path(__file__).parents[1] / "tests" / "programs" / "fuzzed_policies.py"
FAULTS = "crash; restart; pause; slow; down; delay; partition; drop; duplicate; clog; reorder; skew"
RANKS = (2, 3, 5, 8, 12, 16)


def hunt(policy: str, first: int, options: argparse.Namespace) -> tuple[Counter[str], list[str]]:
    """Return a policy's counts, and the command that replays each failure."""
    space = Space(
        ranks=[int(word) for word in options.ranks.split(",")], faults=options.faults, survive=True,
        parameters={"policy": policy, "iterations": options.iterations},
    )  # fmt: skip
    began_s = time.process_time()
    found = campaign(Target(PROGRAM), space, range(first, first + options.runs), seconds=options.seconds)
    reports = []
    for key, failure in found.failures.items():
        small = found.small.get(key, failure)
        reports.append(
            f"{policy}: {found.counts[key]} × {small.message[:600]}\n  {small.case.command(str(PROGRAM))}"
        )
    counts = Counter({"cases": found.runs, "broken": sum(found.counts.values())})
    counts |= Counter({f"struck {kind}": times for kind, times in found.kinds().items()})
    counts["processor_ms"] = round(1000 * (time.process_time() - began_s))
    return counts, reports


def main() -> None:
    """Hunt through all policies, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="on the wall, for each policy")
    parser.add_argument("--runs", type=int, default=10_000, help="cases at most, for each policy")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--faults", default=FAULTS)
    parser.add_argument("--policy", action="append", choices=EVERY)
    parser.add_argument("--out", type=Path, help="file of the counts, from which the next call continues")
    options = parser.parse_args()
    kept = json.loads(options.out.read_text()) if options.out and options.out.exists() else {}
    for policy in options.policy or EVERY:
        before = Counter(kept.get(policy, {}))
        counts, reports = hunt(policy, before["cases"], options)
        kept[policy] = before + counts
        print(
            "\n".join([f"{policy}: {counts['cases']} cases, {counts['broken']} broken", *reports]), flush=True
        )
        if options.out:
            options.out.write_text(json.dumps(kept))
    print(table(kept))


def table(kept: dict[str, dict[str, int]]) -> str:
    """Return the counts, one line per policy."""
    rows = []
    for policy, counts in kept.items():
        struck = {name.removeprefix("struck "): n for name, n in counts.items() if name.startswith("struck ")}
        rows.append(
            (policy, f"{counts['cases']:,}", f"{counts.get('broken', 0):,}", f"{len(struck)}",
             f"{sum(struck.values()):,}", f"{counts['processor_ms'] / max(counts['cases'], 1):.0f}")
        )  # fmt: skip
    total = [sum(each.get(name, 0) for each in kept.values()) for name in ("cases", "broken")]
    rows.append(("all", f"{total[0]:,}", f"{total[1]:,}", "", "", ""))
    return text_table(("policy", "cases", "broken", "kinds of fault", "times struck", "ms a case"), rows)


if __name__ == "__main__":
    main()
