"""The appearance of figures: the packaged style sheet, one look per policy, labels that do not collide, files.

Nothing here changes matplotlib's global state: figures are made without pyplot, and the style lasts for one `with`
block. This module does not know tables, runs or statistics.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter
from numpy.typing import NDArray

from spawnsim.errors import ParameterError
from spawnsim.units import counted

SHEET = "spawnsim.plots.talk"
FORMATS = ("png", "pdf")
CHARACTERS_PER_INCH = 13  # of a caption
TITLE_PER_INCH = 6.5  # characters of a title
LABEL_WIDTH = 24  # characters of a label at the end of its line
LABEL_SIZES = (12.0, 9.0, 7.5, 6.0, 5.0)  # of a label's letters: the first size in which all labels fit
ASIDE = 6.0  # points between bars of two curves at one place
PAST_END = 1.02  # of a time axis: the last event is often at the end, and would lie on the frame
MOST_LINES = 5  # of a name: more would leave no room for the axes


class Look(NamedTuple):
    """Colour, line style and marker: one of the three distinguishes a curve; beyond six curves, two of them do.

    `marked` lines carry their marker: the seventh curve has the first one's colour.
    """

    colour: str
    dashes: Any
    marker: str
    marked: bool = False


LOOKS = (
    Look("#0072B2", "-", "o"),
    Look("#D55E00", (0, (6, 1.6)), "s"),
    Look("#009E73", (0, (5, 1.4, 1, 1.4)), "^"),
    Look("#CC79A7", (0, (1.4, 1.2)), "D"),
    Look("#E69F00", (0, (8, 1.5, 1, 1.5, 1, 1.5)), "v"),
    Look("#56B4E9", (0, (3, 1)), "P"),
)
KNOWN = {"none": Look("#333333", (0, (2.6, 1.5)), "D"), "average": LOOKS[0], "selective": LOOKS[1]}


def looks(labels: Iterable[str]) -> dict[str, Look]:
    """Return one look per label: known policies keep their look in every figure, other labels get a free one.

    Raises:
        ParameterError: there are more labels than distinguishable styles.
    """
    names = list(dict.fromkeys(labels))
    taken = {name: KNOWN[name] for name in names if name in KNOWN}
    # Known policies keep their look, so that one figure's blue line means the same in the next.
    free = [look for look in (*LOOKS, *_marked()) if look not in taken.values()]
    others = [name for name in names if name not in taken]
    if len(others) > len(free):
        raise ParameterError(f"{len(names)} curves in one figure: give fewer runs, or group them (--by NAME)")
    return taken | dict(zip(others, free, strict=False))


def _marked() -> Iterable[Look]:
    """Yield further looks: the colours again, with other dashes, and markers on the lines."""
    for shift in range(1, len(LOOKS)):
        for at, look in enumerate(LOOKS):
            other = LOOKS[(at + shift) % len(LOOKS)]
            yield Look(look.colour, other.dashes, other.marker, marked=True)


def talk() -> AbstractContextManager[None]:
    """Return the context in which figures are made and saved, for a `with` statement."""
    return style.context(SHEET)


def axes_or_new(ax: Axes | None) -> Axes:
    """Return `ax`, or the only axes of a new figure in the packaged style."""
    if ax is not None:
        return ax
    with talk():
        return Figure().subplots()


def compose(
    panels: Callable[[Figure], object], title: str, caption: str, size: tuple[float, float] | None = None
) -> Figure:
    """Return a figure: the only place in the package that makes figures.

    Args:
        panels: draws precomputed data into an empty figure, in the packaged style.
        title: the text above the panels.
        caption: the text below them: where the runs executed, and how to read lines, markers and bands.
        size: inches; None: the style's size.

    Returns:
        The figure, which `save` writes.
    """
    with talk():
        figure = Figure(figsize=size)
        panels(figure)
        return frame(figure, title, caption)


def frame(figure: Figure, title: str, caption: str) -> Figure:
    """Put the title above and the caption below; return the figure."""
    figure.suptitle(in_lines(title, int(TITLE_PER_INCH * figure.get_figwidth())), x=0.012, ha="left")
    # Wrapped here, as matplotlib's own wrapping needs a drawn figure, and cuts at the edge of the axes.
    width = int(CHARACTERS_PER_INCH * figure.get_figwidth())
    lines = [part for line in caption.split("\n") for part in textwrap.wrap(line, width)]
    figure.supxlabel("\n".join(lines), x=0.012, ha="left", fontsize=10, color="#555555", linespacing=1.35)
    return figure


def spread(positions: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as needed so that neighbours are at least `gap` apart; the order is kept.

    >>> spread([0.0, 0.1, 5.0], 1.0)
    [-0.45, 0.55, 5.0]
    """
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    blocks: list[tuple[float, list[int]]] = []
    for index in order:
        blocks.append((positions[index], [index]))
        # Merged blocks take the mean of their members, weighted by number, and may then touch the next lower block:
        # so loop. This is isotonic regression by pooling neighbours, with the least sum of squared moves.
        while len(blocks) > 1 and _places(blocks[-1], gap)[0] - _places(blocks[-2], gap)[-1] < gap:
            (low, first), (high, second) = blocks[-2:]
            members = first + second
            centre = (low * len(first) + high * len(second)) / len(members)
            blocks[-2:] = [(centre, members)]
    placed = dict(zip(order, (place for block in blocks for place in _places(block, gap)), strict=True))
    # Rounded, so that a figure has the same bytes on machines whose sums differ in the last digit.
    return [round(placed[index], 12) for index in range(len(positions))]


