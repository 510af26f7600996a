"""Links in platform files: TOML to `Link`, with its changes over time, and back.

[network.link]
model = "tcp"                      # or "hockney" (default), "loggp", "piecewise"
latency = "40 ms"
bandwidth = "1 Gbit/s"
initial_window = 10                # segments; default: no slow start
trace = "link.csv"                 # or rows: [["0 s", "1 Gbit/s"], ["60 s", "200 Mbit/s", "55 ms"]]
repeat = "1 h"
background = ["poisson:3,400ms"]   # background traffic
seed = 0
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spawnsim import units
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.network import BandwidthTrace, Changing, Hockney, Link, LogGP, Piecewise, Tcp
from spawnsim.models.network.changing import Source, parse_background
from spawnsim.models.platform.reading import Section


def read_link(section: Section) -> Link:
    """Return the link that a table describes."""
    built = LINKS[section.choice("model", tuple(LINKS), "hockney")](section)
    built = changing(section, built)
    section.close()
    return built


def changing(section: Section, link: Link) -> Link:
    """Return a link with the changes in its table: `trace`, `repeat`, `background`, `seed`."""
    trace = section.get("trace", lambda value: _trace_rows(section, value, link), _NO_ROWS)
    repeat_s = section.seconds("repeat") if section.has("repeat") else None
    background = section.get("background", _backgrounds, _NO_TRAFFIC)
    seed = section.seed()
    section.asked.add("repeat")
    if not trace and not background:
        for key in ("repeat", "seed"):
            if section.has(key):
                raise section.error(key, "nothing repeats or is drawn: give a trace or background traffic")
        return link
    recorded = section.build(BandwidthTrace, rows=trace, repeat_s=repeat_s) if trace else None
    return section.build(Changing, link=link, trace=recorded, background=background, seed=seed)


_NO_ROWS: tuple[tuple[float, float, float], ...] = ()
_NO_TRAFFIC: tuple[Source, ...] = ()


def _backgrounds(value: Any) -> tuple[Source, ...]:
    return tuple(map(parse_background, value if isinstance(value, list) else [value]))


_TRACE = ("time", "bandwidth", "latency")


def _trace_rows(section: Section, value: Any, link: Link) -> tuple[tuple[float, float, float], ...]:
    """Return the rows of a trace: a list of lists, or a CSV file next to the platform file; latency is optional."""
    if isinstance(value, str):
        path = Path(section.file).parent / value
        try:
            # Accepts a byte order mark, which spreadsheets write.
            table = [*csv.reader(path.read_text(encoding="utf-8-sig").splitlines())]
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"{path}: cannot be read ({error})") from error
        if not table or tuple(word.strip() for word in table[0]) not in (_TRACE[:2], _TRACE):
            raise ParameterError(f"{path}, line 1: the columns of a trace are time,bandwidth,latency")
        rows = [(f"{path}, line {at}", row) for at, row in enumerate(table[1:], start=2) if row]
        if not rows:
            raise ParameterError(
                f"{path}: the trace has no rows: write 0 s and a bandwidth, or leave the trace out"
            )
    elif isinstance(value, list):
        rows = [(f"row {at}", row) for at, row in enumerate(value)]
    else:
        raise ParameterError(f"{value!r}: write a list of rows, or the name of a CSV file")
    own_s = float(link.pieces()[0].fixed.flight_s)
    return tuple(_trace_row(where, row, own_s) for where, row in rows)


def _trace_row(where: str, row: Any, own_s: float) -> tuple[float, float, float]:
    if not isinstance(row, list) or not 2 <= len(row) <= 3:
        raise ParameterError(f'{where}: {row!r}: write ["10 s", "1 Gbit/s"], and a latency if it changes')
    readers = (units.seconds, units.bytes_per_second, units.seconds)
    found = []
    for name, read, word in zip(_TRACE, readers, row, strict=False):
        try:
            found.append(read(word))
        except ParameterError as error:
            raise ParameterError(f"{where}: {name}: {error}") from error
    at_s, bandwidth, latency_s = (*found, own_s)[:3]
    return at_s, bandwidth, latency_s


def _hockney(section: Section) -> Link:
    return section.build(
        Hockney, latency_s=section.seconds("latency"), bandwidth_Bps=section.bytes_per_second("bandwidth")
    )


def _loggp(section: Section) -> Link:
    names = {"L": "latency", "o": "overhead", "g": "gap"}
    symbols = {symbol: section.seconds(key) for symbol, key in names.items()}
    return section.build(LogGP, G=1.0 / section.bytes_per_second("bandwidth"), **symbols)


def _piecewise(section: Section) -> Link:
    steps = [(step.nbytes("from"), read_link(step)) for step in section.sections("steps")]
    return section.build(Piecewise, steps=tuple(steps))


def _tcp(section: Section) -> Link:
    return section.build(
        Tcp,
        latency_s=section.seconds("latency"),
        bandwidth_Bps=section.bytes_per_second("bandwidth"),
        **tcp_options(section),
    )


def tcp_options(section: Section) -> dict[str, Any]:
    """Return a TCP link's stated options besides latency and bandwidth."""
    stated: dict[str, Callable[[str], Any]] = {
        "mss": section.nbytes,
        "window": section.nbytes,
        "loss": section.number,
        "initial_window": section.integer,
    }
    section.asked.update(stated)
    return {key: read(key) for key, read in stated.items() if section.has(key)}


