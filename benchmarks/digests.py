"""A seed's run is the same to the bit: random programs in processes with different hash seeds.

    PYTHONPATH=.:tests python benchmarks/digests.py --runs 2000
    PYTHONPATH=.:tests python benchmarks/digests.py --runs 500 --without-torch --python ~/3.12/bin/python

Each process runs all programs and prints a digest for each: random messages, windows and locks on several networks
(tests/support/random_programs.py); random calls and policies under drawn faults (tests/support/random_faults.py);
every policy in the loop from docs/policies.md, under drawn faults. With --python (repeatable) other interpreters take
part; an interpreter without torch gets programs that do not need it.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

HASHES = ("1", "4242")
SHARES = {"messages": 0.7, "calls": 0.1, "faults": 0.1, "policies": 0.1}  # of all programs


def programs(runs: int, *, torch: bool) -> Iterator[tuple[str, int]]:
    """Yield the kind and the number of each program."""
    for kind, share in SHARES.items():
        if torch or kind == "messages":
            yield from ((kind, number) for number in range(round(runs * (share if torch else 1.0))))


def digest(kind: str, number: int) -> str:
    """Return the digest of one program's run, or the error that ended it."""
    if kind == "messages":
        from support.random_programs import MIXTURES, communicators, on_virtual_ranks, random_programs, shape

        mixture = [*MIXTURES.values()][number % len(MIXTURES)]
        seed, size, steps = shape(number)
        logs, totals = on_virtual_ranks(
            random_programs(seed, size, steps, mixture), mixture, communicators(size, mixture.comms)
        )
        return f"{totals.digest if totals is not None else 'deadlock'} {logs}"
    if kind == "policies":
        return _of_a_policy(number)
    from support.random_faults import KINDS

    kinds = ["collectives"] if kind == "calls" else [name for name in KINDS if name != "liveness"]
    return KINDS[kinds[number % len(kinds)]](number).carry_out()


def _of_a_policy(number: int) -> str:
    from support.random_policies import EVERY

    from spawnsim.fuzzing.campaign import Target, attempt
    from spawnsim.fuzzing.cases import DEFAULT_FAULTS, SURVIVED, Calm, Space

    parameters = {"policy": [*EVERY][number % len(EVERY)], "iterations": 8}
    space = Space(ranks=[3, 5, 8], faults=DEFAULT_FAULTS + SURVIVED, parameters=parameters, survive=True)
    program = Path(__file__).parents[1] / "tests" / "programs" / "fuzzed_policies.py"
    failure, watch, _ = attempt(
        Target(program), space.case(number, lambda ranks: Calm(0.1, 0.01, waits=True))
    )
    assert watch.world is not None
    return f"{watch.world.digest()} {watch.struck} {failure}"


def child(runs: int, *, torch: bool) -> None:
    """Print the digest of every program."""
    import hashlib

    logging.disable(logging.CRITICAL)
    for kind, number in programs(runs, torch=torch):
        value = hashlib.blake2b(digest(kind, number).encode(), digest_size=16).hexdigest()
        print(f"{kind}-{number} {value}", flush=True)


def main() -> int:
    """Run the processes and compare their digests; return 1 if any differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--python", action="append", default=[], help="another interpreter; repeatable")
    parser.add_argument("--without-torch", action="store_true", help="programs that need none alone")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.runs, torch=not options.without_torch)
        return 0
    found: list[dict[str, str]] = []
    for python, hash_ in [
        *((sys.executable, each) for each in HASHES),
        *((each, "7") for each in options.python),
    ]:
        command = [python, __file__, "--child", "--runs", str(options.runs)]
        command += ["--without-torch"] * options.without_torch
        done = subprocess.run(
            command, env=os.environ | {"PYTHONHASHSEED": hash_}, stdout=subprocess.PIPE, text=True, check=True
        )
        found.append(dict(line.split() for line in done.stdout.splitlines() if line.count(" ") == 1))
        print(f"{python}, PYTHONHASHSEED={hash_}: {len(found[-1]):,} programs", flush=True)
    differ = [name for name in found[0] if len({each.get(name) for each in found}) > 1]
    kinds = Counter(name.partition("-")[0] for name in found[0])
    print(
        f"{len(found[0]):,} programs ({dict(kinds)}) in {len(found)} processes: {len(differ)} differ {differ[:8]}"
    )
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
