"""Run a program on virtual ranks, and keep the records however the run ends.

`run` takes a function or a file that defines `main(comm)`. A file that uses MPI without defining `main` is an
unmodified mpi4py program: it runs whole on every rank. This module uses two functions of the simulator: `simulate`
and `run_program`. They are loaded when a run begins, since `import spawnsim` loads this module.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from spawnsim.errors import ParameterError, RankError
from spawnsim.importing import notice_imports
from spawnsim.options import nearest
from spawnsim.run.process_setup import one_thread
from spawnsim.run.program import Main, Program, ProgramFile, checked, program
from spawnsim.run.result import Run
from spawnsim.run.watched import Progress, StateWriter, listener, require_observers, watched
from spawnsim.run.writer import OnError, RunWriter, describe, describe_named
from spawnsim.scenario import Scenario

OnNote = Callable[[str], None]


class Circumstances(TypedDict, total=False):
    """Fields of a `Scenario`, as keywords of `run`; `deadline_s` None: 30, or no limit for an unmodified program."""

    ranks: int | None
    platform: Any
    stragglers: Any
    faults: Any
    seed: int
    compute: Any
    deadline_s: float | None
    eager: bool
    ties: str
    sums: str
    check_steps: bool
    races: bool


class Keeping(TypedDict, total=False):
    """Where a run is kept, and who receives its reports meanwhile: see `run`."""

    out: str | Path | None
    overwrite: bool
    resume: bool
    trace: bool
    record_every: int
    record_ranks: str | Collection[int] | None
    observe: Sequence[str]
    progress: bool | Progress
    on_error: OnError | None
    on_note: OnNote | None


class Keywords(Circumstances, Keeping):
    """Keywords of `run` besides the program's own."""


