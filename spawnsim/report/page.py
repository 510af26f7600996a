"""One self-contained HTML page about one or more runs: programs, ranks, totals, figures, replacements, load imbalance.

The template escapes everything, and the page loads nothing from elsewhere; the figures come from `plots`. For a
run in progress, the same page is rendered repeatedly: see `live`.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from spawnsim.errors import UsageError
from spawnsim.plots import figures, replacement, series, talk, timeuse
from spawnsim.plots.experiments import KNOWN_ENDINGS, Groups, Recorded, grouped, ranks_of, setting
from spawnsim.plots.gallery import metrics_of
from spawnsim.record.journal import RankStates
from spawnsim.report.ranks import MOST, Curve, curve, kinds, latest, progress, standing
from spawnsim.run.result import DASH, FINISHED, LOSSES, SECONDS, TOTALS, shown_totals

PIXELS = 88  # per inch of a figure: letters of all figures have one size, and most figures fill the page


class Ending(NamedTuple):
    """How a run ended: one `word`, the line with the reason, and all further details."""

    word: str
    reason: str
    more: str

    @classmethod
    def of(cls, outcome: str) -> Ending:
        r"""Return the ending of an outcome.

        >>> (
        ...     Ending.of("Deadlock: deadlock: 2 of 2 ranks wait\n  rank 0").word,
        ...     Ending.of("RankError: no luck").word,
        ... )
        ('deadlock', 'failed')
        """
        line, _, more = outcome.partition("\n")
        if line == FINISHED or line.startswith(KNOWN_ENDINGS):
            return cls(line, "", more)
        kind, _, reason = line.partition(": ")
        word = kind.lower() if kind in ("Deadlock", "Livelock") else "failed"
        return cls(word, (reason or line).removeprefix(f"{word}: "), more)


class Picture(NamedTuple):
    """A figure for an `img` element: its alternative text, its kind, its bytes in base64, its width."""

    name: str
    kind: str
    data: str
    width: int


def number(value: object) -> str:
    """Return a value for a table: thousands separated, four significant digits of a float, a dash for None.

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
        # Saved within the style context too: matplotlib reads some parameters only when it draws.
        with talk():
            figure.savefig(buffer, format="png", dpi=120)
        data = base64.b64encode(buffer.getvalue()).decode()
        pictures.append(Picture(name, "png", data, round(figure.get_figwidth() * PIXELS)))
    return pictures


def _finals(run: Recorded, name: str) -> list[tuple[list[str], Curve | None]]:
    rows = []
    for column in metrics_of([run]):
        low, median, high = series.spread_at_end(run.table, column)
        rows.append(([name, column, number(low), number(median), number(high)], curve(run, column)))
    return rows


def _time_use(run: Recorded, name: str) -> list[str] | None:
    """Return the shares in the figure, and the time lost if all ranks waited for the slowest in each iteration."""
    used, lockstep = timeuse.of_run(run), timeuse.imbalance(run.table)
    share = None if used is None else timeuse.computing_share(used)
    if used is None or share is None or lockstep is None:
        return None
    total_s = lockstep.useful_s + lockstep.waiting_s
    lost = f"{lockstep.waiting_s / total_s:.0%}" if total_s else DASH
    means = (float(used.compute_s.mean()), float(used.exchange_s.mean()))
    return [name, *map(number, means), f"{share:.0%}", lost]


def _replaced(run: Recorded, name: str) -> list[str] | None:
    info = replacement.replacements_of(run)
    if not len(info.rank):
        return None
    counts = replacement.per_rank(info)
    top = f"{replacement.top_share(replacement.donations(info)):.0%}"
    values = (len(info.rank), int((counts > 0).sum()), int(counts.max()), len(info.donor))
    return [name, *map(number, values), top]


class Live(NamedTuple):
    """A page of a run in progress: the states of its ranks, if known, and the nonce of the page's script."""

    states: RankStates | None = None
    nonce: str = ""


