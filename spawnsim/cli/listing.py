"""`spawnsim list [WHAT]`: the names that other commands take, with one line each. Loads only what it is asked about.

Also what a name of a study, or of a program that studies run, stands for.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import spawnsim
from spawnsim.errors import ParameterError
from spawnsim.options import Parser, nearest
from spawnsim.units import text_table

Line = tuple[str, str]


def main(argv: Sequence[str]) -> int:
    """Print the sections asked for, or all of them."""
    parser = Parser(prog="spawnsim list", description="List the names that other commands take.")
    parser.add_argument("what", nargs="*", metavar="WHAT", help=f"among {', '.join(SECTIONS)}; default: all")
    wanted = parser.parse_args(argv).what
    unknown = [name for name in wanted if name not in SECTIONS]
    if unknown:
        parser.error(f"{unknown[0]}: choose among {', '.join(SECTIONS)}")
    for name in wanted or SECTIONS:
        print(f"{name}:")
        print(text_table((), list(SECTIONS[name]()), left=2, indent="  ") or "  none here")
    return 0


def find(name: str, defines: str = "study") -> Path:
    """Return the path of a study: a path to a file, or a name in one of `folders()`.

    Args:
        name: the path or name.
        defines: the function that it defines: "study", or "main" of a program that studies run.

    Returns:
        The path of a file that exists.

    Raises:
        ParameterError: there is none.
    """
    candidates = [Path(name), *(folder / f"{name}.py" for folder in folders())]
    for path in candidates:
        if path.suffix == ".py" and path.is_file():
            return path
    known = names(defines)
    what, whose = ("study", "studies") if defines == "study" else ("file", "programs of studies")
    hint = nearest(name, known) or f"{whose} here: {', '.join(known) or 'none'}"
    raise ParameterError(f"no {what} {name!r}; {hint}")


def program_file(given: Path) -> Path:
    """Return a program's path: as it is given, or that of a program that studies run, of which only the name is."""
    is_name = not given.suffix and len(given.parts) == 1 and not given.exists()
    return find(str(given), "main") if is_name else given


def names(defines: str = "study") -> list[str]:
    """Return the names of the files in `folders()` that define a function."""
    files = {path.stem: path for folder in folders() for path in folder.glob("*.py")}
    # By their text: importing all of them would load torch.
    return sorted(
        stem for stem, path in files.items() if f"def {defines}(" in path.read_text(encoding="utf-8")
    )


def folders() -> list[Path]:
    """Return where studies lie: `studies/` here, and those that come along, in a checkout or installed."""
    package = Path(spawnsim.__file__).parent
    return [
        each for each in (Path("studies"), package.parent / "studies", package / "studies") if each.is_dir()
    ]


def platforms() -> Iterator[Line]:
    """Yield the platform files that come along."""
    from spawnsim.models.platform import list_platforms

    for platform in list_platforms():
        yield platform.name, platform.description


def stragglers() -> Iterator[Line]:
    """Yield the forms that `--straggler` takes."""
    from spawnsim.models.compute.model import FORMS

    for form, model, _ in FORMS:
        yield form, _summary(model)


def faults() -> Iterator[Line]:
    """Yield the forms that `--faults` takes, joined by ";"."""
    from spawnsim.models.faults import KINDS
    from spawnsim.models.faults.failures import Failures
    from spawnsim.models.faults.plan import MTBF, MTBF_FORM, REQUEUE, form

    for kind in KINDS.values():
        yield form(kind), _summary(kind)
    yield MTBF_FORM, _summary(Failures)
    yield (
        MTBF_FORM.replace(MTBF, REQUEUE, 1),
        "The same; each failure ends the job, and all of it begins again.",
    )


def policies() -> Iterator[Line]:
    """Yield the policies, each with its paper."""
    module = import_module("spawnsim.policies")
    for name, summary in _classes(
        "spawnsim.policies", lambda name: name.endswith("Policy") and name != "SpawnPolicy"
    ):
        paper = getattr(module, name).paper
        yield name, f"{summary} [{paper}]" if paper else summary


def workloads() -> Iterator[Line]:
    """Yield what ranks can train on."""
    yield from _classes("spawnsim.workloads", lambda _name: True)


def _classes(package: str, chosen: Callable[[str], bool]) -> Iterator[Line]:
    module = import_module(package)
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.isclass(thing) and chosen(name):
            yield name, _summary(thing)


def _summary(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def studies() -> Iterator[Line]:
    """Yield the programs and studies of `studies/` by the names that commands take, with the first line of each."""
    found: dict[str, Path] = {}
    for folder in folders():
        found = {path.stem: path for path in folder.glob("*.py")} | found
    for _, path in sorted(found.items()):
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        yield path.stem, text.partition("\n")[0]


SECTIONS: dict[str, Callable[[], Iterator[Line]]] = {
    "platforms": platforms,
    "stragglers": stragglers,
    "faults": faults,
    "policies": policies,
    "workloads": workloads,
    "studies": studies,
}
