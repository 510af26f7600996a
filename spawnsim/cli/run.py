"""`spawnsim run FILE`: one program on virtual ranks, or on real ones.

This room knows options and how to print totals.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError
from spawnsim.run import Run, run

WORDS = {"true": True, "false": False, "null": None}


def main(argv: Sequence[str]) -> int:
    """Run the subcommand."""
    options = parser().parse_args(argv)
    if options.backend != "virtual":
        from spawnsim.cli.real import run_real

        return run_real(options, parameters(options.set))
    if options.ranks is None:
        raise ParameterError("how many virtual ranks? Give --ranks N")
    with _stdout_for_the_totals(options.json):
        result = run(
            options.file,
            ranks=options.ranks,
            platform=options.platform,
            stragglers=options.straggler,
            faults=options.faults,
            seed=options.seed,
            out=options.out,
            compute=options.compute,
            deadline_s=options.deadline,
            progress=sys.stderr.isatty() and not options.quiet,
            parameters=parameters(options.set),
        )
    show(result, as_json=options.json, quiet=options.quiet, out=options.out)
    return 0


def show(result: Run, *, as_json: bool, quiet: bool, out: Path | None) -> None:
    """Print the totals of a run that has finished."""
    if as_json:
        print(json.dumps(dict(result.totals)))
    elif not quiet:
        facts = {**result.totals, "folder": out}
        print("\n".join(f"{name:16} {_text(value)}" for name, value in facts.items() if value is not None))


def _text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _stdout_for_the_totals(as_json: bool) -> contextlib.AbstractContextManager[object]:
    # What the program itself prints must not mix with the JSON.
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def parameters(settings: Sequence[str]) -> dict[str, Any]:
    """Return the keyword arguments that `--set name=value` options ask for.

    Values are Python literals, or true, false, null; whatever else is text.
    """
    pairs = [setting.partition("=") for setting in settings]
    wrong = [name + sign for name, sign, _ in pairs if not sign or not name.isidentifier()]
    if wrong:
        raise ParameterError(f"--set {wrong[0]}: write --set name=value")
    return {name: _value(text) for name, _, text in pairs}


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """Return `--set` options that `parameters` reads back as these values."""
    return [part for name, value in values.items() for part in ("--set", f"{name}={value!r}")]


def parser() -> argparse.ArgumentParser:
    """Return the options of `spawnsim run`."""
    parser = argparse.ArgumentParser(
        prog="spawnsim run",
        description="Run a file that defines main(comm) on virtual ranks, or (--backend) on real ones.",
    )
    add = parser.add_argument
    add("file", type=Path, help="Python file that defines main(comm)")
    add("-n", "--ranks", type=int, metavar="N", help="how many ranks; real ones are started with mpiexec")
    add("--backend", choices=("virtual", "mpi", "torch"), default="virtual", help="default: virtual")
    add("--platform", metavar="P", help="virtual network: a name (see `spawnsim list`) or a TOML file")
    add("--straggler", metavar="S", help="virtual compute times, such as lognormal:0.3 or pareto:2.5")
    add("--faults", metavar="F", help="virtual fault plan")
    add(
        "--compute", metavar="S", help="seconds of a comm.compute() that states none, such as 0.005 or '5 ms'"
    )
    add("--seed", type=int, default=0, metavar="K", help="of every random stream; default: 0")
    add(
        "--deadline",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that one call may wait; default: 30",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a keyword argument of main; repeatable",
    )
    add("--out", type=Path, metavar="DIR", help="run folder to write: run.json, metrics.npz, events.jsonl")
    add("--json", action="store_true", help="print the totals as one JSON object, and nothing else")
    add("--quiet", action="store_true", help="no progress bar, no totals")
    return parser
