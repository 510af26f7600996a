"""`spawnsim run` and `resume`: one program on virtual ranks, or on real ones.

On real ranks (`--backend mpi|torch`) this process is the launcher of the job, or one of its ranks; of these only rank
0 prints. A launcher loads neither torch nor MPI and has no threads, and a rank loads nothing that starts processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from spawnsim.backends import BACKENDS
from spawnsim.cli import (
    exit_code,
    print_error_above_bar,
    print_note_above_bar,
    print_warnings,
    report_error,
    report_internal_error,
)
from spawnsim.cli.declaring import (
    Command,
    Deadline,
    Json,
    KeptProgram,
    Observers,
    Out,
    Overwrite,
    PlatformName,
    ProgramPath,
    Quiet,
    RunFolder,
    Seed,
    Straggler,
    Whole,
    flag,
    option,
    parser_of,
    split_at_dashes,
)
from spawnsim.cli.listing import program_file
from spawnsim.errors import InternalError, ParameterError, SpawnsimError, WorldError
from spawnsim.options import OPTIONS, VIRTUAL_ONLY, of_virtual_ranks, parameters
from spawnsim.run import Run, run
from spawnsim.run.process_setup import ended_in_c, loading_without_threads, stoppable
from spawnsim.run.program import ProgramFile, program, refuse_arguments
from spawnsim.run.real import Job, run_rank, tidy
from spawnsim.run.result import shown, shown_totals
from spawnsim.run.watched import require_observers, watched
from spawnsim.scenario import DEADLINE_S

if TYPE_CHECKING:
    from spawnsim.real.launch.launchers import LaunchContext

PROGRESS = (
    "SPAWNSIM_PROGRESS"  # set: show a bar even if standard error is not a terminal; a rank's never is one
)
LONG = "long runs"
TURN_S = 0.5  # how long ranks other than 0 wait for rank 0 to report


@dataclass(kw_only=True)
class RunCommand(Command):
    """Run a file that defines main(comm) on virtual ranks, or (--backend) on real ones; or an unmodified program of
    mpi4py or torch.distributed. The program receives unknown options, and all that follows --.
    """

    examples = (
        "spawnsim run train.py --ranks 1000 --platform ethernet-10g --straggler lognormal:0.3 --out runs/a",
        "spawnsim run train.py --backend mpi -n 4 --set lr=0.1 --out runs/b --observe live",
        "spawnsim run script_of_mpi4py.py --ranks 64 --trace --out runs/c -- --its-own-option 3",
    )
    file: ProgramPath
    ranks: int | None = option("how many ranks; real ones are started with mpiexec", "N", "-n")
    backend: str = option("kind of the ranks", choices=BACKENDS, default="virtual")
    platform: PlatformName = None
    straggler: Straggler = None
    faults: str | None = option(
        "fault plan, such as 'crash:17@3.5s; drop:*>3@0s+5s,0.1'; see `spawnsim list faults`", "PLAN"
    )
    compute: str | None = option(
        "seconds of a comm.compute() without an argument, such as 0.005 or '5 ms'; of an mpi4py program: the "
        "cost of computing between two calls: none, '5 us', file.py:12=2ms, measured, 'measured*2', counted:h100",
        "S",
    )
    seed: Seed = 0
    deadline: Deadline = None
    set: Sequence[str] = option(
        "a keyword argument of main; of an unmodified program: private=PACKAGE (each rank imports it for itself), "
        "virtual_time=all|sleep|none, prefix=false (lines without [rank 3]), futures=true (only rank 0 runs it; "
        "the other ranks serve its MPIPoolExecutor); repeatable",
        "NAME=VALUE",
        default=(),
    )
    whole: Whole = False
    carrier: str | None = option(
        "implementation of a rank of an unmodified program; default: threads for torch.distributed, else greenlets",
        choices=("greenlets", "threads"),
    )
    cuda_as_cpu: bool = flag("in an unmodified program of torch, CPU tensors take the place of CUDA's")
    stub: Sequence[str] = option(
        "a tracker that an unmodified program imports, such as wandb: replace it by an object that accepts all calls "
        "and records scalars; repeatable",
        "NAME",
        default=(),
    )
    resume: bool = flag("continue from the newest checkpoint in --out DIR; without one, start", group=LONG)
    record_every: int = option(
        "keep only the rows of every Nth iteration; default: all rows. Events are always kept",
        "N",
        group=LONG,
        default=1,
    )
    record_ranks: str | None = option("keep only the rows of these ranks, such as 0-9,100", "R", group=LONG)
    survive: bool = flag(
        "for --backend mpi: the job continues when ranks die, if its program catches RankFailed, Revoked and Timeout "
        "and calls comm.recover(); virtual ranks always do"
    )
    check_calls: bool = flag(
        "for real ranks: each blocking collective first compares its call on all ranks; a different call, root, "
        "op, dtype or size is an error that shows them all; virtual ranks always do"
    )
    trace: bool = flag(
        "keep all calls and messages of virtual ranks in the run folder, for `spawnsim trace DIR`"
    )
    eager: bool = flag("execute each TrainingStep of virtual ranks by itself, as real ones do")
    check_steps: bool = flag(
        "compare each TrainingStep with the same step executed by itself; default: the first ones, then 1 in 100"
    )
    races: bool = flag(
        "report accesses of virtual ranks to exposed memory that nothing orders (one-sided calls, loads and stores)"
    )
    ties: str | None = option(
        "order of virtual ranks at the same time: fifo (by number; default), reverse, random:SEED",
        "ORDER",
    )
    sums: str | None = option(
        "order in which virtual ranks add floats: mpi (default), or gloo for the bits of --backend torch",
        "LIBRARY",
    )
    out: Out = None
    overwrite: Overwrite = False
    observe: Observers = ()
    json: Json = False
    quiet: Quiet = False

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Return the command; `arguments` are all words after `--`, and all unknown options.

        A file with a `main(comm)` takes none.
        """
        own, rest = split_at_dashes(argv)
        parser = parser_of(cls)
        given, unknown = parser.parse_known_args(own)
        command = cls(**vars(given))
        command.file = program_file(command.file)
        # On real ranks the call refuses them, with its own message.
        takes_any = command.is_real or (command.file.is_file() and command.runs_whole)
        if unknown and not takes_any:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        if rest and not takes_any:
            refuse_arguments(rest)
        for name, hint in parser.mistyped([] if command.is_real or command.quiet else unknown):
            print_note_above_bar(
                f"{name} is passed to the program; {hint} Arguments after -- are passed without this note"
            )
        command.arguments = unknown + rest
        return command

    @property
    def is_real(self) -> bool:
        return BACKENDS[self.backend].is_real

    @cached_property
    def program(self) -> ProgramFile:
        return ProgramFile.read(self.file, whole=self.whole)

    @property
    def runs_whole(self) -> bool:
        """Whether virtual ranks run the file whole, or the processes that it starts are the ranks."""
        return self.program.starts_ranks if self.ranks is None else self.program.is_whole

    @property
    def wants_bar(self) -> bool:
        """Whether rank 0 shows a bar: a rank's standard error is not a terminal, so its launcher decides."""
        return PROGRESS in os.environ or (sys.stderr.isatty() and not self.quiet)

    def __call__(self) -> int:
        self.observe = list(dict.fromkeys(self.observe))
        if self.is_real:
            return self._on_real_ranks()
        if self.survive:
            raise ParameterError(
                "--survive is for --backend mpi: virtual ranks always survive the death of others"
            )
        if self.check_calls:
            raise ParameterError(
                "--check-calls is for --backend mpi and torch: virtual ranks always check their calls"
            )
        if self.ranks is None and not self.program.starts_ranks:
            raise ParameterError("virtual ranks need their number: give --ranks N")
        self._require_own_folder()
        with stoppable(), ended_in_c(), stdout_for_the_totals(as_json=self.json):
            result = run(
                self.program,
                ranks=self.ranks,
                platform=self.platform,
                stragglers=self.straggler,
                faults=self.faults,
                compute=self.compute,
                seed=self.seed,
                deadline_s=self.deadline,
                ties=self.ties or "fifo",
                sums=self.sums or "mpi",
                eager=self.eager,
                check_steps=self.check_steps,
                races=self.races,
                parameters=parameters(self.set),
                argv=self.arguments,
                options=self._options,
                out=self.out,
                overwrite=self.overwrite,
                resume=self.resume,
                trace=self.trace,
                record_every=self.record_every,
                record_ranks=self.record_ranks,
                observe=self.observe,
                progress=self.wants_bar,
                on_error=print_error_above_bar,
                on_note=None if self.quiet else print_note_above_bar,
            )
        print_result(result, out=self.out, as_json=self.json, quiet=self.quiet)
        # If all ranks die at once, no rank raises, and a job script would count the run as complete.
        return WorldError.exit_status if result.what.get("all_dead") else 0

    @property
    def _options(self) -> dict[str, Any]:
        """How an unmodified program is run."""
        given = {"carrier": self.carrier, "cuda_as_cpu": self.cuda_as_cpu, "stubs": tuple(self.stub)}
        return {name: value for name, value in given.items() if value}

    def _require_own_folder(self) -> None:
        from spawnsim.record.folder import named, require_own

        if self.out is not None and not (self.overwrite or self.resume):
            require_own(named(self.out))

    def _require_free(self) -> None:
        from spawnsim.record.folder import require_free

        if self.out is not None:
            require_free(Path(self.out), overwrite=self.overwrite or self.resume, empty_too=True)

    # ------------------------------------------------------------------------------------------------ real ranks
    def _on_real_ranks(self) -> int:
        refuse_arguments(self.arguments)
        if self.trace:
            raise ParameterError(
                "--trace is for virtual ranks; for real ranks `spawnsim trace` draws the recorded rows and events"
            )
        if self.races:
            raise ParameterError("--races is for virtual ranks: real ones do not show their accesses")
        from spawnsim.real.launch.launchers import detect_launcher
        from spawnsim.real.launch.processes import monitor

        here = detect_launcher()
        starts = here.may_start and self.ranks not in (None, 1)
        if not starts:
            # Before anything is loaded: the fork must copy neither threads, as numpy starts them, nor an initialized
            # MPI, and until then a rank has no monitor.
            monitor(here.rank, os.environ)  # from here on this is the rank, and its parent is the monitor
        # A process with threads cannot guarantee that its job dies with it.
        with loading_without_threads() if starts else contextlib.nullcontext():
            from spawnsim.record import ranks_named
            from spawnsim.record.folder import named

        unfit = [OPTIONS[name] for name in VIRTUAL_ONLY if getattr(self, OPTIONS[name][2:]) is not None]
        if unfit:
            raise ParameterError(f"{of_virtual_ranks(unfit)}; --backend {self.backend} takes real time")
        require_observers(self.observe, self.out)
        if self.out is not None:
            self.out = str(named(self.out))
        if self.survive and not BACKENDS[self.backend].survives:
            raise ParameterError(
                f"--survive: a job of --backend {self.backend} ends when a rank dies; give --backend mpi"
            )
        if self.survive and self.check_calls:
            raise ParameterError(
                "--check-calls and --survive: the comparison of calls also waits for dead ranks; give one of the two"
            )
        # A run that is resumed with fewer ranks keeps its own choice, restricted to the remaining ranks.
        ranks_named(self.record_ranks, None if self.resume else self.ranks if starts else here.size)
        if starts:
            return self._start()
        if self.ranks not in (None, here.size):
            raise ParameterError(
                f"-n {self.ranks}: this process is one of {here.size} ranks already; omit -n"
            )
        return self._be_a_rank(here)

    def _start(self) -> int:
        import tempfile

        from spawnsim.options import arguments_of
        from spawnsim.real.launch.launchers import start
        from spawnsim.record.folder import version
        from spawnsim.record.manifest import own_command

        assert self.ranks is not None
        self.program.require_main(self.ranks)  # otherwise each rank would report it
        self._require_free()
        self._require_own_folder()
        options = {name: getattr(self, name) for name in HANDED_ON}
        arguments = [
            part
            for name, value in options.items()
            if value not in (None, False)
            for part in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
        ]
        arguments += arguments_of(parameters(self.set))
        # The launcher serves all other observers.
        arguments += ["--observe", "live"] if "live" in self.observe else []
        if self.wants_bar:
            os.environ[PROGRESS] = "1"
        out = None if self.out is None else Path(self.out)
        kept, earlier = "", None if out is None else version(out)
        with (
            tempfile.TemporaryDirectory(prefix="spawnsim-") as registry,
            watched(out, self.observe, registry),
        ):
            ended = start(
                self.file, self.ranks, arguments, survive=self.survive, registry=Path(registry),
                command=own_command(),
            )  # fmt: skip
            # The launcher merges, since killed ranks could not, and the surviving ranks may have been stopped.
            if out is not None and tidy(out, ended, earlier):
                kept = f"recorded until then: {out}"
        if ended.cause:
            print("; ".join(filter(None, [f"spawnsim: {ended.cause}", kept])), file=sys.stderr)
        elif ended.status and kept:  # a rank has reported why, but not whether all could write
            print(f"spawnsim: {kept}", file=sys.stderr)
        if ended.mismatch:
            print(
                f"spawnsim: calls do not fit: `spawnsim run {self.file} --ranks {self.ranks}` shows them and their "
                "lines; --check-calls shows collective calls",
                file=sys.stderr,
            )
        return ended.status

    def _be_a_rank(self, here: LaunchContext) -> int:
        from spawnsim.real.launch.launchers import require_fit
        from spawnsim.real.runtime.registry import (
            CHECK_CALLS,
            COMMAND,
            ENDED,
            REGISTRY,
            SURVIVE,
            register,
            register_stage,
            scratch_folder,
        )

        # After the monitor's fork: the launcher started another process than the rank's.
        register(here.rank, os.environ, os.getpid())
        if self.survive:
            os.environ[SURVIVE] = "1"
        if self.check_calls:
            os.environ[CHECK_CALLS] = "1"
        # Removed: a run that the program itself starts has its own command.
        command = os.environ.pop(COMMAND, None)
        write_whole_lines(sys.stdout, sys.stderr)
        out = None if self.out is None else Path(self.out)
        with stdout_for_the_totals(as_json=self.json):
            try:
                if BACKENDS[self.backend].launcher == "mpiexec":
                    require_fit(here)
                self._require_free()  # each rank checks before any rank has begun to write
                if (
                    REGISTRY not in os.environ
                ):  # the launcher has checked, and observers may have begun to write
                    self._require_own_folder()
                job = Job(
                    program(self.program, parameters(self.set)), self.backend,
                    out=out or scratch_folder(os.environ), seed=self.seed,
                    deadline_s=DEADLINE_S if self.deadline is None else self.deadline, progress=self.wants_bar,
                    keep=out is not None, resume=self.resume, record_every=self.record_every,
                    record_ranks=self.record_ranks, observed="live" in self.observe, command=command,
                )  # fmt: skip
                # The launcher watches ranks that it has started; otherwise the first rank does.
                with watched(out, [] if here.rank or REGISTRY in os.environ else self.observe):
                    result = run_rank(job)
            # Before its program began: an error of the program itself does not get here.
            except SpawnsimError as error:
                return _never_began(error, here)
        if result is not None:
            print_result(result, out=self.out, as_json=self.json, quiet=self.quiet)
        # Last: after this the launcher counts the end of the process as the end of a complete rank.
        register_stage(ENDED, here.rank, os.environ)
        return 0