@one_thread()
def run(
    main: Main | str | Path | ProgramFile,
    scenario: Scenario | int | None = None,
    *,
    parameters: Mapping[str, Any] | None = None,
    whole: bool = False,
    argv: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **keywords: Unpack[Keywords],
) -> Run:
    """Run `main(comm, **parameters)` on virtual ranks and return their records.

    A file without a `main(comm)` is a program of mpi4py or torch.distributed: it runs whole, unmodified, on every rank.
    Without a number of ranks, a file that uses multiprocessing runs once, and the processes that it starts are ranks.

    The same seed gives the same run, bit for bit. torch uses one thread meanwhile, unless OMP_NUM_THREADS is set. Runs
    in several threads of one process share the generators of Python, numpy and torch, and are not reproducible: use
    processes.

    Args:
        main: a function of a `spawnsim.Comm`, or the path of a file that defines it.
        scenario: the circumstances, or the number of ranks.
        parameters: keyword arguments for `main`.
        whole: run the file whole on every rank, as an unmodified program, whatever it defines.
        argv: arguments of an unmodified program.
        options: how an unmodified program is run, as `carrier="threads"`: see `spawnsim.virtual.scripts.Script`.
        keywords: fields of `spawnsim.scenario.Scenario`, such as `ranks=8, faults="crash:3@2s"`; and

            * out: run folder to write; after an error it holds the records until then.
            * overwrite: whether `out` may lose a run that it holds.
            * resume: continue from the newest checkpoint (`comm.checkpoint`) that `out` holds; without one begin
                anew.
            * trace: keep all calls and messages in `out`, for `spawnsim trace`; results and digest are the same.
            * record_every: keep rows of every n-th iteration alone; all events are kept.
            * record_ranks: the ranks whose rows to keep, such as "0-9,100"; None: all ranks.
            * observe: observers of the run, such as ("live", "tensorboard"); needs `out`. See docs/live.md.
            * progress: True for a bar on the terminal, or a function of virtual seconds, ended ranks, ranks.
            * on_error: receives the error that the run is going to raise, before the ranks' `finally` blocks run.
            * on_note: receives a sentence when a rank computes for long without a call, with its line.

    Returns:
        The records: table, events, totals; see `Run`.

    Raises:
        ParameterError: a parameter is invalid; nothing ran.
        RankError: `main` raised on a rank; `__cause__` is its exception.
        SpawnsimError: another way in which a run can end, such as `Deadlock`.
    """
    known = [*Circumstances.__annotations__, *Keeping.__annotations__]
    for name, value in keywords.items():
        if name not in known:
            hint = nearest(name, known) or (
                f"parameters of main are given in one mapping: parameters={{{name!r}: {value!r}}}"
            )
            raise TypeError(f"run() takes no {name}=; {hint}")
    given = {name: value for name, value in keywords.items() if name in Circumstances.__annotations__}
    if given.get("ranks", 0) is None:
        del given["ranks"]
    starts = False  # whether the program starts its ranks itself
    limited = isinstance(scenario, Scenario) or given.get("deadline_s") is not None
    if given.get("deadline_s", 0.0) is None:
        del given["deadline_s"]
    if isinstance(scenario, Scenario):
        scenario = replace(scenario, **given)  # type: ignore[arg-type]  # a field's own type
    elif scenario is None and "ranks" not in given:
        if isinstance(main, (str, Path)):
            main = ProgramFile.read(Path(main), whole=whole)
        if not (isinstance(main, ProgramFile) and main.starts_ranks):
            raise TypeError("run() needs the number of ranks: give ranks=N, or a Scenario")
        starts, scenario = True, Scenario(ranks=1, **given)  # type: ignore[arg-type]
    else:
        scenario = Scenario(**({} if scenario is None else {"ranks": scenario}) | given)  # type: ignore[arg-type]
    kept = {name: value for name, value in keywords.items() if name in Keeping.__annotations__}
    keeping = _Keeping.of(None if starts else scenario.ranks, **kept)  # type: ignore[arg-type]
    if isinstance(main, (str, Path)):
        main = ProgramFile.read(Path(main), whole=whole)
    if isinstance(main, ProgramFile) and (starts or main.is_whole):
        if not limited:  # such a program was written for an MPI that knows no deadlines
            scenario = replace(scenario, deadline_s=math.inf)
        how = dict(options or {}) | dict(parameters or {})
        return _run_unmodified(main, scenario, keeping, argv=argv, given=how, starts=starts)
    if substitutes := {"cuda_as_cpu", "stubs"} & {name for name, value in (options or {}).items() if value}:
        raise ParameterError(
            f"{', '.join(sorted(substitutes))}: for programs without a main(comm), and with --whole"
        )
    return _run_main(program(main, parameters), scenario, keeping)


@dataclass(frozen=True)
class _Keeping:
    """The fields of `Keeping`, checked; `thin` selects the rows to keep."""

    out: Path | None = None
    progress: bool | Progress = False
    on_error: OnError | None = None
    on_note: OnNote | None = None
    trace: bool = False
    resume: bool = False
    thin: tuple[int, frozenset[int] | None] = (1, None)
    observe: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, ranks: int | None, *, out: str | Path | None = None, overwrite: bool = False, record_every: int = 1,
        record_ranks: str | Collection[int] | None = None, observe: Sequence[str] = (), **same: Any,
    ) -> _Keeping:  # fmt: skip
        """Return the settings; refuse impossible ones before anything is loaded: the folder stays as it was."""
        from spawnsim.record import Recorder, Thinned, folder, ranks_named

        if out is None and same.get("trace"):
            raise ParameterError("trace needs a run folder to write to: give one (--out DIR)")
        if out is None and same.get("resume"):
            raise ParameterError("resume needs the run folder with the checkpoints: give it (--out DIR)")
        require_observers(observe, out)
        place = None if out is None else folder.named(out)
        if place is not None:
            folder.require_free(place, overwrite=overwrite or bool(same.get("resume")), empty_too=True)
        # A run that is resumed with fewer ranks keeps its own choice, restricted to the remaining ranks.
        thin = (record_every, ranks_named(record_ranks, None if same.get("resume") else ranks))
        Thinned(Recorder(), *thin)  # refuses invalid choices
        return cls(place, thin=thin, observe=tuple(observe), **same)

    def described(self) -> dict[str, Any]:
        """Return the entries of run.json: which rows are omitted."""
        every, ranks = self.thin
        return ({} if every == 1 else {"record_every": every}) | (
            {} if ranks is None else {"record_ranks": ",".join(map(str, sorted(ranks)))}
        )

    @contextmanager
    def recording(
        self, what: Mapping[str, Any], inputs: Any, iterations: Any = None
    ) -> Iterator[tuple[RunWriter, dict[str, Any]]]:
        """Give the writer of the run folder, and the hooks of the simulator."""
        writer = RunWriter(
            what, self.out, self.on_error, inputs, trace=self.trace, resume=self.resume, thin=self.thin
        )
        if self.on_note is not None:
            for sentence in writer.what.get("warnings", ()):
                self.on_note(sentence)
        bar = listener(self.progress, writer.recorder, int(what["ranks"]), iterations)
        states = StateWriter(
            self.out if self.observe else None, getattr(writer.recorder, "flush", lambda: None)
        )
        # Observers see the end when the folder is whole: they are the outermost block. The bar's thread reads the
        # recorder: it must end before the writer closes the recorder.
        with watched(self.out, self.observe), writer, _logged(writer), bar as report, states as prepare:
            yield (
                writer,
                {
                    "recorder": writer.sink,
                    "progress": report,
                    "on_error": writer.report,
                    "on_note": self.on_note,
                    "trace": writer.trace,
                    "prepare": prepare,
                },
            )


