"""`spawnsim columnar POLICY`: a policy on very many ranks, each a row of arrays, with or without models that train."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spawnsim import columnar, units
from spawnsim.cli.run import print_result
from spawnsim.columnar.durations import STREAMS
from spawnsim.columnar.running import SAMPLE
from spawnsim.errors import ParameterError
from spawnsim.options import Parser, nearest, parameters
from spawnsim.record.folder import named, require_own
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import load_module

if TYPE_CHECKING:
    from spawnsim.policies import SpawnPolicy

POLICIES = ("average", "selective", "diloco")
MODEL = "100 MB"


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    options = parser().parse_args(argv)
    policy = made(options.policy, parameters(options.set))
    if options.train is not None and options.quality:
        raise ParameterError("--train and --quality: give one, models or numbers that stand for them")
    training = None if options.train is None else trained(Path(options.train))
    if options.out is not None and not options.overwrite:
        require_own(named(options.out))
    model = options.model if options.model is not None or training is not None else MODEL
    with stoppable():
        run = columnar.run(
            policy,
            ranks=options.ranks,
            iterations=options.iterations,
            model_nbytes=None if model is None else units.nbytes(model),
            quality=_called(columnar.RandomWalk, parameters(options.quality)) if training is None else None,
            training=training,
            platform=options.platform,
            stragglers=options.straggler,
            faults=options.faults,
            mtbf_s=None if options.mtbf is None else units.seconds(options.mtbf),
            detection_s=units.seconds(options.detection),
            seed=options.seed,
            compute=options.compute,
            streams=options.streams,
            sample=options.sample,
            out=options.out,
            overwrite=options.overwrite,
        )
    print_result(run, options)
    return 0


def made(name: str, given: dict[str, Any]) -> SpawnPolicy:
    """Return the policy of a name.

    Args:
        name: one of `POLICIES`.
        given: parameters of its class.

    Returns:
        The policy that an ordinary program would make.

    Raises:
        ParameterError: its class has no such parameter.
    """
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
    """Return how the models of a file train: it defines `build`, `loss` and `data`, and perhaps more of `Training`.

    Args:
        path: a Python file.

    Returns:
        The training.

    Raises:
        ParameterError: the file cannot be read, is not Python, or lacks one of the three.
        ProgramError: the file raised.
    """
    defined = vars(load_module(path))
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
    takes = [name for name in inspect.signature(kind).parameters if name != "model_builder"]
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


def parser() -> Parser:
    """Return the options of `spawnsim columnar`.

    Returns:
        The parser.
    """
    parser = Parser(
        prog="spawnsim columnar",
        description="A policy on up to millions of ranks, each a row of arrays: all meet where it is due, with numbers "
        "that stand for models, or (--train) models that train. docs/columnar.md says what it can and cannot run.",
    )
    add = parser.add_argument
    add(
        "policy",
        choices=POLICIES,
        help="AverageAllPolicy, AsyncSelectiveAveragingPolicy (lockstep), OuterOptimizerPolicy",
    )
    add("-n", "--ranks", type=int, required=True, metavar="N", help="how many ranks")
    add("--iterations", type=int, default=100, metavar="N", help="default: 100")
    add(
        "--model",
        metavar="BYTES",
        help=f"one model as it travels, such as '2 GB'; default: {MODEL}, or what that of --train takes",
    )
    add(
        "--train",
        metavar="FILE",
        help="of Python, that defines build(rng), loss(model, *batch), data(rng, rank, size), perhaps score(model)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a parameter of the policy; again for more",
    )
    add(
        "--quality",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the random walk of the metric: spread, gain, drift",
    )
    _add_circumstances(parser)
    add("--out", metavar="DIR", help="run folder to write")
    add("--overwrite", action="store_true", help="replace the run in DIR")
    add("--json", action="store_true", help="print the totals as JSON")
    add("-q", "--quiet", action="store_true", help="print nothing but warnings and errors")
    return parser


def _add_circumstances(parser: Parser) -> None:
    """Add where and how ranks run."""
    add = parser.add_argument
    add("--platform", metavar="NAME|FILE", help="default: as of `spawnsim run`")
    add("--straggler", metavar="KIND", help="such as lognormal:0.3+slow:0.02,5")
    add("--faults", metavar="PLAN", help="crashes, pauses and slow-downs, such as crash:17@3.5s")
    add("--mtbf", metavar="TIME", help="mean time between failures of one rank, such as 50000h")
    add(
        "--detection",
        default="0s",
        metavar="TIME",
        help="how long the others wait where a death is noticed; default: 0s",
    )
    add("--compute", metavar="TIME", help="of an iteration, such as 10ms; default: the platform's")
    add(
        "--streams",
        choices=STREAMS,
        default="ranks",
        help="draws of an ordinary run (default: ranks), or (bulk) for all ranks at once",
    )
    add(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help=f"ranks with rows and events; default: {SAMPLE}",
    )
    add("--seed", type=int, default=0, help="of every random stream; default: 0")
