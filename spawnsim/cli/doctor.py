"""`spawnsim doctor`: what this machine can run, and what to change.

This room asks other rooms and prints; it starts no rank.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from spawnsim.errors import SpawnsimError

Line = tuple[str, str]


def main(argv: Sequence[str]) -> int:
    """Print what was found, one line each."""
    parser = argparse.ArgumentParser(prog="spawnsim doctor", description="Say what this machine can run.")
    parser.parse_args(argv)
    print("\n".join(f"{name:12} {text}" for name, text in findings()))
    return 0


def findings() -> Iterator[Line]:
    """Yield what was found, as (topic, text)."""
    yield "versions", _versions()
    yield "cores", _cores()
    yield "started by", _start()
    yield "MPI", _mpi()


def _versions() -> str:
    from spawnsim.record.manifest import versions

    return ", ".join(f"{name} {version}" for name, version in versions().items())


def _cores() -> str:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    advice = "; others are busy here: real times will be noisy" if load > 0.5 * cores else ""
    return f"{cores}, load {load:.1f}{advice}"


def _start() -> str:
    from spawnsim.real.launch import recognise

    here = recognise()
    return f"{here.launcher}: rank {here.rank} of {here.size} ({here.evidence})"


def _mpi() -> str:
    from spawnsim.real.launch import find_library

    try:
        library = find_library()
    except SpawnsimError as error:
        return str(error)
    return f"{library.name} ({library.origin}), started with {library.mpiexec}"
