"""Run a program on virtual ranks, and keep what was recorded whatever happens.

`run` takes a function or a file that defines `main(comm)`. A file that defines none, and speaks MPI, is an unmodified
mpi4py program: it runs whole on every rank. Of the simulator two functions are known here: `simulate` and
`run_program`; they are loaded when a run begins, since `import spawnsim` loads this module.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from spawnsim.errors import ParameterError, RankError
from spawnsim.importing import notice_imports
from spawnsim.options import nearest
from spawnsim.run.process_setup import one_thread
from spawnsim.run.program import Main, Program, is_unmodified, program, speaks_torch
from spawnsim.run.progress_bar import Progress, listener
from spawnsim.run.result import Run
from spawnsim.run.watched import Looking, require_observers, watched
from spawnsim.run.writer import OnError, RunWriter, describe, describe_named
from spawnsim.scenario import DEADLINE_S, Scenario

OnNote = Callable[[str], None]


P = ParamSpec("P")
T = TypeVar("T")


def _told_of_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose `TypeError` for a keyword that it does not take says where the value belongs."""
    takes = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        unknown = next((name for name in kwargs if name not in takes), None)
        if unknown is None:
            return function(*args, **kwargs)
        hint = nearest(unknown, takes) or (
            f"parameters of main are given in one mapping: parameters={{{unknown!r}: {kwargs[unknown]!r}}}"
        )
        raise TypeError(f"run() takes no {unknown}=; {hint}")

    return called


@_told_of_keywords
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
    eager: bool = False,
    check_steps: bool = False,
    ties: str = "fifo",
    sums: str = "mpi",
    resume: bool = False,
    record_every: int = 1,
    record_ranks: str | Collection[int] | None = None,
    observe: Sequence[str] = (),
) -> Run:
    """Run `main(comm, **parameters)` on virtual ranks and return what they recorded.

    A file without a `main(comm)` is a program of mpi4py or torch.distributed: it runs whole, unmodified, on every rank.

    The same seed gives the same run, bit for bit. torch uses one thread meanwhile, unless OMP_NUM_THREADS is set. Runs
    in several threads of one process share the generators of Python, numpy and torch, and are not reproducible: use
    processes.

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
        eager: execute each `TrainingStep` alone, in its rank's turn, not with those of other ranks.
        check_steps: compare each `TrainingStep` and `Evaluation` with the same call executed alone, and raise where
            they differ; without it, the first ones and every hundredth one of each rank are compared.
        ties: in which order ranks act at one and the same time: "fifo" (by their numbers), "reverse", "random:SEED".
            What is right under one of them alone is a race.
        sums: in whose order communicators add floats: "mpi", or "gloo", which gives the bits of the torch backend.
        resume: go on from the newest checkpoint (`comm.checkpoint`) that `out` holds; without one the run begins anew.
        record_every: keep rows of every so-many-th iteration alone; events are all kept.
        record_ranks: whose rows to keep, such as "0-9,100"; None: those of all ranks.
        trace: keep all calls and messages in `out`, for `spawnsim trace`; results and digest are the same.
        observe: what watches the run while it lasts, such as ("live", "tensorboard"); needs `out`. See docs/live.md.

    Returns:
        What was recorded: table, events, totals; see `Run`.

    Raises:
        ParameterError: a parameter has no meaning; nothing ran.
        RankError: `main` raised on a rank; `__cause__` is its exception.
        SpawnsimError: another way in which a run can end, such as `Deadlock`.
    """
    from spawnsim.record import Recorder, Thinned, ranks_named

    scenario = Scenario(
        ranks,
        platform,
        stragglers,
        faults,
        seed,
        compute,
        DEADLINE_S if deadline_s is None else deadline_s,
        eager,
        ties,
        sums,
        check_steps,
    )
    if trace and out is None:
        raise ParameterError("trace: where to? Give the run folder that keeps it (--out DIR)")
    if resume and out is None:
        raise ParameterError("resume: which run? Give the run folder that holds its checkpoints (--out DIR)")
    require_observers(observe, out)
    # Before anything is loaded or begun: a refused run must leave the folder as it was.
    place = None if out is None else _checked_place(out, overwrite or resume)
    # A run that goes on with fewer ranks keeps its own choice, of those that are left.
    thin = (record_every, ranks_named(record_ranks, None if resume else ranks))
    Thinned(Recorder(), *thin)  # refuses what cannot be
    keeping = _Keeping(place, progress, on_error, on_note, trace, resume, thin, tuple(observe))
    if isinstance(main, (str, Path)) and (whole or is_unmodified(Path(main))):
        if deadline_s is None:  # such a program was written for an MPI that knows no deadlines
            scenario = replace(scenario, deadline_s=math.inf)
        return _run_unmodified(Path(main), tuple(argv), dict(options or {}), scenario, keeping=keeping)
    return _run_main(program(main, parameters), scenario, keeping)