def _places(block: tuple[float, list[int]], gap: float) -> list[float]:
    centre, members = block
    return [centre + gap * (step - (len(members) - 1) / 2) for step in range(len(members))]


def aside(ax: Axes, places: NDArray[np.float64], count: int, *, log: bool = False) -> NDArray[np.float64]:
    """Return the moves along x that keep the bars of `count` curves at one place apart; in decades if `log`.

    `places` of the bars are distinct and in order.
    """
    along = np.log10(places) if log else places
    span = float(along[-1] - along[0]) or abs(float(along[0])) or 1.0
    points = ax.get_window_extent().width * 72 / ax.figure.dpi
    # All bars at one place together take at most half of the distance to the next place.
    step = min(ASIDE * span / points, float(np.diff(along).min(initial=2 * span)) / (2 * count))
    return np.asarray(step * (np.arange(count) - (count - 1) / 2), np.float64)


def label_ends(ax: Axes, ends: Mapping[str, float], styles: Mapping[str, Look]) -> None:
    """Write each line's name at the right edge of `ax`, at its last height, moved apart if names would touch.

    The names stay within the height of the axes; many names get smaller letters, long names two lines.
    """
    to_axes = ax.transAxes.inverted()
    # In axes coordinates, in which a gap between names is the same on linear and logarithmic scales.
    heights = [float(to_axes.transform(ax.transData.transform((0.0, y)))[1]) for y in ends.values()]
    for size in LABEL_SIZES:
        # The width is for the largest size; smaller letters fit more of a name in a line, as axes with long captions
        # are lower.
        texts = [in_lines(name, int(LABEL_WIDTH * LABEL_SIZES[0] / size)) for name in ends]
        lines = max((text.count("\n") + 1 for text in texts), default=1)
        if (0.055 if size == LABEL_SIZES[0] else 0.06) * size / 12 * lines * len(ends) <= 1.0:
            break
    # At most an equal share of the height, or the names would run beyond the axes.
    gap = min(0.075 * size / 12 * lines, 1.0 / len(texts))
    for name, text, height in zip(ends, texts, within(spread(heights, gap), gap), strict=True):
        look: Any = {"color": styles[name].colour, "weight": "bold", "size": size, "va": "center"}
        ax.text(1.02, height, text, transform=ax.transAxes, **look)


