"""Run a program on virtual ranks, and keep what was recorded whatever happens.

`run` takes a function or a file that defines `main(comm)`. A file that defines none, and speaks MPI, is an unmodified
mpi4py program: it runs whole on every rank. `RunWriter` owns the run folder. Of the simulator two functions are known
here: `simulate` and `run_program`.
"""

from __future__ import annotations

import ast
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim.errors import ParameterError, RankError, SpawnsimError, StorageError
from spawnsim.importing import notice_imports
from spawnsim.run import process_setup
from spawnsim.run.process_setup import one_thread
from spawnsim.run.program import Main, Program, has_main, program, tree_of
from spawnsim.run.result import FINISHED, Run, totals_of, warned

if TYPE_CHECKING:
    from spawnsim.record import Journal, Recorder
    from spawnsim.record.manifest import Files


OnError = Callable[[BaseException], None]
OnNote = Callable[[str], None]
LEAST_B = 20_000  # that a rank takes which does nothing; docs/figures.md
FILES_OF = ("platform", "stragglers", "faults", "compute")  # circumstances that files may describe
Progress = Callable[[float, int, int], None]
"""Called now and then with virtual seconds, ranks that have finished, and ranks."""


@one_thread()
def run(
    main: Main | str | Path,
    *,
    ranks: int,
    platform: Any = None,
    stragglers: Any = None,
    faults: Any = None,
    seed: int = 0,
    out: str | Path | None = None,
    compute: Any = None,
    deadline_s: float | None = None,
    progress: bool | Progress = False,
    parameters: Mapping[str, Any] | None = None,
    argv: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    on_error: OnError | None = None,
    on_note: OnNote | None = None,
    overwrite: bool = False,
    whole: bool = False,
    trace: bool = False,
) -> Run:
    """Run `main(comm, **parameters)` on virtual ranks and return what they recorded.

    A file without a `main(comm)` is an mpi4py program: it runs whole, unmodified, on every rank.

    The same seed gives the same run, bit for bit. torch uses one thread meanwhile, unless OMP_NUM_THREADS is set.

    Args:
        main: a function of a `spawnsim.Comm`, or the path of a file that defines it.
        ranks: how many virtual ranks.
        platform: name, TOML file or object that describes the network; None is the default platform.
        stragglers: such as "lognormal:0.3", or an object; None: all ranks are equally fast.
        faults: a fault plan, or None.
        seed: of every random stream of the run, at least 0.
        out: run folder to write; also on errors, with what was recorded until then.
        compute: what `comm.compute()` takes where the program states nothing: seconds, text such as "5 ms", or a
            recorded run's folder.
        deadline_s: virtual seconds that one call may wait before it ends in `Timeout`; None: 30, and in an
            unmodified program no limit.
        progress: True for a bar on the terminal, or a function that is told.
        parameters: keyword arguments for `main`.
        argv: arguments of an unmodified program.
        options: how an unmodified program is run: see `spawnsim.virtual.scripts.Script`.
        on_error: is given the error that the run is going to raise, before the ranks' `finally` blocks run.
        on_note: is given a sentence when a rank computes for long without a call, with its line.
        overwrite: whether a run that `out` holds may be lost.
        whole: run the file whole on every rank, as an unmodified program, whatever it defines.
        trace: keep all calls and messages in `out`, for `spawnsim trace`; results and digest are the same.

    Raises:
        ParameterError: a parameter has no meaning; nothing ran.
        RankError: `main` raised on a rank; `__cause__` is its exception.
        SpawnsimError: another way in which a run can end, such as `Deadlock`.
    """
    _check(ranks, seed, deadline_s)
    if trace and out is None:
        raise ParameterError("trace: where to? Give the run folder that keeps it (--out DIR)")
    place = None if out is None else _checked_place(out, overwrite)
    if isinstance(main, (str, Path)) and (whole or _whole(Path(main))):
        return _run_whole(
            Path(main), argv, options, ranks=ranks, platform=platform, stragglers=stragglers, faults=faults, seed=seed,
            compute=compute, out=place, deadline_s=deadline_s, progress=progress, on_error=on_error, on_note=on_note,
            trace=trace,
        )  # fmt: skip
    task = program(main, parameters)
    deadline_s = 30.0 if deadline_s is None else deadline_s
    what, inputs = describe(
        task, backend="virtual", ranks=ranks, platform=platform, stragglers=stragglers, faults=faults, seed=seed,
        compute=compute, deadline_s=deadline_s,
    )  # fmt: skip
    setting: dict[str, Any] = {
        "ranks": ranks, "platform": platform, "stragglers": stragglers, "faults": faults, "seed": seed,
        "compute_s": compute, "deadline_s": deadline_s,
    }  # fmt: skip
    if place is not None:
        require_possible(**setting)
    keeper = RunWriter(what, place, on_error, inputs, trace=trace)
    with keeper, _bar(progress, task, keeper.recorder, ranks) as told:
        keeper.counted = _simulate(
            task, recorder=keeper.recorder, progress=told, on_error=keeper.tell, on_note=on_note, trace=keeper.trace,
            **setting,
        )  # fmt: skip
    return keeper.run


