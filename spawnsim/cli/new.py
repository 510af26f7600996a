"""`spawnsim new KIND NAME`: a commented file to begin with, which runs at once."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

from spawnsim.errors import ParameterError
from spawnsim.options import Parser
from spawnsim.record.sorting import storing

KINDS = {
    "study": "a question, a grid of runs, a figure",
    "policy": "a subclass of SpawnPolicy, and a program that tries it",
    "workload": "data, model, step and accuracy, and a program that trains it",
    "program": "a training loop for virtual and for real ranks",
}
TEMPLATES = Path(__file__).parent / "templates"


def main(argv: Sequence[str]) -> int:
    """Write the file, and say how it is run."""
    options = parser().parse_args(argv)
    path = place(options.name)
    if path.exists():
        raise ParameterError(f"{path} is there already, and is not overwritten: choose another name")
    if not path.parent.is_dir():
        raise ParameterError(f"{path}: there is no folder {path.parent}")
    with storing(path):
        path.write_text(contents(options.kind, path.stem), encoding="utf-8")
    use = f"spawnsim study {path} --quick" if options.kind == "study" else f"spawnsim run {path} --ranks 12"
    sys.stdout.write(f"written: {path}; run it: {use}\n")
    return 0


def parser() -> Parser:
    """Return the options of `spawnsim new`.

    Returns:
        The parser.
    """
    kinds = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    parser = Parser(
        prog="spawnsim new", description=f"Write a commented file to begin with, which runs at once. {kinds}."
    )
    parser.add_argument("kind", choices=tuple(KINDS), help="what to begin")
    parser.add_argument(
        "name", metavar="NAME", help="of the file, with or without .py; a folder may stand before it"
    )
    return parser


def place(name: str) -> Path:
    """Return the path that a name means.

    Raises:
        ParameterError: no module can have this name.
    """
    path = Path(name if name.endswith(".py") else f"{name}.py")
    if not path.stem.isidentifier() or keyword.iskeyword(path.stem):
        raise ParameterError(f"{name!r}: give a name that Python can import, of letters, digits and _")
    # A program's folder comes first where modules are looked for.
    if path.stem in {*sys.stdlib_module_names, "mpi4py", "numpy", "spawnsim", "torch"}:
        raise ParameterError(f"{path} would be imported where programs beside it want the module {path.stem}")
    return path


def contents(kind: str, stem: str) -> str:
    """Return the file of a kind, with a class of its own name if it has one."""
    text = (TEMPLATES / f"{kind}.py.txt").read_text(encoding="utf-8")
    name = "".join(word[:1].upper() + word[1:] for word in stem.split("_")) or "Mine"
    if kind == "policy" and not name.endswith("Policy"):
        name += "Policy"
    return text.replace("__NAME__", stem).replace("__CLASS__", name)