LINKS: dict[str, Callable[[Section], Link]] = {
    "hockney": _hockney,
    "loggp": _loggp,
    "tcp": _tcp,
    "piecewise": _piecewise,
}


def link_lines(table: str, link: Link) -> Iterator[str]:
    """Yield the lines of a table that `read_link` reads back as this link."""
    yield f"[{table}]"
    if isinstance(link, Changing):
        yield from _change_lines(link)
        link = link.link
    if isinstance(link, Piecewise):
        yield f"model = {quoted('piecewise')}"
        for from_bytes, step in link.steps:
            yield f"[[{table}.steps]]"
            yield f"from = {quoted(f'{from_bytes} B')}"
            yield from _model_lines(step)
    else:
        yield from _model_lines(link)


def _change_lines(link: Changing) -> Iterator[str]:
    if link.trace is not None:
        yield "trace = ["
        for at_s, bandwidth, latency_s in link.trace.rows:
            row = seconds_text(at_s), speed_text(bandwidth), seconds_text(latency_s)
            yield f"    [{', '.join(map(quoted, row))}],"
        yield "]"
        yield from (
            () if link.trace.repeat_s is None else [f"repeat = {quoted(seconds_text(link.trace.repeat_s))}"]
        )
    if link.background:
        yield f"background = [{', '.join(quoted(str(each)) for each in link.background)}]"
        yield f"seed = {link.seed}"


def _model_lines(link: Link) -> Iterator[str]:
    if isinstance(link, Hockney):
        yield f"latency = {quoted(seconds_text(link.latency_s))}"
        yield f"bandwidth = {quoted(speed_text(link.bandwidth_Bps))}"
    elif isinstance(link, LogGP):
        yield f"model = {quoted('loggp')}"
        for key, value in (("latency", link.L), ("overhead", link.o), ("gap", link.g)):
            yield f"{key} = {quoted(seconds_text(value))}"
        yield f"bandwidth = {quoted(speed_text(1.0 / link.G))}"
    elif isinstance(link, Tcp):
        yield f"model = {quoted('tcp')}"
        yield f"latency = {quoted(seconds_text(link.latency_s))}"
        yield f"bandwidth = {quoted(speed_text(link.bandwidth_Bps))}"
        sizes = {"mss": f"{link.mss} B", "window": None if link.window is None else f"{link.window} B"}
        yield from (f"{key} = {quoted(size)}" for key, size in sizes.items() if size is not None)
        yield f"loss = {link.loss!r}"
        yield from () if link.initial_window is None else [f"initial_window = {link.initial_window}"]
    else:
        raise UnsupportedError(f"a {type(link).__name__} link cannot be written to a platform file yet")


def quoted(value: str) -> str:
    """Return a text in TOML notation."""
    return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML basic string


def _exact(value: float, texts: Sequence[str], read: Callable[[str], float]) -> str:
    """Return the first text that reads back to the same bits ("33.5 ms" does, "33500 us" does not); else the first."""
    return next((text for text in texts if read(text) == value), texts[0])


def seconds_text(seconds: float) -> str:
    """Return a duration with its unit."""
    return _exact(seconds, [f"{seconds * 1e6:.9g} us", f"{seconds * 1e3:.9g} ms"], units.seconds)


def speed_text(bytes_per_second: float) -> str:
    """Return a bandwidth with its unit."""
    texts = [f"{bytes_per_second * 1e-6:.9g} MB/s", f"{bytes_per_second * 8e-9:.9g} Gbit/s"]
    return _exact(bytes_per_second, texts, units.bytes_per_second)
