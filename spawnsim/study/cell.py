"""One run of a study as a value: which file, how many ranks, which parameters, seed and world; and its key.

This room knows names and digests; it runs nothing. Equal keys mean equal results, so a key covers the program's
text, the library's text (the floors that can change a result) and the versions of the packages below it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from spawnsim.errors import ParameterError
from spawnsim.record.manifest import file_digest, versions

Scalar = str | int | float | bool | None
FLOORS_THAT_COUNT = (
    "comm", "policies", "workloads", "real", "virtual", "record", "run", "run.py", "random.py", "units.py",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    Attributes:
        file: the program, a Python file with `main(comm, ...)`.
        ranks: how many ranks.
        seed: the run's seed.
        backend: "virtual", "mpi" or "torch".
        parameters: keyword arguments of `main`.
        world: keyword arguments of `spawnsim.run`: platform, stragglers, faults …
    """

    file: Path
    ranks: int
    seed: int = 0
    backend: Literal["virtual", "mpi", "torch"] = "virtual"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not Path(self.file).is_file():
            raise ParameterError(f"the study asks for {self.file}, which is no file")
        if self.ranks < 1:
            raise ParameterError(f"ranks={self.ranks}: give at least 1")

    def description(self) -> dict[str, Any]:
        """Return what distinguishes this run, without paths of this machine."""
        return {
            "file": Path(self.file).name,
            "backend": self.backend,
            "ranks": self.ranks,
            "seed": self.seed,
            "parameters": dict(sorted(self.parameters.items())),
            "world": dict(sorted(self.world.items())),
        }

    @cached_property  # and so the same in every process that this cell is sent to, whatever is edited meanwhile
    def key(self) -> str:
        """The digest of the description, the program's text, the library's text and the versions."""
        texts = {"program": file_digest(Path(self.file)), "library": _library(), "versions": versions()}
        text = json.dumps(self.description() | texts, sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def name(self) -> str:
        """A short name for people: file, policy, ranks, backend, seed; the key tells the rest."""
        values = [str(self.parameters[name]) for name in ("policy",) if name in self.parameters]
        where = [] if self.backend == "virtual" else [self.backend]
        return "-".join([Path(self.file).stem, *values, f"n{self.ranks}", *where, f"s{self.seed}"])


@cache
def _library() -> str:
    """Return a digest of the source files that can change a result: 3 ms, once per process."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_sources(root)):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for name in FLOORS_THAT_COUNT:
        place = root / name
        yield from [place] if place.is_file() else place.rglob("*.py")


def grid(
    file: Path,
    *,
    ranks: Sequence[int],
    seeds: Iterable[int],
    over: Mapping[str, Sequence[Scalar]],
    **world: Any,
) -> list[Cell]:
    """Return one cell per combination of `over`'s values, numbers of ranks and seeds, in that order."""
    combinations = [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]
    return [
        Cell(file=file, ranks=size, seed=seed, parameters=parameters, world=world)
        for parameters, size, seed in itertools.product(combinations, ranks, list(seeds))
    ]
