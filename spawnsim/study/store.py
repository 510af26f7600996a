"""One run of a study as a value with its key, and the store of finished runs: a folder per key.

Equal keys mean equal results, so a key covers the text of the program and of its own modules, of the platform, the
plan and the recorded run that its world names, of the library (without the packages that only look at results), and
the versions of the packages below it. What a program reads by itself it does not cover: give such a file's digest as
a parameter.

A folder that exists is done: a run is written into a draft beside its place and renamed at the end, which is atomic.
A study that was interrupted, or that two people run at once, never sees half a run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from spawnsim.backends import backend_of
from spawnsim.errors import ParameterError
from spawnsim.plots.experiments import shown
from spawnsim.record import manifest
from spawnsim.record.folder import read_manifest
from spawnsim.record.manifest import Files, file_digest
from spawnsim.record.recorder import document

Scalar = str | int | float | bool | None
FAILED, STOPPED = "failed", "stopped"  # why a run did not finish
ONLY_LOOK = {"plots", "report", "fidelity", "testing"}  # packages that change no result


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run.

    Attributes:
        file: the program, a Python file with `main(comm, ...)`.
        ranks: how many ranks.
        seed: the run's seed.
        backend: a name in the table of backends: "virtual", "mpi" or "torch".
        parameters: keyword arguments of `main`.
        world: keyword arguments of `spawnsim.run`: platform, stragglers, faults …
    """

    file: Path
    ranks: int
    seed: int = 0
    backend: str = "virtual"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    world: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # At once, where the study names the cell: in a process of the pool it would be a failed run.
        if not Path(self.file).is_file():
            raise ParameterError(f"the study asks for {self.file}, which is not a file")
        if self.ranks < 1:
            raise ParameterError(f"ranks={self.ranks}: give at least 1")
        backend_of(self.backend)

    def description(self) -> dict[str, Any]:
        """Return what distinguishes this run, without paths of this machine."""
        return {
            "file": Path(self.file).name,
            "backend": self.backend,
            "ranks": self.ranks,
            "seed": self.seed,
            # Sorted, so that the order in which a study writes its arguments makes no other key.
            "parameters": document(dict(sorted(self.parameters.items()))),
            # None is what `spawnsim.run` takes where nothing is given: one run, one key.
            "world": {name: _without_folder(v) for name, v in sorted(self.world.items()) if v is not None},
        }

    def inputs(self) -> Files:
        return manifest.inputs(Path(self.file), **self.world)

    @cached_property  # and so the same in every process that this cell is sent to, whatever is edited meanwhile
    def key(self) -> str:
        """The digest of the description, of all files that the run depends on, of the library and the versions."""
        texts = {
            "inputs": manifest.digests(self.inputs()),
            "library": _library(),
            "versions": manifest.versions(),
        }
        # JSON and not `hash` or pickle: those differ between processes and versions.
        text = json.dumps(self.description() | texts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def values(self) -> dict[str, Any]:
        """Return the description in one row: file, backend, ranks, parameters, circumstances, seed.

        Returns:
            Name → value. A parameter that is called as one of the others is "main's NAME".
        """
        told = self.description()
        seed, given, world = (told.pop(name) for name in ("seed", "parameters", "world"))
        taken = {*told, *world, "seed"}
        own = {f"main's {name}" if name in taken else name: value for name, value in given.items()}
        row: dict[str, Any] = told | own | world | {"seed": seed}
        return row

    @property
    def name(self) -> str:
        """A short name for people: file, policy, ranks, backend, seed; the key tells the rest."""
        values = [str(self.parameters["policy"])] if "policy" in self.parameters else []
        where = [] if self.backend == "virtual" else [self.backend]
        return "-".join([Path(self.file).stem, *values, f"n{self.ranks}", *where, f"s{self.seed}"])


def _without_folder(value: Any) -> Any:
    """Return a circumstance as it is the same on each machine; what a file says is told by its digest."""
    # The folder of a file differs between machines and checkouts, and changes no result.
    return Path(value).name if isinstance(value, (str, Path)) and os.path.exists(value) else document(value)


@cache
def _library() -> str:
    """Return a digest of the library's files that can change a result: 10 ms, once per process."""
    root = manifest.PACKAGE
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_sources(root)):
        # With the path: two files that swap their contents are another library.
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        # Presets of platforms are TOML files of the package, and change results as code does.
        if path.suffix in (".py", ".toml") and path.relative_to(root).parts[0] not in ONLY_LOOK:
            yield path


def labels(cells: Sequence[Cell]) -> dict[str, str]:
    """Return what sets each cell apart from the others, for people: "average, ratio 0.1, seed 3"."""
    rows = {cell.key: cell.values() for cell in cells}
    every = {name: None for row in rows.values() for name in row if name != "seed"} | {"seed": None}
    varied = [name for name in every if len({str(row.get(name)) for row in rows.values()}) > 1]
    return {
        cell.key: ", ".join(shown(name, rows[cell.key].get(name)) for name in varied) or cell.name
        for cell in cells
    }