def _checked_place(out: str | Path, overwrite: bool) -> Path:
    from spawnsim.record import folder

    place = folder.named(out)
    folder.require_free(place, overwrite=overwrite)
    return place


def require_possible(**setting: Any) -> None:
    """Raise `ParameterError` for circumstances that cannot be, before a run folder is touched."""
    from spawnsim.virtual import Setting

    Setting(**setting).parts()


def _whole(path: Path) -> bool:

    return is_unmodified(path)


def _run_whole(
    path: Path, argv: Sequence[str], options: Mapping[str, Any] | None, **circumstances: Any
) -> Run:

    return run_unmodified(Script(path, tuple(argv), dict(options or {})), **circumstances)


def _simulate(main: Main, **arguments: Any) -> Any:
    from spawnsim.virtual import simulate

    with aborting():
        return simulate(main, **arguments)


@contextmanager
def aborting() -> Iterator[None]:
    """Turn a program's `Abort` into a `RankError` with its exit status."""
    from spawnsim.virtual.mpi.comm import ProgramAbort

    try:
        yield
    except ProgramAbort as abort:
        text = f"rank {abort.rank} called Abort({abort.errorcode}) at {abort.time_s:.6g} s"
        error = RankError(abort.rank, abort.time_s, text)
        error.__dict__ |= {"totals": getattr(abort, "totals", None), "status": abort.errorcode}
        raise error from None


def _bar(progress: bool | Progress, task: Program, recorder: Recorder | Journal, ranks: int) -> Any:
    from spawnsim.run.progress_bar import Bar, Listener

    if progress is True:
        return Bar(recorder, ranks=ranks, iterations=task.parameters.get("iterations"))
    return Listener(progress or None)


def listener(progress: bool | Progress, recorder: Recorder | Journal, ranks: int) -> Any:
    """Return what is told of a run's progress, as a context."""
    from spawnsim.run.progress_bar import Bar, Listener

    return Bar(recorder, ranks=ranks, iterations=None) if progress is True else Listener(progress or None)