HANDED_ON = (
    "backend", "seed", "deadline", "json", "quiet", "out", "overwrite", "resume", "check_calls", "record_every",
    "record_ranks",
)  # fmt: skip
"""Options that the launcher passes to its ranks unchanged."""


def print_result(result: Run, *, out: str | None, as_json: bool, quiet: bool) -> None:
    """Print the warnings of a finished run, and its totals, according to `--json` and `--quiet`."""
    for sentence in () if quiet else result.what.get("notes", ()):
        print(f"spawnsim: note: {sentence}", file=sys.stderr)
    print_warnings(result.what.get("warnings", ()))
    if as_json:
        print(json.dumps(dict(result.totals)))
    elif not quiet:
        facts = shown_totals(result.totals, result.table.rows) | ({} if out is None else {"folder": out})
        if "reproducible" in result.what:
            leaks = result.what["leaks"]
            facts["reproducible"] = f"no: {'; '.join(leaks)}" if leaks else "yes"
        print("\n".join(f"{name:16} {shown(value)}" for name, value in facts.items()))


def stdout_for_the_totals(*, as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Return a block in which the program's output does not mix with the JSON."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def write_whole_lines(*streams: Any) -> None:
    """Let streams write only whole lines, so that launchers do not mix lines of several ranks."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _never_began(error: Exception, here: LaunchContext) -> int:
    """Report why this rank cannot begin, if no other rank has, and release the waiting ranks. Return the status."""
    from spawnsim.real.launch.processes import end_job
    from spawnsim.real.runtime.registry import WORLD_ERROR, record_first_end, wait_for_first_end

    status = exit_code(error) if isinstance(error, SpawnsimError) else InternalError.exit_status
    if status == WORLD_ERROR:  # another rank has died, and its monitor reports how
        wait_for_first_end(os.environ)
    # A single rank reports: usually all ranks find the same fault at once, and n equal messages hide it.
    first = record_first_end(status, "", os.environ)
    if first is None:  # the job was not started by spawnsim
        time.sleep(0.0 if here.rank == 0 else TURN_S)  # usually all ranks find the same fault
    if first is not False:
        error.add_note(f"spawnsim: rank {here.rank} of {here.size} did not start; the job ends")
        report_error(error) if isinstance(error, SpawnsimError) else report_internal_error(error)
        if first is None:
            end_job(status, os.environ)
    return status


# ------------------------------------------------------------------------------------------------------- resume
@dataclass(kw_only=True)
class Resume(Command):
    """Continue a run from its newest checkpoint (comm.checkpoint): the program, its parameters and its circumstances
    come from the folder, unless options of `spawnsim run` replace them. The program in the folder
    is executed: resume only folders that you trust.
    """

    examples = ("spawnsim resume runs/a", "spawnsim resume runs/a --ranks 8")
    run: RunFolder
    program: KeptProgram = None
    backend: str | None = option("kind of the ranks; default: as in RUN", choices=BACKENDS)

    @classmethod
    def parse(cls, argv: Sequence[str]) -> Self:
        """Return the command; `arguments` are options of `spawnsim run`."""
        given, rest = parser_of(cls).parse_known_args(list(argv))
        command = cls(**vars(given))
        command.arguments = rest
        return command

    def __call__(self) -> int:
        from spawnsim import checkpoints
        from spawnsim.options import arguments_of
        from spawnsim.record.folder import read_manifest
        from spawnsim.record.manifest import INPUTS

        what = read_manifest(self.run)["what"]
        if what.get("columnar"):
            raise ParameterError(
                f"{self.run} is a run over columns: repeat its command, spawnsim columnar …, with --resume"
            )
        found = checkpoints.newest(self.run)
        file = self.program or self.run / INPUTS / "program" / Path(str(what.get("file"))).name
        if not file.is_file():
            raise ParameterError(f"{self.run} holds no program: give --program FILE")
        # If the program was fixed since, its user may expect the new version to run, and not the kept one.
        kept = "" if self.program else f", with the program in the folder, {file}; another: --program FILE"
        print(f"spawnsim: {self.run} continues at iteration {found.iteration}{kept}", file=sys.stderr)
        backend = self.backend or str(what.get("backend", "virtual"))
        virtual = backend == "virtual"
        gives_faults = any(each.partition("=")[0] == OPTIONS["faults"] for each in self.arguments)
        if what.get("all_dead") and virtual and not gives_faults:
            print(
                f"spawnsim: all ranks have died in {self.run}, and its fault plan would take effect again; without it: "
                f"spawnsim resume {self.run} --faults ''",
                file=sys.stderr,
            )
        # Real ranks have no virtual circumstances: a run that is resumed on real ranks drops them.
        fit = [name for name in _CIRCUMSTANCES if virtual or name not in VIRTUAL_ONLY]
        own = [part for each in fit for part in _circumstance(self.run, what, each)]
        recorded = what.get("parameters")
        if isinstance(recorded, dict):
            own += arguments_of({name: each for name, each in recorded.items() if each is not None})
        own += [OPTIONS[name] for name in ("eager", "check_steps", "races") if virtual and what.get(name)]
        line = [str(file), "--backend", backend, *own, "--out", str(self.run), "--resume", *self.arguments]
        return RunCommand.parse(line)()


_CIRCUMSTANCES = (
    "ranks", "seed", "deadline_s", "platform", "stragglers", "faults", "compute", "ties", "sums", "record_every",
    "record_ranks",
)  # fmt: skip


def _circumstance(folder: Path, what: Mapping[str, Any], name: str) -> list[str]:
    """Return the option that sets a circumstance again; for a file, the folder's copy."""
    from spawnsim.record.manifest import INPUTS

    value = what.get(name)
    if value is None:
        return []
    if isinstance(value, (dict, list)):
        raise ParameterError(
            f"{folder}: its {name} was a Python object. Give {OPTIONS[name]}, or continue in Python: "
            "spawnsim.run(..., out=DIR, resume=True)"
        )
    kept = folder / INPUTS / name / Path(str(value)).name
    return [OPTIONS[name], str(kept if kept.is_file() else value)]
