"""One self-contained HTML page about one or more runs: what ran, totals, figures, replacements, load imbalance.

This room knows tables of text for a template that escapes everything; figures come ready-made from plots. The page
loads nothing from elsewhere.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spawnsim.errors import UsageError
from spawnsim.plots import figures, raster, replacement, series, talk, timeuse
from spawnsim.plots.gallery import metrics_of
from spawnsim.plots.source import Groups, Recorded, grouped, setting
from spawnsim.run.result import DASH, TOTALS

MADE = ("date", "command", "machine", "threads")


class Picture(NamedTuple):
    """A figure for an `img` element: `kind` of image, base64 `data`, and its name for those who cannot see it."""

    name: str
    kind: str
    data: str


def number(value: object) -> str:
    """Return a value for a table: thousands separated, four digits of a fraction, a dash for nothing.

    >>> number(1234567), number(0.123456), number(None)
    ('1,234,567', '0.1235', '–')
    """
    if value is None:
        return DASH
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number(each)}" for name, each in value.items())
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _pictures(found: Groups) -> list[Picture]:
    pictures = []
    for name, figure in figures(found):
        buffer = io.BytesIO()
        with talk():
            figure.savefig(buffer, format="png", dpi=120)
        pictures.append(Picture(name, "png", base64.b64encode(buffer.getvalue()).decode()))
    return pictures


def _finals(run: Recorded, name: str) -> list[list[str]]:
    rows = []
    for column in metrics_of([run]):
        low, median, high = series.spread_at_end(run.table, column)
        rows.append([name, column, number(low), number(median), number(high)])
    return rows


def _time_use(run: Recorded, name: str) -> list[str] | None:
    """The figure's shares, and what the slowest rank of each iteration would cost if all waited for it."""
    used, lockstep = timeuse.time_use(run.table), timeuse.imbalance(run.table)
    share = None if used is None else timeuse.computing_share(used)
    if used is None or share is None or lockstep is None:
        return None
    total_s = lockstep.useful_s + lockstep.waiting_s
    lost = f"{lockstep.waiting_s / total_s:.0%}" if total_s else DASH
    means = (float(used.compute_s.mean()), float(used.exchange_s.mean()))
    return [name, *map(number, means), f"{share:.0%}", lost]


def _replaced(run: Recorded, name: str) -> list[str] | None:
    info = raster.of(run)
    if not len(info.rank):
        return None
    counts = replacement.per_rank(info)
    top = f"{replacement.top_share(replacement.gifts(info)):.0%}"
    values = (len(info.rank), int((counts > 0).sum()), int(counts.max()), len(info.donor))
    return [name, *map(number, values), top]


def contents(runs: Sequence[Recorded] | Groups, title: str) -> dict[str, Any]:
    """Return what the template shows: text and pictures only."""
    found = grouped(runs)
    return {
        "title": title,
        "setting": setting(found.runs),
        "total_names": TOTALS,
        "runs": [_row(run, name) for name, run in found.named],
        "finals": [row for name, run in found.named for row in _finals(run, name)],
        "time_use": [row for name, run in found.named if (row := _time_use(run, name))],
        "replaced": [row for name, run in found.named if (row := _replaced(run, name))],
        "figures": _pictures(found),
    }


def _row(run: Recorded, name: str) -> dict[str, Any]:
    made = run.what.get("made")
    return {
        "name": name,
        "totals": {total: number(run.totals.get(total)) for total in TOTALS},
        "outcome": run.outcome,
        "made": {key: number(made.get(key) if isinstance(made, Mapping) else None) for key in MADE},
        "what": [(key, number(value)) for key, value in run.what.items()],
    }


def render(runs: Sequence[Recorded] | Groups, title: str = "spawnsim report") -> str:
    """Return the page as text. Needs jinja2, the extra `spawnsim[report]`."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise UsageError("a report needs jinja2: pip install 'spawnsim[report]'") from error
    environment = Environment(
        loader=PackageLoader("spawnsim.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return str(environment.get_template("page.html.jinja").render(contents(runs, title)))