def _check(ranks: Any, seed: Any, deadline_s: float | None) -> None:
    for name, value, least in (("ranks", ranks, 1), ("seed", seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ParameterError(f"{name}={value!r}: give an integer of at least {least}")
    if ranks * LEAST_B > memory_B():
        raise ParameterError(
            f"ranks={ranks:,}: each takes about {LEAST_B / 1e3:g} kB before it keeps anything, "
            f"{ranks * LEAST_B / 1e9:,.0f} GB in all; this machine has {memory_B() / 1e9:,.0f} GB"
        )
    if deadline_s is not None and not deadline_s > 0:
        raise ParameterError(f"deadline_s={deadline_s!r}: give seconds above 0")


def memory_B() -> int:
    """Return the bytes of this machine's main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe(task: Program, *, backend: str, **circumstances: Any) -> tuple[dict[str, Any], Files]:
    """Return the "what" of run.json, and the files that the run depends on."""
    from spawnsim.record import manifest

    named = manifest.program(task.main) | {"parameters": task.parameters, "backend": backend}
    return describe_named(named, manifest.path_of(task.main), **circumstances)


def describe_named(
    named: Mapping[str, Any], file: Path | None, **circumstances: Any
) -> tuple[dict[str, Any], Files]:
    """Return the same for a program in a file of which there is a name, parameters and so on."""
    from spawnsim.record import manifest
    from spawnsim.record.recorder import document

    what = {name: document(value) for name, value in (dict(named) | circumstances).items()}
    inputs = manifest.inputs(file, **{name: circumstances.get(name) for name in FILES_OF})
    about = {"inputs": manifest.digests(inputs), "versions": manifest.versions(), "made": manifest.made()}
    return what | about, inputs


class RunWriter:
    """Keeps what a run records: writes the run folder when the `with` block ends, in whatever way it ends."""

    def __init__(
        self,
        what: Mapping[str, Any],
        out: Path | None,
        on_error: OnError | None = None,
        inputs: Files | None = None,
        *,
        trace: bool = False,
    ) -> None:
        from spawnsim.record import Journal, Recorder, folder, journal

        self.what, self.out, self._inputs = dict(what), out, inputs or {}
        self.recorder: Recorder | Journal = Recorder()
        self.trace: Journal | None = None  # what keeps the timeline
        self._on_error = on_error
        self.counted: Any = None  # a dataclass, once the building has counted
        self._run: Run | None = None
        if out is not None:
            folder.begin(out, what, inputs)
            self.recorder = Journal(journal.shard(out), prompt=False)
            if trace:
                self.trace = Journal(out / journal.FOLDER / journal.TRACE, prompt=False)

    @property
    def run(self) -> Run:
        """What was recorded, once the block has ended."""
        if self._run is None:
            self._run = self._gathered(FINISHED)
        return self._run

    def _gathered(self, outcome: str) -> Run:
        recorder = self._recorded()
        table, events = recorder.table(), recorder.events()
        counted = dataclasses.asdict(self.counted) if self.counted is not None else {}
        self.what |= reproducible(self.what, counted.get("leaks", ()))
        if mistakes := counted.get("mistakes"):
            self.what["warnings"] = [*self.what.get("warnings", ()), *mistakes]
        add_late(self.what, self._inputs, self.out)
        totals = totals_of(table, events, {"ranks": self.what.get("ranks")} | counted)
        return Run(warned(self.what, table, events), table, events, totals, outcome)

    def _recorded(self) -> Recorder:
        from spawnsim.record import Recorder, merge

        if isinstance(self.recorder, Recorder):
            return self.recorder
        assert self.out is not None
        self.recorder.flush()
        return merge(self.out).recorder

    def tell(self, error: BaseException) -> None:
        """Save what was recorded, and pass the error on, before the ranks are ended: that may hang."""
        if isinstance(error, SpawnsimError):
            self._save(error)
            if self.trace is not None:
                self.trace.flush()
            if self._on_error is not None:
                self._on_error(error)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        from spawnsim.record import Journal, folder, journal

        self._save(error)
        if self.out is not None and isinstance(self.recorder, Journal):
            self.recorder.close()
            if self.trace is not None:
                self.trace.close()
                folder.keep_trace(self.out)
            journal.discard(self.out)

    def _save(self, error: BaseException | None) -> None:
        """Write the run's files, beside the journal, which is left where they cannot be written."""
        if self.counted is None:
            self.counted = getattr(error, "totals", None)
        if self.out is None:
            return
        note = f"What was recorded until then: {self.out}"
        told = note in getattr(error, "__notes__", ())
        if told:
            error.__notes__.remove(note)  # type: ignore[union-attr]  # it is not part of the outcome
        try:
            self._run = self._gathered(outcome_of(error))
            self._run.save(self.out)
        except StorageError as full:
            full.add_note(note)
            raise full from error
        if isinstance(error, (SpawnsimError, KeyboardInterrupt)):
            error.add_note(note)


def reproducible(what: Mapping[str, Any], leaks: Sequence[str]) -> dict[str, Any]:
    """Return whether a run with the same seed would be the same, as far as can be noticed, and what would not."""
    measured = str(what.get("compute")).startswith("measured")
    found = [*(["computing was measured"] if measured else []), *leaks]
    return {"reproducible": not found, "leaks": found}


def add_late(what: dict[str, Any], inputs: Files, out: Path | None) -> None:
    """Add what is known once a program has run: modules that it imported by computed names, its threads."""
    from spawnsim.record import manifest

    file = inputs.get(f"program/{what.get('file')}")
    late = {} if file is None else manifest.late_files(file)
    new = {name: path for name, path in late.items() if name not in what["inputs"]}
    if out is not None:
        manifest.keep(out, new)
    what["inputs"] = what["inputs"] | manifest.digests(new)
    what["made"] = what["made"] | {"threads": manifest.threads()}


def outcome_of(error: BaseException | None) -> str:
    """Return the "outcome" of run.json."""
    if error is None:
        return FINISHED
    if isinstance(error, KeyboardInterrupt):
        return process_setup.outcome_of(error)
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


NO_COST = (
    "computing between two calls costs nothing: give compute (--compute measured, or 5us) where it counts"
)


@dataclass(frozen=True)
class Script:
    """An unmodified program and its circumstances. `options` are those of the carrier's `Script`."""

    path: Path
    argv: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self, circumstances: dict[str, Any]) -> tuple[dict[str, Any], Files]:
        """Return the "what" of run.json, and the files that the run depends on."""
        from spawnsim.record import manifest

        named = {"file": self.path.name, "main": None, "file_digest": manifest.file_digest(self.path)}
        parameters = {"argv": list(self.argv), **self.options}
        return describe_named(
            named | {"parameters": parameters, "backend": "virtual"}, self.path, **circumstances
        )


def run_unmodified(
    script: Script,
    *,
    out: Path | None = None,
    deadline_s: float | None = None,
    progress: bool | Progress = False,
    on_error: OnError | None = None,
    on_note: OnNote | None = None,
    trace: bool = False,
    **circumstances: Any,
) -> Run:
    """Run an unmodified program on virtual ranks; see `spawnsim.run` for the circumstances.

    `run.what["notes"]` and `run.what["warnings"]` hold what the user should know, a sentence each.
    """
    from spawnsim.virtual.scripts import Cost, run_program

    deadline_s = math.inf if deadline_s is None else deadline_s
    _require_installed(script)
    notice_imports()
    what, inputs = script.describe(
        circumstances | {"deadline_s": None if math.isinf(deadline_s) else deadline_s}
    )
    what |= {"notes": [NO_COST] if circumstances["compute"] in (None, "none") else [], "warnings": []}
    given = {"compute_s": circumstances.pop("compute"), "deadline_s": deadline_s, **circumstances}
    if out is not None:
        Cost.of(given["compute_s"])
        require_possible(**given | {"compute_s": 0.0})
    keeper = RunWriter(what, out, on_error, inputs, trace=trace)
    with keeper, listener(progress, keeper.recorder, given["ranks"]) as told, aborting():
        keeper.counted = run_program(
            script.path, script.argv, recorder=keeper.recorder, progress=told, warn=what["warnings"],
            on_error=keeper.tell, on_note=on_note, trace=keeper.trace, **given, **script.options,
        )  # fmt: skip
    return keeper.run


def _require_installed(script: Script) -> None:
    """Raise `ParameterError` for a private package that is not there: naming it would do nothing."""
    for name in script.options.get("private", ()):
        beside = script.path.resolve().parent / name
        found = name.isidentifier() and (
            beside.exists() or beside.with_suffix(".py").exists() or find_spec(name)
        )
        if not found:
            raise ParameterError(
                f"private={name!r}: no installed package has this name; give the one that is imported"
            )


def is_unmodified(path: Path) -> bool:
    """Return whether a file is to be run whole, and not through its `main(comm)`. Runs nothing of it.

    It is if it speaks MPI (itself, through a module beside it, or through a package that requires mpi4py) and has no
    `main`, or one without arguments; if it calls its `main()` without arguments; or if it calls `main` where it is run
    as a script and imports mpi4py (or calls the first argument something else than comm).
    """
    if not has_main(path):
        return _speaks_mpi(path)
    tree = tree_of(path)
    main = next(
        (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main"), None
    )
    if main is None:
        return False
    first = next(iter([*main.args.posonlyargs, *main.args.args, *filter(None, [main.args.vararg])]), None)
    if first is None:
        return _calls_main(tree) or _requires_mpi(path)
    return _calls_main(tree) and ("mpi4py" in _imported(tree) or first.arg != "comm")


def _requires_mpi(path: Path) -> bool:
    """Return true if a file that has `main()` is an mpi4py program; else its author has forgotten the argument."""
    if _speaks_mpi(path):
        return True
    raise ParameterError(
        f"{path}: main() takes no argument; its first one is the communicator: write def main(comm). "
        "A file with main() is run whole only if it calls main(), or if it speaks MPI"
    )


def _speaks_mpi(path: Path) -> bool:
    """Return whether a file, or a module of its folder that it imports, imports mpi4py or a package that needs it."""
    from spawnsim.record import manifest

    own = manifest.own_files(path).values()
    names = _imported(tree_of(path)).union(*(_imported(manifest.tree(file)) for file in own))
    names -= sys.stdlib_module_names | {file.stem for file in own}
    return "mpi4py" in names or bool(names & _packages_with_mpi())


@cache
def _packages_with_mpi() -> Set[str]:
    """Return the installed packages whose distribution requires mpi4py, perhaps for an extra; but for ours."""
    from importlib import metadata  # takes 30 ms, and most ranks do not need it

    found = set()
    for package, distributions in metadata.packages_distributions().items():
        needed = [each for name in distributions for each in metadata.requires(name) or ()]
        if any(re.match(r"mpi4py\b", each) for each in needed):
            found.add(package)
    return found - {"spawnsim"}


def _calls_main(tree: ast.Module) -> bool:
    """Return whether the file calls `main` when it is run, on its top level or below an `if`."""
    definitions = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    statements = [each for each in tree.body if not isinstance(each, definitions)]
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "main"
        for each in statements
        for node in ast.walk(each)
    )


def _imported(tree: ast.Module) -> set[str]:
    return set(_modules(tree))


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def refuse_arguments(argv: Sequence[str]) -> None:
    """Raise `ParameterError` for arguments of a script that has a `main(comm)`."""
    if argv:
        raise ParameterError(
            f"unrecognized arguments: {' '.join(argv)}; main(comm) has parameters: give --set NAME=VALUE"
        )