def _checked_place(out: str | Path, overwrite: bool) -> Path:
    from spawnsim.record import folder

    place = folder.named(out)
    folder.require_free(place, overwrite=overwrite, empty_too=True)
    return place


@dataclass(frozen=True)
class _Keeping:
    """Where a run is kept, and who is told of it meanwhile; see `run`."""

    out: Path | None
    progress: bool | Progress
    on_error: OnError | None
    on_note: OnNote | None
    trace: bool
    resume: bool
    thin: tuple[int, frozenset[int] | None]
    observe: tuple[str, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return what run.json says of it: which rows are left out."""
        every, ranks = self.thin
        return ({} if every == 1 else {"record_every": every}) | (
            {} if ranks is None else {"record_ranks": ",".join(map(str, sorted(ranks)))}
        )

    def writer(self, what: Mapping[str, Any], inputs: Any) -> RunWriter:
        """Return what writes the run folder."""
        writer = RunWriter(
            what, self.out, self.on_error, inputs, trace=self.trace, resume=self.resume, thin=self.thin
        )
        if self.on_note is not None:
            for sentence in writer.what.get("warnings", ()):
                self.on_note(sentence)
        return writer

    def watched(self) -> AbstractContextManager[None]:
        """Return a block around the writer's: observers are told of the end when the folder is whole."""
        return watched(self.out, self.observe)

    def looking(self, writer: RunWriter) -> Looking:
        """Return a block that gives what is told of the world before its ranks begin."""
        return Looking(self.out if self.observe else None, getattr(writer.recorder, "flush", lambda: None))


def _run_main(task: Program, scenario: Scenario, keeping: _Keeping) -> Run:
    # Described first, so that the digests are those of the files that the run begins with, whatever is edited
    # meanwhile.
    what, inputs = describe(task, scenario.described() | keeping.described(), backend="virtual")
    # The simulator checks its parts too, but only after the folder was begun: a typing error must not replace a run.
    if keeping.out is not None:
        require_possible(scenario)
    writer = keeping.writer(what, inputs)
    iterations = task.parameters.get("iterations")
    # The bar is the inner block: its thread reads the recorder, so it must have ended before the writer closes it.
    bar = listener(keeping.progress, writer.recorder, scenario.ranks, iterations)
    with keeping.watched(), writer, _logged(writer), bar as told, keeping.looking(writer) as prepare:
        writer.counted = _simulate(
            task, scenario, recorder=writer.sink, progress=told, on_error=writer.tell, on_note=keeping.on_note,
            trace=writer.trace, saving=writer.saving, prepare=prepare,
        )  # fmt: skip
    return writer.run


class _Logged(logging.Handler):
    """Takes what spawnsim logs as a warning: the first of each kind, and how many there were."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._first: dict[str, str] = {}
        self._count = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Take one record."""
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
    """Put what is logged in a block among the run's warnings: of 1,000 ranks, each would say the same."""
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
    """Raise `ParameterError` for circumstances that cannot be, before a run folder is touched."""
    from spawnsim.virtual.cluster import parts

    parts(scenario)


def carry_out(
    task: Program | Path,
    scenario: Scenario,
    recorder: Any,
    *,
    argv: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    **hooks: Any,
) -> Any:
    """Carry out a program with `main(comm)`, or the file of an unmodified one, and keep nothing but what is recorded.

    Args:
        task: the program.
        scenario: its circumstances.
        recorder: gets rows and events.
        argv: arguments of an unmodified program.
        options: how an unmodified program is run: see `spawnsim.virtual.scripts.Script`.
        hooks: `prepare`, `trace`, `on_error` and the other hooks of `spawnsim.virtual.simulate`.

    Returns:
        The simulator's `Totals`.

    Raises:
        SpawnsimError: what ended the run.
    """
    from spawnsim.virtual.scripts import run_program

    with one_thread(), _abort_as_error():
        if isinstance(task, Path):
            how = _carrier(task, dict(options or {}))
            return run_program(task, argv, scenario, recorder=recorder, **how, **hooks)
        return _simulate(task, scenario, recorder=recorder, **hooks)


def _carrier(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an unmodified program with what carries its ranks: threads, if it speaks to torch's."""
    if not options.get("carrier"):
        options = {name: value for name, value in options.items() if name != "carrier"}
        options |= {"carrier": "threads"} if speaks_torch(path) else {}
    return options


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
        # Errors of the simulator carry `totals`, from which the writer takes the counts; an Abort has to look the same.
        error.__dict__ |= {"totals": getattr(abort, "totals", None), "status": abort.errorcode}
        # The Abort itself says nothing that the error does not, and a chained traceback would end in our lines.
        raise error from None


NO_COST = (
    "computing between two calls costs nothing: give compute (--compute measured, or 5us) where it counts"
)


def _run_unmodified(
    path: Path,
    argv: Sequence[str],
    options: Mapping[str, Any],
    scenario: Scenario,
    *,
    keeping: _Keeping,
) -> Run:
    """Run an unmodified program on virtual ranks.

    `run.what["notes"]` and `run.what["warnings"]` hold what the user should know, a sentence each.
    """
    from spawnsim.models.platform import load_platform
    from spawnsim.record import manifest
    from spawnsim.virtual.scripts import Cost, run_program

    options = _carrier(path, dict(options))
    # Checked before the folder is begun: `private` of a package that is not there was accepted, and did nothing.
    _require_installed(path, options.get("private", ()))
    # Names of modules that are imported from here on are kept: those computed at run time are in no program's text.
    notice_imports()
    named: dict[str, Any] = {"file": path.name, "main": None, "file_digest": manifest.file_digest(path)}
    named |= {"parameters": {"argv": list(argv), **options}, "backend": "virtual"}
    what, inputs = describe_named(named, path, scenario.described() | keeping.described())
    # One list that the run appends to while it lasts: the simulator is given it as `warn`, and `what` is saved with it.
    what |= {"notes": [NO_COST] if scenario.compute in (None, "none") else [], "warnings": []}
    if keeping.out is not None:
        Cost.of(scenario.compute, load_platform(scenario.platform).device)
        # Without `compute`: there it is a cost of calls, which is checked above.
        require_possible(replace(scenario, compute=0.0))
    writer = keeping.writer(what, inputs)
    bar = listener(keeping.progress, writer.recorder, scenario.ranks)
    with (
        keeping.watched(), writer, _logged(writer), bar as told, keeping.looking(writer) as prepare,
        _abort_as_error(),
    ):  # fmt: skip
        writer.counted = run_program(
            path, argv, scenario, recorder=writer.sink, progress=told, warn=what["warnings"],
            on_error=writer.tell, on_note=keeping.on_note, trace=writer.trace, prepare=prepare, **options,
        )  # fmt: skip
    return writer.run


def _require_installed(path: Path, private: Sequence[str]) -> None:
    """Raise `ParameterError` for a private package that is not there: naming it would do nothing."""
    for name in private:
        # Modules beside the program need not be installed, so both places count.
        beside = path.resolve().parent / name
        found = name.isidentifier() and (
            beside.exists() or beside.with_suffix(".py").exists() or find_spec(name)
        )
        if not found:
            raise ParameterError(
                f"private={name!r}: no installed package has this name; give the one that is imported"
            )
