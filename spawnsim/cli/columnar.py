"""`spawnsim columnar POLICY`: a policy on very many ranks, each a row of arrays, with or without models that train."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spawnsim import columnar, units
from spawnsim.cli.declaring import (
    Command,
    Json,
    Out,
    Overwrite,
    PlatformName,
    Quiet,
    Ranks,
    Seed,
    Straggler,
    argument,
    option,
)
from spawnsim.cli.run import print_result
from spawnsim.columnar.experiment import SAMPLE
from spawnsim.errors import ParameterError
from spawnsim.options import nearest, parameters
from spawnsim.record.folder import named, require_own
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import ProgramFile

if TYPE_CHECKING:
    from spawnsim.policies import SpawnPolicy

MODEL = "100 MB"
OF_RUN = ("iterations", "streams", "sample", "mtbf", "detection")  # settings that do not belong to the policy
OF_METRIC = tuple(inspect.signature(columnar.RandomWalk).parameters)


@dataclass(kw_only=True)
class Columnar(Command):
    """Time a policy on up to millions of ranks, each a row of arrays. Ranks exchange numbers in place of
    models, or (--train) models that train. docs/columnar.md lists the supported policies and limits.
    """

    examples = (
        "spawnsim columnar average -n 1000000 --straggler lognormal:0.3 --set average_every=10",
        "spawnsim columnar selective -n 1000000 --set streams=bulk --set mtbf=50000h --set detection=30s",
    )
    policy: Literal["average", "selective", "diloco"] = argument(
        "AverageAllPolicy, AsyncSelectiveAveragingPolicy (lockstep), OuterOptimizerPolicy"
    )
    ranks: Ranks
    model: str | None = option(
        f"size of one transmitted model, such as '2 GB'; default: {MODEL}, or the size of the --train model",
        "BYTES",
    )
    train: Path | None = option(
        "of Python, that defines build(rng), loss(model, *batch), data(rng, rank, size), perhaps score(model)",
        "FILE",
    )
    set: Sequence[str] = option(
        f"a parameter of the policy; of the random walk of the metric: {', '.join(OF_METRIC)}; or iterations=100, "
        f"sample={SAMPLE} (ranks with rows and events), streams=ranks (draws of an ordinary run) or bulk (for all "
        "ranks at once), mtbf=50000h (mean time between failures of one rank), detection=30s (how long the other ranks "
        "wait until they notice a death; default: 0 s); repeatable",
        "NAME=VALUE",
        default=(),
    )
    platform: PlatformName = None
    straggler: Straggler = None
    faults: str | None = option("crashes, pauses and slow-downs, such as crash:17@3.5s", "PLAN")
    compute: str | None = option("of an iteration, such as 10ms; default: the platform's", "S")
    seed: Seed = 0
    out: Out = None
    overwrite: Overwrite = False
    json: Json = False
    quiet: Quiet = False

    def __call__(self) -> int:
        given = parameters(self.set)
        own = {name: given.pop(name) for name in OF_RUN if name in given}
        metric = {name: given.pop(name) for name in OF_METRIC if name in given}
        policy = made(self.policy, given)
        if self.train is not None and metric:
            raise ParameterError(
                f"--train and --set {next(iter(metric))}: give one of them: models, or numbers in their place"
            )
        training = None if self.train is None else trained(self.train)
        if self.out is not None and not self.overwrite:
            require_own(named(self.out))
        model = self.model if self.model is not None or training is not None else MODEL
        with stoppable():
            run = columnar.run(
                policy,
                ranks=self.ranks,
                iterations=own.get("iterations", 100),
                model_nbytes=None if model is None else units.nbytes(model),
                quality=_called(columnar.RandomWalk, metric) if training is None else None,
                training=training,
                platform=self.platform,
                stragglers=self.straggler,
                faults=self.faults,
                mtbf_s=units.seconds(own["mtbf"]) if "mtbf" in own else None,
                detection_s=units.seconds(own.get("detection", 0.0)),
                seed=self.seed,
                compute=self.compute,
                streams=own.get("streams", "ranks"),
                sample=own.get("sample", SAMPLE),
                out=self.out,
                overwrite=self.overwrite,
            )
        print_result(run, out=self.out, as_json=self.json, quiet=self.quiet)
        return 0


def made(name: str, given: dict[str, Any]) -> SpawnPolicy:
    """Return the policy with this name."""
    from spawnsim.policies import AsyncSelectiveAveragingPolicy, AverageAllPolicy, OuterOptimizerPolicy

    kinds: dict[str, tuple[type[SpawnPolicy], dict[str, Any]]] = {
        "average": (AverageAllPolicy, {}),
        "selective": (AsyncSelectiveAveragingPolicy, {"model_builder": None}),
        "diloco": (OuterOptimizerPolicy, {}),
    }
    kind, own = kinds[name]
    policy: SpawnPolicy = _called(kind, {"average_every": 1} | own | given)
    return policy


def trained(path: Path) -> columnar.Training:
    """Return the training that a file defines: `build`, `loss` and `data`, and perhaps more of `Training`."""
    defined = vars(ProgramFile.read(path).module())
    fields = [each for each in dataclasses.fields(columnar.Training) if each.init]
    lacking = [
        each.name for each in fields if each.default is dataclasses.MISSING and each.name not in defined
    ]
    if lacking:
        raise ParameterError(
            f"{path} has no {', '.join(lacking)}: --train needs build(rng), loss(model, *batch), data(rng, rank, size)"
        )
    return columnar.Training(**{each.name: defined[each.name] for each in fields if each.name in defined})


def _called(kind: Any, given: dict[str, Any]) -> Any:
    names = kind.parameters() if hasattr(kind, "parameters") else inspect.signature(kind).parameters
    takes = [name for name in names if name != "model_builder"]
    unknown = [name for name in given if name not in takes and name != "model_builder"]
    if unknown:
        hint = nearest(unknown[0], takes)
        raise ParameterError(
            f"{kind.__name__} takes no {', '.join(unknown)}; {hint}{' ' * bool(hint)}its parameters: {', '.join(takes)}"
        )
    try:
        return kind(**given)
    except TypeError as error:
        raise ParameterError(f"{kind.__name__}: {error}") from error
