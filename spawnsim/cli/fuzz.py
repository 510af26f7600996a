"""`spawnsim fuzz FILE`: draw cases, carry them out, say what broke, how often each fault struck, and how to replay it.

Every dimension of a case is an option that can be fixed, so the command that replays a failure is this one, with all
of them fixed.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spawnsim.cli.listing import program_file
from spawnsim.errors import ParameterError
from spawnsim.fuzzing.campaign import Failure, Found, Target, campaign
from spawnsim.fuzzing.cases import DEADLINE_S, DEFAULT_FAULTS, SURVIVED, Space
from spawnsim.options import Parser, parameters, split_at_dashes, time_limit
from spawnsim.run.process_setup import stoppable
from spawnsim.run.program import is_unmodified, refuse_arguments, tree_of
from spawnsim.units import counted, seconds, text_table

RUNS = 1000
PAIRS = 40  # pairs of call and fault that are shown
NONE = ("none", "")


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; 1 if anything broke."""
    own, own_arguments = split_at_dashes(argv)
    options = _parser().parse_args(own)
    options.file = program_file(options.file)
    tree_of(options.file)  # raises if it cannot be read
    unmodified = options.whole or is_unmodified(options.file)
    if own_arguments and not unmodified:
        refuse_arguments(own_arguments)
    if options.runs < 1 or options.seed < 0 or options.jobs < 0:
        raise ParameterError("--runs must be at least 1, --seed and --jobs at least 0")
    space = _space(options, own_arguments, unmodified=unmodified)
    target = Target(options.file, options.whole)
    # A pool takes two seconds to begin, in which one process is done with a few cases.
    jobs = options.jobs if options.runs > 1 else 0
    with stoppable(), _bar(options) as told:
        found = campaign(
            target, space, range(options.seed, options.seed + options.runs), jobs=jobs, shrink=not options.no_shrink,
            told=told, seconds=math.inf if options.seconds is None else seconds(options.seconds),
        )  # fmt: skip
    if options.json:
        print(json.dumps(document(found, options.file)))
    else:
        print(report(found, str(options.file)))
    return 1 if found.failures else 0


def _space(options: Any, argv: Sequence[str], *, unmodified: bool) -> Space:
    """Return what the options say is to be drawn."""
    world = {
        name: getattr(options, name) for name in ("platform", "compute") if getattr(options, name) is not None
    }
    if options.deadline is not None:
        world["deadline_s"] = options.deadline
    elif unmodified:  # written for an MPI that knows no deadlines
        world["deadline_s"] = math.inf
    if argv:
        world["argv"] = tuple(argv)
    how: dict[str, Any] = {}
    if options.straggler is not None:
        how["stragglers"] = [None if word in NONE else word for word in options.straggler.split(";")]
    if options.alive is not None:
        how["alive_s"] = math.inf if options.alive in NONE else seconds(options.alive)
    if options.ties is not None:
        how["ties"] = options.ties.split(",")
    faults = options.faults
    if faults is None:
        faults = DEFAULT_FAULTS + SURVIVED * options.survive
    return Space(
        ranks=numbers(options.ranks), faults=faults,
        parameters=parameters(options.set), world=world, survive=options.survive, **how,
    )  # fmt: skip


def numbers(text: str) -> list[int]:
    """Return the numbers of ranks that a text names: "2-8", "4,8,64".

    >>> numbers("2-4,8")
    [2, 3, 4, 8]
    """
    found: list[int] = []
    for word in text.split(","):
        first, _, last = word.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ParameterError(f"--ranks {text}: write 8, 2-8 or 4,8,64")
        found += range(int(first), int(last or first) + 1)
    return found


def report(found: Found, file: str) -> str:
    """Return what a campaign has found, as text."""
    parts = [_failure(found, key, file) for key in sorted(found.failures)]
    kinds = found.kinds()
    rows = [(kind, f"{found.drawn[kind]:,}", f"{kinds[kind]:,}") for kind in sorted(found.drawn | kinds)]
    if rows:
        parts.append(text_table(("fault", "cases with it", "times it struck"), rows))
    unproved = [kind for kind in sorted(found.drawn) if not kinds[kind]]
    if unproved:
        parts.append(f"never struck, so nothing is known about it: {', '.join(unproved)}")
    pairs = [
        f"{kind} × {call or 'an event'} {times:,}" for (kind, call), times in found.fired.most_common(PAIRS)
    ]
    if pairs:
        parts.append(f"fault × call: {', '.join(pairs)}" + " …" * (len(found.fired) > PAIRS))
    rate = f", {found.runs / found.seconds * 60:,.0f} a minute" if found.seconds > 1 else ""
    ended = f"; {found.ended:,} were ended by their faults, as MPI lets them" if found.ended else ""
    broken = sum(found.counts.values())
    told = (
        f"{broken:,} broke something, in {counted(len(found.failures), 'way')}" if broken else "nothing broke"
    )
    parts.append(f"{counted(found.runs, 'case')} in {found.seconds:.1f} s{rate}: {told}{ended}")
    return "\n\n".join(parts)


