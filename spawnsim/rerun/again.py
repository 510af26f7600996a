"""Repeats the run of a run folder on virtual ranks, with its program, parameters, settings and seed.

The program is the copy that the folder keeps, so later edits change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.models.faults import KINDS, FaultPlan
from spawnsim.record import Recorder, Thinned, ranks_named
from spawnsim.record.folder import MANIFEST
from spawnsim.record.manifest import INPUTS
from spawnsim.run import Run
from spawnsim.run.program import ProgramFile, program
from spawnsim.run.result import FINISHED, totals_of
from spawnsim.run.virtual import execute
from spawnsim.run.writer import outcome_of
from spawnsim.scenario import Scenario
from spawnsim.virtual.engine.world import World

TEXTS = ("platform", "stragglers", "compute")  # settings that are texts, or Python objects


@dataclass(frozen=True)
class Again:
    """Everything that a repetition of a folder's run depends on.

    Attributes:
        folder: the run folder.
        recorded: the recorded run.
        file: the program.
        scenario: its settings.
    """

    folder: Path
    recorded: Run
    file: Path
    scenario: Scenario

    @classmethod
    def of(cls, folder: Path, file: Path | None = None) -> Again:
        """Read a run from its folder; `file` replaces the copy of the program that the folder keeps.

        Raises:
            ParameterError: the folder holds no run on virtual ranks, or no program.
        """
        recorded = Run.load(folder)
        what = recorded.what
        if recorded.is_real:
            raise ParameterError(
                f"{folder}: a run on real ranks is not repeatable; runs on virtual ranks are"
            )
        if not what.get("file") or what.get("main") not in (None, "main"):
            raise ParameterError(
                f"{folder}: its program was a function, not a file with main(comm): call spawnsim.run again"
            )
        kept = file or folder / INPUTS / "program" / str(what["file"])
        if not kept.is_file():
            raise ParameterError(f"{folder} holds no copy of {what['file']}: give the program with --program")
        try:
            scenario = _scenario(folder, what)
        except ParameterError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise ParameterError(f"{folder / MANIFEST}: 'what' does not describe a run ({wrong})") from error
        return cls(folder, recorded, kept, scenario)

    @property
    def is_whole(self) -> bool:
        """Whether the whole program was run, without a `main(comm)`."""
        return self.recorded.what.get("main") is None

    @property
    def parameters(self) -> dict[str, Any]:
        """The keyword arguments of `main`."""
        return {} if self.is_whole else dict(self.recorded.what["parameters"])

    def run(
        self,
        recorder: Recorder,
        *,
        prepare: Callable[[World], None] | None = None,
        thinned: bool = False,
    ) -> Run:
        """Repeat the run; a run that ends in an error is returned like any other, with its outcome.

        `prepare` is called with the world before its ranks begin; `thinned` keeps only the rows that the recorded run
        has kept (`record_every`, `record_ranks`).
        """
        what = self.recorded.what
        which = int(what.get("record_every", 1)), ranks_named(what.get("record_ranks"))
        kept = Thinned(recorder, *which) if thinned else recorder
        given = what.get("parameters", {})
        options = {name: value for name, value in given.items() if name != "argv"} if self.is_whole else {}
        argv = given.get("argv", ()) if self.is_whole else ()
        scenario = self.scenario
        outcome, counted = FINISHED, None
        try:
            file = ProgramFile.read(self.file, whole=self.is_whole)
            task = file if self.is_whole else program(file, self.parameters)
            counted = execute(task, scenario, kept, argv=argv, options=options, prepare=prepare)
        except SpawnsimError as error:
            outcome, counted = outcome_of(error), getattr(error, "totals", None)
        table, events = recorder.table(), recorder.events()
        facts = {"ranks": scenario.ranks, "plan": scenario.faults} | (
            asdict(counted) if counted is not None else {}
        )
        leaks = {"leaks": list(facts.get("leaks", ()))}
        return Run(dict(what) | leaks, table, events, totals_of(table, events, facts), outcome)


def _scenario(folder: Path, what: Mapping[str, Any]) -> Scenario:
    values = {name: what.get(name) for name in TEXTS}
    for name, value in values.items():
        if isinstance(value, Mapping):
            raise ParameterError(
                f"{folder}: {name} was a Python object, which a folder cannot restore: call spawnsim.run again"
            )
        kept = folder / INPUTS / name / Path(str(value)).name
        values[name] = str(kept) if isinstance(value, str) and kept.is_file() else value
    deadline_s = what.get("deadline_s")
    return Scenario(
        int(what["ranks"]), faults=_plan(folder, what.get("faults")), seed=int(what["seed"]),
        deadline_s=math.inf if deadline_s is None else float(deadline_s), eager=bool(what.get("eager", False)),
        ties=str(what.get("ties", "fifo")), sums=str(what.get("sums", "mpi")),
        check_steps=bool(what.get("check_steps", False)), races=bool(what.get("races", False)), **values,
    )  # fmt: skip


def _plan(folder: Path, value: Any) -> Any:
    """Return the fault plan of run.json: its text, the file that the folder keeps, or an object with its faults."""
    if isinstance(value, Mapping):
        kinds = {kind.__name__: kind for kind in KINDS.values()}
        faults = []
        for each in value.get("faults", ()):
            fields: dict[str, Any] = {name: v for name, v in each.items() if name != "type"}
            if fields.get("for_s", 0.0) is None:  # JSON has no infinity
                fields["for_s"] = math.inf
            if "members" in fields:
                fields["members"] = tuple(fields["members"])
            faults.append(kinds[each["type"]](**fields))
        return FaultPlan(tuple(faults), int(value.get("seed", 0)))
    kept = folder / INPUTS / "faults" / Path(str(value)).name
    return str(kept) if isinstance(value, str) and kept.is_file() else value
