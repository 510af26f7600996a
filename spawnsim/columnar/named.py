"""Experiments by name: a policy, and the training that a program's file defines, with the parameters of both.

A file defines `training(**parameters)`, which returns a `Training`, or its functions themselves: `build`, `loss`,
`data`, and perhaps more. If it has `main` as well, `main`'s defaults apply, so that a run over columns has the
parameters of an ordinary run.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from spawnsim import units
from spawnsim.columnar.experiment import Experiment
from spawnsim.columnar.models import RandomWalk
from spawnsim.columnar.supported import InTurn
from spawnsim.columnar.training import Training
from spawnsim.errors import ParameterError
from spawnsim.options import nearest
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EASGDPolicy,
    GossipPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
    graphs,
)
from spawnsim.record.manifest import file_digest
from spawnsim.run.program import ProgramFile

POLICIES: dict[str, tuple[type[SpawnPolicy], dict[str, Any]]] = {
    "average": (AverageAllPolicy, {}),
    "selective": (AsyncSelectiveAveragingPolicy, {"model_builder": None}),
    "diloco": (OuterOptimizerPolicy, {}),
    "gossip": (GossipPolicy, {}),
    "population": (PopulationBasedTrainingPolicy, {}),
    "easgd": (EASGDPolicy, {}),
    "sparta": (SPARTAPolicy, {}),
    "streaming": (StreamingDiLoCoPolicy, {}),
}
NONE = "none"  # ranks train alone, and report every `average_every` iterations
GRAPHS = ("ring", "torus", "complete", "exponential", "one_peer_exponential", "random_pairs")
# Settings that do not belong to the policy.
OF_RUN = ("iterations", "streams", "sample", "mtbf", "detection", "checkpoint_every")
OF_METRIC = tuple(inspect.signature(RandomWalk).parameters)
MODEL = "100 MB"
ITERATIONS = 100


def experiment(
    policy: str | None, given: Mapping[str, Any], *, file: Path | None = None, model: str | None = None, **more: Any
) -> Experiment:  # fmt: skip
    """Return an experiment.

    Args:
        policy: name of the policy; None: the parameter `policy`, or the default of `main`.
        given: parameters of the policy, of the training or the random walk, and of the run (`OF_RUN`).
        file: the file whose models train; None: numbers in place of models.
        model: size of one transmitted model, such as "2 GB"; None: that of the trained model, or 100 MB.
        more: further arguments of `Experiment`.

    Raises:
        ParameterError: an unknown policy or parameter, or a file without a training.
    """
    module = None if file is None else _module(file.absolute(), file_digest(file))
    of_main = {} if module is None else _defaults(module.get("main"))
    asked = dict(given)
    name = policy or asked.pop("policy", of_main.get("policy"))
    parts = [] if name == NONE else str(name).split("+")
    if not {*parts} <= {*POLICIES}:
        raise ParameterError(
            f"policy={name!r}: over columns choose {', '.join([NONE, *POLICIES])}, or several, as a+b"
        )
    of_training = OF_METRIC if module is None else _takes(module.get("training"))
    of_policy = [*dict.fromkeys(each for part in parts for each in _parameters_of(part))] or ["average_every"]
    if both := {*of_training} & {*of_policy} & {*asked}:
        raise ParameterError(
            f"{min(both)}: training() and the policy {name} both have this parameter; rename one"
        )
    # Parameters of `main` for other policies change nothing, as in `main` itself.
    others = {each for kind in POLICIES for each in _parameters_of(kind)} & {*of_main}
    if unknown := [each for each in asked if each not in {*OF_RUN, *of_training, *of_policy, *others}]:
        hint = nearest(unknown[0], [*of_policy, *of_training, *OF_RUN])
        kinds = " and ".join(POLICIES[part][0].__name__ for part in parts) or NONE
        raise ParameterError(
            f"{kinds} takes no {', '.join(unknown)}; {hint}{' ' * bool(hint)}its parameters: {', '.join(of_policy)}; "
            f"further: {', '.join([*of_training, *OF_RUN])}"
        )
    asked = {
        each: value for each, value in of_main.items() if each not in OF_RUN or each == "iterations"
    } | asked
    own = {each: asked[each] for each in OF_RUN if each in asked}
    learning = {each: asked[each] for each in of_training if each in asked}
    of_policies = {"average_every": 1} | {each: asked[each] for each in of_policy if each in asked}
    policies = [_policy(part, of_policies) for part in parts]
    alone: SpawnPolicy = InTurn(*policies, report_every=None if policies else of_policies["average_every"])
    training = None if module is None or file is None else _training(file, module, learning)
    nbytes = model if model is not None or training is not None else MODEL
    return Experiment(
        policy=policies[0] if len(policies) == 1 else alone,
        iterations=own.get("iterations", ITERATIONS),
        model_nbytes=None if nbytes is None else units.nbytes(nbytes),
        quality=called(RandomWalk, learning) if training is None else None,
        training=training,
        mtbf_s=units.seconds(own["mtbf"]) if "mtbf" in own else None,
        detection_s=units.seconds(own.get("detection", 0.0)),
        **{each: own[each] for each in ("streams", "sample", "checkpoint_every") if each in own},
        **more,
    )


@lru_cache(maxsize=4)
def _module(file: Path, digest: str) -> dict[str, Any]:
    """Return the names that a file defines; loaded once, since models train together if their functions are equal."""
    return vars(ProgramFile.read(file).module())


def _policy(name: str, given: Mapping[str, Any]) -> SpawnPolicy:
    """Return a policy with its parameters among those given; a graph may be given by name."""
    kind, usual = POLICIES[name]
    own = usual | {each: given[each] for each in _parameters_of(name) if each in given}
    if isinstance(graph := own.get("graph"), str):
        if graph not in GRAPHS:
            raise ParameterError(f"graph={graph!r}: choose one of {', '.join(GRAPHS)}")
        own["graph"] = getattr(graphs, graph)
    made: SpawnPolicy = called(kind, own)
    return made


def _parameters_of(policy: str) -> list[str]:
    kind, usual = POLICIES[policy]
    return [each for each in kind.parameters() if each not in usual]


def _takes(function: Any) -> list[str]:
    return [] if function is None else [*inspect.signature(function).parameters]


def _defaults(main: Any) -> dict[str, Any]:
    """Return the parameters of `main` that have defaults."""
    given = {} if main is None else inspect.signature(main).parameters
    return {name: each.default for name, each in given.items() if each.default is not each.empty}


def _training(file: Path, defined: Mapping[str, Any], given: Mapping[str, Any]) -> Training:
    """Return the training of a file."""
    if "training" in defined:
        found = defined["training"](**given)
        if not isinstance(found, Training):
            raise ParameterError(
                f"{file}: training() returned a {type(found).__name__}: return a columnar.Training"
            )
        return found
    fields = [each for each in dataclasses.fields(Training) if each.init]
    lacking = [
        each.name for each in fields if each.default is dataclasses.MISSING and each.name not in defined
    ]
    if lacking:
        raise ParameterError(
            f"{file} has no {', '.join(lacking)}: columns need build(rng), loss(model, *batch), data(rng, rank, size), "
            "or training(), which returns a columnar.Training"
        )
    return Training(**{each.name: defined[each.name] for each in fields if each.name in defined})


def called(kind: Any, given: Mapping[str, Any]) -> Any:
    """Call a function with parameters that it takes; raise `ParameterError` if it refuses their types."""
    try:
        return kind(**given)
    except TypeError as error:
        raise ParameterError(f"{kind.__name__}: {error}") from error
