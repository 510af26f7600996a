"""Published claims: a record of each, a verdict that follows from checks, and one table of all claims.

A study states a claim with `context.claim(...)`; the study `claims` runs all studies that state claims, and writes
the table.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "claims.json"
HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold here"


@dataclass(frozen=True, slots=True)
class Claim:
    """A published claim and the finding of a study.

    Attributes:
        text: the claim, in one sentence.
        source: where it was published.
        verdict: HOLDS, IN_PART or FAILS.
        found: the figures, and the settings under which they were found.
        study: the study that found them.
    """

    text: str
    source: str
    verdict: str
    found: str
    study: str


def verdict(checks: Mapping[str, bool]) -> str:
    """Return the verdict of named checks: all hold, some hold, or none holds.

    >>> verdict({"utilisation": True, "bandwidth": False})
    'holds in part'
    """
    if not checks:
        raise ValueError("a claim needs at least one check for its verdict")
    return HOLDS if all(checks.values()) else IN_PART if any(checks.values()) else FAILS


def write(folder: Path, claim: Claim) -> None:
    """Write a claim into a study's folder; it replaces an earlier claim with the same text."""
    kept = [each for each in read(folder) if each.text != claim.text]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(each) for each in [*kept, claim]]
    (folder / FILE).write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Claim]:
    """Return the claims in a study's folder."""
    path = folder / FILE
    if not path.exists():
        return []
    return [Claim(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


HEAD = """# Published claims, checked

Made by `spawnsim study claims`; do not edit. Each row is from a study, `spawnsim study NAME`, whose file states the
assumptions. A verdict follows from the study's checks: all hold, some, or none. Small models and simulated networks
show directions and ratios, not the sizes of published runs.

| claim | source | verdict | found here | study |
|---|---|---|---|---|
"""


def table(claims: Iterable[Claim]) -> str:
    """Return the page with all claims, in the order given."""
    rows = (
        f"| {each.text} | {each.source} | **{each.verdict}** | {each.found} | `{each.study}` |"
        for each in claims
    )
    return HEAD + "\n".join(rows) + "\n"


def claiming(folder: Path) -> list[Path]:
    """Return the studies in a folder that state claims, ordered by name: their text calls `context.claim`."""
    return [
        path for path in sorted(folder.glob("*.py")) if "context.claim(" in path.read_text(encoding="utf-8")
    ]