def grid(
    file: str | Path,
    *,
    ranks: Sequence[int],
    seeds: Iterable[int],
    over: Mapping[str, Sequence[Scalar]] | None = None,
    around: Mapping[str, Sequence[Any]] | None = None,
    **world: Any,
) -> list[Cell]:
    """Return one cell per combination of values of `over` and `around`, numbers of ranks and seeds, in that order.

    Args:
        file: the program.
        ranks: the numbers of ranks.
        seeds: the seeds.
        over: keyword argument of `main` → its values.
        around: keyword argument of `spawnsim.run`, or "backend" → its values.
        world: keyword arguments of `spawnsim.run`, or `backend`, the same for all cells.

    Returns:
        The cells; seeds vary fastest.

    Raises:
        ParameterError: there is no such file, or a number of ranks below 1.
    """
    worlds = [{"backend": "virtual", **world, **each} for each in _combinations(around or {})]
    every = itertools.product(_combinations(over or {}), worlds, ranks, list(seeds))
    path, found = Path(file), []
    for given, outside, size, seed in every:
        rest = dict(outside)
        backend = rest.pop("backend")
        found.append(Cell(file=path, ranks=size, seed=seed, backend=backend, parameters=given, world=rest))
    return found


def _combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


COST = "cost.json"


@dataclass(frozen=True)
class Cost:
    """What a run took on this machine: wall seconds, peak memory of its process in bytes, load when it began."""

    wall_s: float
    peak_memory_B: int  # noqa: N815  (B is the unit)
    load: float


class Store:
    """Finished runs under `root`, by key."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, cell: Cell) -> Path:
        return self.root / f"{cell.name}-{cell.key}"

    def failed(self, cell: Cell) -> Path:
        return self.aside(self.folder(cell).name, FAILED)

    def aside(self, name: str, why: str) -> Path:
        """Return where a run stays that did not finish."""
        return self.root / f"{why}-{name}"

    def fail(self, cell: Cell) -> None:
        """Let a run that was told to stop be one that has failed, as where it has taken too long."""
        stopped = self.aside(self.folder(cell).name, STOPPED)
        if stopped.is_dir():
            shutil.rmtree(self.failed(cell), ignore_errors=True)
            stopped.rename(self.failed(cell))

    def tidy(self, *, aside: bool = False) -> None:
        """Remove drafts of this machine's processes that are gone, such as those of a sweep that was killed.

        Args:
            aside: keep them as those of runs that failed, to be looked at.
        """
        for draft in self.root.glob(f".*.{_HERE}.*"):
            name, number = draft.name.rsplit(f".{_HERE}.", 1)
            if not number.isdecimal() or _lives(int(number)):
                continue
            failed = self.aside(name.removeprefix("."), FAILED)
            if aside and not failed.exists():
                draft.rename(failed)
            else:
                shutil.rmtree(draft, ignore_errors=True)

    def done(self, cell: Cell) -> bool:
        """Say whether the run is there, and of the files that it depends on none was edited since."""
        place = self.folder(cell)
        # A folder of the right name is no proof: modules of computed names are in no key, but in what the run recorded.
        return place.is_dir() and _as_recorded(cell, place)

    def cost(self, cell: Cell) -> Cost:
        return read_cost(self.folder(cell))

    @contextmanager
    def draft(self, cell: Cell) -> Iterator[Path]:
        """Give an empty folder to write into; it takes its place when the block ends well, else it stays aside."""
        place = self.folder(cell)
        # The process in its name: two studies that make the same run at once each have a draft of their own.
        draft = place.with_name(f".{place.name}.{_HERE}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
        except BaseException as error:
            # Under another name: a folder in the run's place would be taken for a finished run.
            self._forget(place.name)
            why = STOPPED if isinstance(error, KeyboardInterrupt) else FAILED
            with suppress(OSError):
                draft.rename(self.aside(place.name, why))  # what was recorded until then, to look at
            raise
        self._forget(place.name)
        # The run that lies there was made of files that have been edited since; a rename does not replace a full
        # folder.
        if place.is_dir() and not self.done(cell):
            shutil.rmtree(place)
        try:
            draft.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            shutil.rmtree(draft)  # another process was faster; equal keys mean equal results

    def _forget(self, name: str) -> None:
        for why in (FAILED, STOPPED):
            shutil.rmtree(self.aside(name, why), ignore_errors=True)


_HERE = platform.node().replace("/", "-")  # studies of several machines may share a folder


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _as_recorded(cell: Cell, place: Path) -> bool:
    """Say whether all files that a run has depended on are the same today; a key cannot know all that it imports."""
    try:
        recorded = (read_manifest(place).get("what") or {}).get("inputs") or {}
        read_cost(place)
    # A damaged run is made again.
    except ParameterError:
        return False
    own = {name: Path(cell.file).parent / name.removeprefix("program/") for name in recorded}
    # Inputs of the cell win: platform and plan files do not lie beside the program.
    files = own | cell.inputs()
    return all(files[name].is_file() and file_digest(files[name]) == recorded[name] for name in recorded)


def read_cost(folder: Path) -> Cost:
    """Return the cost that lies beside a run; `ParameterError` if it cannot be read."""
    try:
        return Cost(**json.loads((folder / COST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ParameterError(f"{folder / COST} is not a run's cost: {error}") from error


def write_cost(folder: Path, cost: Cost) -> None:
    """Write the cost beside the run."""
    (folder / COST).write_text(json.dumps(asdict(cost)) + "\n")