def within(places: Sequence[float], gap: float) -> list[float]:
    """Move places that are `gap` apart between 0 and 1, if there is room; the order is kept.

    >>> within([-0.45, 0.55, 5.0], 0.25)
    [0.0, 0.55, 1.0]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    found = list(places)
    # Two passes: up from the bottom, then down from the top. If all fit, neither pass brings two names nearer than
    # the gap.
    for step, index in enumerate(order):
        found[index] = max(found[index], gap * step)
    for step, index in enumerate(reversed(order)):
        found[index] = min(found[index], 1.0 - gap * step)
    return found


def plain_seconds(ax: Axes) -> None:
    """Show the x axis in seconds, with milli and micro prefixes for short runs."""
    longest, units = max(abs(edge) for edge in ax.get_xlim()), (("s", 1.0), ("ms", 1e3), ("µs", 1e6))
    unit, scale = next((each for each in units if longest * each[1] >= 2), units[0])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x * scale:,.4g}"))
    ax.set_xlabel(ax.get_xlabel().replace("(s)", f"({unit})"))


def in_thousands(ax: Axes, which: str) -> None:
    """Separate thousands on one axis ("x" or "y")."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: counted(value) if value == int(value) else ""))


def bytes_formatter() -> EngFormatter:
    """Return a tick formatter for bytes."""
    return EngFormatter(unit="B")


def save_as(figure: Figure, picture: Path) -> None:
    """Write a figure to one file, in the format of its suffix; PNG without a suffix."""
    save(figure, picture.with_suffix(""), [picture.suffix.removeprefix(".") or "png"])


def save(figure: Figure, stem: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write `stem`.png, `stem`.pdf …; the same figure always gives the same bytes.

    Args:
        figure: the figure.
        stem: path without the suffix; its folder is created.
        formats: any of "png", "pdf" and "svg".

    Returns:
        The paths of the files, in the order of `formats`.

    Raises:
        ParameterError: an unknown format.
    """
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    # With a date inside the file, each run of a study would change its figures.
    undated: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in formats]
    with talk():
        for kind, path in zip(formats, paths, strict=True):
            if kind not in ("png", "pdf", "svg"):
                raise ParameterError(f"format {kind!r}: figures are written as png, pdf or svg")
            figure.savefig(path, format=kind, metadata=undated.get(kind))
    return paths


def in_lines(text: str, width: int = LABEL_WIDTH) -> str:
    r"""Return a text in a few lines of at most `width` characters; a long mixed-case name breaks before a capital.

    >>> in_lines("AsyncSelectiveAveragingPolicy", 24)
    'AsyncSelective\nAveragingPolicy'
    >>> in_lines("200 ranks, iterations 24, every 8", 24)
    '200 ranks,\niterations 24, every 8'
    """
    # Keep a name and its value in one line: a part between commas stays together if it fits into a line.
    text = ", ".join(part.replace(" ", "\xa0") if len(part) < width else part for part in text.split(", "))
    # To textwrap a vertical tab is white space: a line may end there, and it has no other effect.
    words = re.sub(rf"\S{{{width + 1},}}", lambda found: re.sub("(?<=[a-z])(?=[A-Z])", "\v", found[0]), text)
    lines = textwrap.wrap(words, width, replace_whitespace=False)
    if len(lines) > MOST_LINES:  # both ends, as only the last words may distinguish two names
        lines[MOST_LINES - 2 : -1] = ["…"]
    return "\n".join(line.replace("\v", "").replace("\xa0", " ") for line in lines) or text


def short(number: float) -> str:
    """Return a number for a tick or a cell: three digits, thousands and millions as k and M.

    >>> short(0.12345), short(16384), short(2_500_000)
    ('0.123', '16.4k', '2.5M')
    """
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= scale:
            return f"{number / (scale if unit != 'k' else 1e3):.3g}{unit}"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def three_digits(number: float) -> str:
    """Return a number with three digits, including trailing zeros: numbers in a table have one form.

    >>> three_digits(0.87), three_digits(8.7), three_digits(87), three_digits(16384)
    ('0.870', '8.70', '87.0', '16.4k')
    """
    digits = next((digits for limit, digits in ((1, 3), (10, 2), (100, 1)) if abs(number) < limit), None)
    return short(number) if digits is None else f"{number:.{digits}f}"


def evenly(count: int, points: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return up to `points` indices spread over range(count), both ends included."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(points, count)).astype(np.int64))
