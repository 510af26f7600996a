"""One run of a study as a value with its key, and the store of finished runs: a folder per key.

Equal keys mean equal results. A key therefore covers the text of the program and of its modules, of the platform, the
plan and the recorded run that its world names, of the library (without the packages that only read results), and the
versions of the packages below it. It does not cover files that a program reads by itself: pass such a file's digest
as a parameter.

A folder that exists is complete: a run is written into a draft folder next to it, and renamed at the end, which is
atomic. An interrupted study, or two studies at once, never see half a run.
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
        # Checked here, where the study names the cell: in a process of the pool it would be a failed run.
        if not Path(self.file).is_file():
            raise ParameterError(f"the study uses {self.file}, which is not a file")
        if self.ranks < 1:
            raise ParameterError(f"ranks={self.ranks}: give at least 1")
        backend_of(self.backend)

    def description(self) -> dict[str, Any]:
        """Return the values that distinguish this run, without paths of this machine."""
        return {
            "file": Path(self.file).name,
            "backend": self.backend,
            "ranks": self.ranks,
            "seed": self.seed,
            # Sorted, so that the order in which a study writes its arguments does not change the key.
            "parameters": document(dict(sorted(self.parameters.items()))),
            # None is the default of `spawnsim.run`: given or not, it is the same run with the same key.
            "world": {name: _without_folder(v) for name, v in sorted(self.world.items()) if v is not None},
        }

    def inputs(self) -> Files:
        return manifest.inputs(Path(self.file), **self.world)

    @cached_property  # and so the same in every process that receives this cell, even if files are edited
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
            Name → value. A parameter with the same name as another column is "main's NAME".
        """
        described = self.description()
        seed, given, world = (described.pop(name) for name in ("seed", "parameters", "world"))
        taken = {*described, *world, "seed"}
        own = {f"main's {name}" if name in taken else name: value for name, value in given.items()}
        row: dict[str, Any] = described | own | world | {"seed": seed}
        return row

    @property
    def name(self) -> str:
        """A short name for people: file, policy, ranks, backend, seed; only the key is unique."""
        values = [str(self.parameters["policy"])] if "policy" in self.parameters else []
        where = [] if self.backend == "virtual" else [self.backend]
        return "-".join([Path(self.file).stem, *values, f"n{self.ranks}", *where, f"s{self.seed}"])


def _without_folder(value: Any) -> Any:
    """Return a circumstance in a form that is the same on each machine; the digest covers a file's content."""
    # The folder of a file differs between machines and checkouts, and changes no result.
    return Path(value).name if isinstance(value, (str, Path)) and os.path.exists(value) else document(value)


@cache
def _library() -> str:
    """Return a digest of the library's files that can change a result: 10 ms, once per process."""
    root = manifest.PACKAGE
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_sources(root)):
        # With the path: if two files swap their contents, the digest must change.
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        # Presets of platforms are TOML files of the package, and change results as code does.
        if path.suffix in (".py", ".toml") and path.relative_to(root).parts[0] not in ONLY_LOOK:
            yield path


def labels(cells: Sequence[Cell]) -> dict[str, str]:
    """Return the values that distinguish each cell from the others, for people: "average, ratio 0.1, seed 3"."""
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
        ParameterError: the file does not exist, or a number of ranks is below 1.
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
    """The cost of a run on this machine: wall seconds, peak memory of its process in bytes, load at its start."""

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
        """Return the folder of a run that did not finish."""
        return self.root / f"{why}-{name}"

    def fail(self, cell: Cell) -> None:
        """Mark a stopped run as failed, for example because it exceeded its time limit."""
        stopped = self.aside(self.folder(cell).name, STOPPED)
        if stopped.is_dir():
            shutil.rmtree(self.failed(cell), ignore_errors=True)
            stopped.rename(self.failed(cell))

    def tidy(self, *, aside: bool = False) -> None:
        """Remove the drafts of processes on this machine that no longer run, such as processes of a killed sweep.

        Args:
            aside: keep them as failed runs, for inspection.
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
        """Return whether the run exists, and no file that it depends on was edited since."""
        place = self.folder(cell)
        # The name of the folder does not suffice: keys omit modules with computed names, but the run records them.
        return place.is_dir() and _as_recorded(cell, place)

    def cost(self, cell: Cell) -> Cost:
        return read_cost(self.folder(cell))

    @contextmanager
    def draft(self, cell: Cell) -> Iterator[Path]:
        """Give an empty draft folder; it becomes the run's folder if the block succeeds, and is set aside otherwise."""
        place = self.folder(cell)
        # The process id in the name: two studies that make the same run at once have separate drafts.
        draft = place.with_name(f".{place.name}.{_HERE}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
        except BaseException as error:
            # Under another name: a folder with the run's name would pass for a finished run.
            self._forget(place.name)
            why = STOPPED if isinstance(error, KeyboardInterrupt) else FAILED
            with suppress(OSError):
                draft.rename(self.aside(place.name, why))  # the records until then, for inspection
            raise
        self._forget(place.name)
        # The existing run was made from files that have been edited since; a rename does not replace a folder that
        # has content.
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
    """Return whether all files that a run depended on are unchanged; the key cannot cover all imported modules."""
    try:
        recorded = (read_manifest(place).get("what") or {}).get("inputs") or {}
        read_cost(place)
    # A damaged run is made again.
    except ParameterError:
        return False
    own = {name: Path(cell.file).parent / name.removeprefix("program/") for name in recorded}
    # Inputs of the cell take precedence: platform and plan files need not be in the program's folder.
    files = own | cell.inputs()
    return all(files[name].is_file() and file_digest(files[name]) == recorded[name] for name in recorded)


def read_cost(folder: Path) -> Cost:
    """Return the cost in a run's folder; `ParameterError` if it cannot be read."""
    try:
        return Cost(**json.loads((folder / COST).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ParameterError(f"{folder / COST} is not a run's cost: {error}") from error


def write_cost(folder: Path, cost: Cost) -> None:
    """Write the cost into a run's folder."""
    (folder / COST).write_text(json.dumps(asdict(cost)) + "\n")