def _run_main(task: Program, scenario: Scenario, keeping: _Keeping) -> Run:
    # Described first: the digests describe the files at the start of the run, even if a file is edited meanwhile.
    what, inputs = describe(task, scenario.described() | keeping.described(), backend="virtual")
    # The simulator checks its parts too, but only after the folder was begun: a typing error must not replace a run.
    if keeping.out is not None:
        require_possible(scenario)
    with keeping.recording(what, inputs, task.parameters.get("iterations")) as (writer, hooks):
        writer.counted = _simulate(task, scenario, saving=writer.saving, **hooks)
    return writer.run


class _Logged(logging.Handler):
    """Collects spawnsim's log warnings: the first of each kind, and the count."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first: dict[str, str] = {}
        self._count = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self._first.setdefault(str(record.msg), record.getMessage())
        self._count[str(record.msg)] += 1

    def sentences(self) -> list[str]:
        """Return a sentence for each kind."""
        more = {kind: count - 1 for kind, count in self._count.items()}
        return [
            text + (f" (and {more[kind]:,} more like it)" if more[kind] else "")
            for kind, text in self._first.items()
        ]


@contextmanager
def _logged(writer: RunWriter) -> Iterator[None]:
    """Add warnings that a block logs to the run's warnings, once: each of 1,000 ranks would log the same."""
    handler, logger = _Logged(), logging.getLogger("spawnsim")
    logger.addHandler(handler)
    try:
        yield
    except BaseException as error:
        for sentence in handler.sentences():
            error.add_note(f"warning: {sentence}")
        raise
    finally:
        logger.removeHandler(handler)
        if found := handler.sentences():
            writer.what["warnings"] = [*writer.what.get("warnings", ()), *found]


def require_possible(scenario: Scenario) -> None:
    """Raise `ParameterError` for impossible circumstances, before a run folder is touched."""
    from spawnsim.virtual.cluster import parts

    parts(scenario)


def execute(
    task: Program | ProgramFile,
    scenario: Scenario,
    recorder: Any,
    *,
    argv: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **hooks: Any,
) -> Any:
    """Run a program with `main(comm)`, or the file of an unmodified one, and return the simulator's `Totals`."""
    from spawnsim.virtual.scripts import run_program

    with one_thread(), _abort_as_error():
        if isinstance(task, ProgramFile):
            how = _how(task, options or {})
            return run_program(task.path, argv, scenario, recorder=recorder, **how, **hooks)
        return _simulate(task, scenario, recorder=recorder, **hooks)