def _failure(found: Found, key: tuple[str, str], file: str) -> str:
    failure, small = found.failures[key], found.small.get(key)
    where = f" at {failure.place}" if failure.place else ""
    shrunk = small is not None and small.case != failure.case
    lines = [
        f"{failure.what}{where}: {found.counts[key]:,} of {found.runs:,} cases", failure.message, failure.table,
        f"{'as found' if shrunk else 'replay'}: {failure.case.command(file)}",
    ]  # fmt: skip
    if small is not None and shrunk:
        lines += [
            "the same error in the smallest case:", small.message, small.table,
            f"replay: {small.case.command(file)}",
        ]  # fmt: skip
    return "\n".join(filter(None, lines))


def document(found: Found, file: Path) -> dict[str, Any]:
    """Return what a campaign has found, as JSON can hold it."""

    def told(failure: Failure) -> dict[str, Any]:
        return asdict(failure) | {
            "case": json.loads(failure.case.to_json()),
            "replay": failure.case.command(str(file)),
        }

    return {
        "runs": found.runs, "seconds": found.seconds, "ended": found.ended, "drawn": dict(found.drawn),
        "fired": [[kind, call, times] for (kind, call), times in sorted(found.fired.items())],
        "failures": [
            told(failure) | {"count": found.counts[key], "small": told(found.small.get(key, failure))}
            for key, failure in sorted(found.failures.items())
        ],
    }  # fmt: skip


def _bar(options: Any) -> AbstractContextManager[Any]:
    """Return a block that gives a function which shows how far the campaign is."""
    if not (options.progress or (sys.stderr.isatty() and not options.quiet)):
        return nullcontext(lambda found: None)
    return _Bar(options.runs)


class _Bar:
    """A bar of cases on standard error."""

    def __init__(self, runs: int) -> None:
        self._runs = runs

    def __enter__(self) -> Any:
        from tqdm import tqdm

        self._bar = tqdm(total=self._runs, unit=" cases", leave=False, dynamic_ncols=True)
        return self._tell

    def __exit__(self, *_error: object) -> None:
        self._bar.close()

    def _tell(self, found: Found) -> None:
        self._bar.set_postfix_str(f"{len(found.failures)} failures", refresh=False)
        self._bar.update(found.runs - self._bar.n)


def _parser() -> Parser:
    parser = Parser(
        prog="spawnsim fuzz",
        description="Run a file under many seeds, fault plans, delays and orders of simultaneous events; say "
        "what breaks, in the smallest case, with the command that replays it. An unmodified program's arguments come "
        "after --.",
    )
    add = parser.add_argument
    add("file", type=Path, help="file with main(comm), unmodified program, or name (`spawnsim list studies`)")
    add("--runs", type=int, default=RUNS, metavar="N", help="cases (default: %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        metavar="K",
        help="of the first case; the next has the next one (default: 0)",
    )
    add(
        "-n",
        "--ranks",
        default="2-8",
        metavar="LIST",
        help="numbers of ranks to draw from: 8, 2-8, 4,8,64 (default: 2-8)",
    )
    _add_dimensions(parser)
    _add_campaign(parser)
    return parser


def _add_dimensions(parser: Parser) -> None:
    """Add what cases are drawn from, beside ranks and seeds."""
    add = parser.add_argument
    add(
        "--faults", metavar="F",
        help="kinds of fault to draw, and faults of every case, separated by ';': 'crash; pause', 'crash:3@2s', 'none' "
        f"(default: '{DEFAULT_FAULTS}', and restart with --survive)",
    )  # fmt: skip
    add(
        "--ties",
        metavar="LIST",
        help="orders of simultaneous events: fifo, reverse, random, random:SEED (default: all)",
    )
    add(
        "--straggler", "--stragglers", metavar="LIST", help="separated by ';' (default: 'none;lognormal:0.3')"
    )
    add("--platform", metavar="P", help="virtual network: a name or a TOML file")
    add("--compute", metavar="S", help="seconds of a comm.compute() that states none, as for `spawnsim run`")
    add(
        "--deadline",
        type=time_limit,
        metavar="S",
        help=f"seconds that one call may wait (default: {DEADLINE_S:g}; unmodified: no limit)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of main; repeatable",
    )
    add(
        "--alive", metavar="S",
        help="virtual seconds after the last fault within which each rank must get on; none: not asked (default: some, "
        "in half of the cases)",
    )  # fmt: skip
    add(
        "--survive", action="store_true",
        help="the program promises to go on when ranks die and calls meet deadlines: ending in them is a failure, too",
    )  # fmt: skip
    add("--whole", action="store_true", help="run the file whole on every rank, as an unmodified program")


def _add_campaign(parser: Parser) -> None:
    """Add how cases are carried out, and what is said of them."""
    add = parser.add_argument
    add(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: one per core; 0: this one)",
    )
    add("--seconds", metavar="S", help="begin no further case after so many seconds, or such as 10min")
    add("--no-shrink", action="store_true", help="do not look for smaller cases of what fails")
    add("--json", action="store_true", help="print one JSON object")
    add("--progress", action="store_true", help="a progress bar also where there is no terminal")
    add("--quiet", action="store_true", help="no progress bar")