def contents(runs: Sequence[Recorded] | Groups, title: str, live: Live | None = None) -> dict[str, Any]:
    """Return the data for the template: only text and pictures. Figures are not drawn while a run executes."""
    found = grouped(runs)
    # With more ranks in several runs, the grids would be larger than the figures.
    room = MOST if sum(map(ranks_of, found.runs)) <= MOST or len(found.runs) == 1 else 0
    return {
        "title": title,
        "live": live,
        "progress": progress(found.runs[0]) if live is not None else None,
        "ranks": [(name, standing(run, live and live.states, room)) for name, run in found.named],
        "events": [(name, kinds(run.events), latest(run.events)) for name, run in found.named if run.events],
        "setting": setting(found.runs),
        "total_names": _total_names(found.runs, live),
        "ends": _ends(found.runs),
        "runs": [_row(run, name) for name, run in found.named],
        "finals": [row for name, run in found.named for row in _finals(run, name)],
        "time_use": [row for name, run in found.named if (row := _time_use(run, name))],
        "replaced": [row for name, run in found.named if (row := _replaced(run, name))],
        "figures": [] if live is not None else _pictures(found),
    }


def _row(run: Recorded, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "totals": {total: number(run.totals.get(total)) for total in (*SECONDS, *TOTALS, *LOSSES)},
        "ending": Ending.of(run.outcome),
        "made": _made(run),
        "warnings": run.what.get("warnings", ()),
        "what": [(key, number(value)) for key, value in run.what.items()],
    }


def _total_names(runs: Sequence[Recorded], live: Live | None) -> list[str]:
    """Return the totals that some run has, in their order; for a run in progress, the totals so far."""
    every = [each for run in runs for each in shown_totals(run.totals, len(run.table["rank"])).items()]
    some = {name for name, value in every if not live or value is not None}
    return [
        name for name in ("ranks", "iterations", *SECONDS, *TOTALS[3:-1], *LOSSES, "digest") if name in some
    ]


def _made(run: Recorded) -> dict[str, str]:
    """Return when, how and with which versions a run was made."""
    made, versions = (
        found if isinstance(found := run.what.get(name), Mapping) else {} for name in ("made", "versions")
    )
    known = (
        ("spawnsim", versions.get("spawnsim")),
        ("seed", run.what.get("seed")),
        ("threads", made.get("threads")),
    )
    facts = [number(made.get("date")), *(f"{name} {value}" for name, value in known if value is not None)]
    facts += [str(made["machine"])] if made.get("machine") else []
    return {"facts": " · ".join(facts), "command": number(made.get("command"))}


def _ends(runs: Sequence[Recorded]) -> str:
    """Return the number of runs for each way of ending."""
    words = Counter(Ending.of(run.outcome).word for run in runs)
    if len(runs) == 1 or not words[FINISHED]:
        return ", ".join(f"{count} {word}" if len(runs) > 1 else word for word, count in words.items())
    rest = "".join(f", {count} {word}" for word, count in words.items() if word != FINISHED)
    return f"{words[FINISHED]} of {len(runs)} finished{rest}"


def render(
    runs: Sequence[Recorded] | Groups, title: str = "spawnsim report", live: Live | None = None
) -> str:
    """Return the page as text; `live`: for one run in progress. Needs jinja2, the extra `spawnsim[report]`.

    Raises:
        UsageError: jinja2 is not installed.
    """
    return str(_template().render(contents(runs, title, live)))


@cache
def _template() -> Any:
    """Return the compiled template; it is cached, since compiling takes as long as a page of 1,000 ranks."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise UsageError("a report needs jinja2: pip install 'spawnsim[report]'") from error
    # Escape everything: names, outcomes and commands are texts of a user's program. A name that the template does
    # not know raises an error instead of leaving an empty cell.
    environment = Environment(
        loader=PackageLoader("spawnsim.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    return environment.get_template("page.html.jinja")