def _settings(
    _comm: object,
    *,
    carrier: Literal["greenlets", "threads"] | None = None,
    private: str | tuple[str, ...] = (),
    virtual_time: Literal["all", "sleep", "none"] = "all",
    prefix: bool = True,
    futures: bool = False,
    cuda_as_cpu: bool = False,
    stubs: str | tuple[str, ...] = (),
) -> None:
    """Stand for the `main` of an unmodified program: these are fields of `Script`, with other defaults."""


def _how(file: ProgramFile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how an unmodified program is run; its ranks are threads if it uses torch.distributed."""
    how = checked(_settings, given, file.path.name)
    # Checked here: a `private` package that does not exist was once accepted, and had no effect.
    private = how["private"]
    how["private"] = _names(private)
    how["stubs"] = _names(how["stubs"])
    if wrong := [name for name in how["stubs"] if not all(map(str.isidentifier, name.split(".")))]:
        raise ParameterError(
            f"stub {wrong[0]!r}: give the name of a module that the program imports, such as wandb"
        )
    for name in how["private"]:
        # Modules next to the program need not be installed, so both places count.
        nearby = file.path.resolve().parent / name
        if not name.isidentifier() or not (
            nearby.exists() or nearby.with_suffix(".py").exists() or find_spec(name)
        ):
            raise ParameterError(
                f"private={name!r}: no installed package has this name; give the name that the program imports"
            )
    how["carrier"] = how["carrier"] or ("threads" if file.speaks_torch else "greenlets")
    return how


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


def _simulate(main: Main, scenario: Scenario, **hooks: Any) -> Any:
    from spawnsim.virtual import simulate

    with _abort_as_error():
        return simulate(main, scenario, **hooks)


@contextmanager
def _abort_as_error() -> Iterator[None]:
    """Turn a program's `Abort` into a `RankError` with its exit status."""
    from spawnsim.virtual.mpi.comm import ProgramAbort

    try:
        yield
    except ProgramAbort as abort:
        text = f"rank {abort.rank} called Abort({abort.errorcode}) at {abort.time_s:.6g} s"
        error = RankError(abort.rank, abort.time_s, text)
        # Errors of the simulator carry `totals`, from which the writer takes the counts; an Abort must carry them
        # too.
        error.__dict__ |= {"totals": getattr(abort, "totals", None), "status": abort.errorcode}
        # The Abort itself adds nothing to the error, and a chained traceback would end in our lines.
        raise error from None


NO_COST = "computing between two calls costs nothing: give compute (--compute measured, or 5us) if it matters"


def _run_unmodified(
    file: ProgramFile, scenario: Scenario, keeping: _Keeping, *, argv: Sequence[str], given: Mapping[str, Any],
    starts: bool = False,
) -> Run:  # fmt: skip
    """Run an unmodified program: `run.what["notes"]` and `run.what["warnings"]` hold a sentence each for the user.

    If it `starts` its ranks itself, their number is known only then.
    """
    from spawnsim.models.platform import load_platform
    from spawnsim.record import manifest
    from spawnsim.virtual.scripts import Cost, run_main, run_program

    options, path = _how(file, ({"carrier": "threads"} if starts else {}) | dict(given)), file.path
    # Keep the names of modules that are imported from here on: computed names are in no program's text.
    notice_imports()
    named: dict[str, Any] = {"file": path.name, "main": None, "file_digest": manifest.file_digest(path)}
    named |= {"parameters": {"argv": list(argv), **options}, "backend": "virtual"}
    what, inputs = describe_named(named, path, scenario.described() | keeping.described())
    # One list, to which the run appends: the simulator receives it as `warn`, and `what` is saved with it.
    what |= {"notes": [NO_COST] if scenario.compute in (None, "none") else [], "warnings": []}
    if keeping.out is not None:
        Cost.of(scenario.compute, load_platform(scenario.platform).device)
        # Without `compute`: here it is a cost of calls, which is checked above.
        require_possible(replace(scenario, compute=0.0))
    with keeping.recording(what, inputs) as (writer, hooks), _abort_as_error():
        if starts:
            hooks["on_ranks"] = partial(writer.what.__setitem__, "ranks")
        start = run_main if starts else run_program
        writer.counted = start(path, argv, scenario, warn=what["warnings"], **hooks, **options)
    return writer.run
