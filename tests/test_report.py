"""The HTML page and the Chrome/Perfetto trace."""

from __future__ import annotations

import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic

from spawnsim import report
from spawnsim.plots import timeuse
from spawnsim.plots.source import clock_of, grouped
from spawnsim.record import Table
from spawnsim.report import page, trace
from spawnsim.run import Run


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Two policies on 12 ranks."""
    return [synthetic.run(policy, ranks=12, iterations=25) for policy in ("average", "selective")]


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_is_whole_and_loads_nothing(runs: list[Run]):
    """Totals, replacements and imbalance are there; every picture is inside the page, and every tag is closed."""
    html = page.render(runs, "Two policies")
    for text in (
        "Two policies",
        "lost in lockstep",
        "Replacements",
        "0f3c" * 8,
        "54,321",
        "average",
        "selective",
    ):
        assert text in html
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert html.count("data:image/png;base64,") == 6
    Balanced().check(html)


def test_a_real_run_shows_no_none_and_no_virtual_time(runs: list[Run]):
    """What is not known is a dash, in totals and in parameters; axes of a real run's clocks are plain seconds."""
    what = {
        **runs[0].what,
        "backend": "mpi",
        "platform": None,
        "parameters": {"policy": "average", "seed": None},
    }
    real = dataclasses.replace(runs[0], what=what, totals={**runs[0].totals, "messages": None})
    assert "None" not in page.render([real])
    assert (clock_of([real]), clock_of([real, runs[1]])) == ("time (s)", "virtual time (s)")


def test_text_from_a_run_is_escaped(runs: list[Run]):
    """A run whose parameters hold markup cannot put markup into the page."""
    what = {**runs[0].what, "parameters": {"policy": "<script>alert(1)</script>"}}
    html = page.render([dataclasses.replace(runs[0], what=what, outcome="ValueError: <b>no</b>")])
    assert "<script>" not in html
    assert "<b>" not in html
    assert "&lt;b&gt;no&lt;/b&gt;" in html


def test_runs_of_one_policy_are_told_apart_by_seed():
    """Names in the tables are unique."""
    runs = [synthetic.run("none", ranks=2, iterations=2, seed=seed) for seed in (1, 2, 2)]
    runs[2] = dataclasses.replace(runs[2], totals={**runs[2].totals, "digest": "another"})
    assert [name for name, _ in grouped(runs).named] == ["none, seed 1", "none, seed 2", "none, seed 2 (2)"]


def test_the_page_begins_with_how_runs_ended(runs: list[Run]):
    """Outcome, date and command come before all numbers: a run that crashed looked like one that finished."""
    made = {"date": "2026-11-22T10:00:00+00:00", "command": "spawnsim run train.py --ranks 12", "threads": 2}
    broken = dataclasses.replace(runs[0], outcome="RankError: rank 3", what={**runs[0].what, "made": made})
    html = page.render([broken, runs[1]])
    places = [
        html.index(text) for text in ("RankError: rank 3</td>", made["date"], made["command"], "54,321")
    ]
    assert places == sorted(places)
    assert "average (failed)" in html


def test_the_page_tells_one_share_of_computing(runs: list[Run]):
    """The table's share is the figure's; what a lockstep would lose is named as such."""
    used = timeuse.time_use(runs[0].table)
    assert used is not None
    assert f"<td>{timeuse.computing_share(used):.0%}</td>" in page.render(runs[:1])


def test_the_command_writes_one_file(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`spawnsim report RUN --out PAGE` prints the page's path."""
    runs[0].save(tmp_path / "run")
    assert report.main([str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")


class Balanced(HTMLParser):
    """Checks that tags are closed in order."""

    VOID = frozenset({"meta", "img", "br"})

    def check(self, html: str) -> None:
        self.open: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


# ----------------------------------------------------------------------------------------------- the trace

REQUIRED = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "i": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "s": str, "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": str},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "id": str, "bp": str},
}


def written(runs: list[Run], path: Path, **options: int) -> list[dict[str, Any]]:
    """Return the entries of a trace file, each held to the format's schema."""
    document = json.loads(trace.write(runs, path / "trace.json", **options).read_text())
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for entry in document["traceEvents"]:
        required = REQUIRED[entry["ph"]]
        assert set(entry) == {"ph", *required}, entry
        for name, kind in required.items():
            assert isinstance(entry[name], kind), (name, entry)
        assert min(entry.get("ts", 0.0), entry.get("dur", 0.0)) >= 0
    return document["traceEvents"]


def test_a_trace_keeps_to_the_format(runs: list[Run], tmp_path: Path):
    """Every entry has its phase's fields and types; each run is a process, each rank a thread."""
    entries = written(runs, tmp_path)
    assert {entry["pid"] for entry in entries} == {0, 1}
    assert {entry["tid"] for entry in entries} == set(range(12))
    assert sum(entry["ph"] == "X" and entry["name"] == "compute" for entry in entries) == 2 * 12 * 25


def test_blocks_of_a_rank_follow_one_another(runs: list[Run], tmp_path: Path):
    """A thread's blocks begin where the last one ended (to a nanosecond), so viewers nest nothing."""
    entries = [e for e in written(runs[:1], tmp_path) if e["ph"] == "X" and e["tid"] == 3]
    ends = [e["ts"] + e["dur"] for e in entries]
    assert entries[0]["ts"] == 0
    assert [e["ts"] for e in entries[1:]] == pytest.approx(ends[:-1], abs=2e-3)


def test_each_replacement_has_a_mark_and_arrows_from_its_donors(runs: list[Run], tmp_path: Path):
    """Arrows come in pairs with one id: out of the donor's thread, into the replaced one's."""
    entries = written(runs[1:], tmp_path)
    marks = [e for e in entries if e["ph"] == "i"]
    starts, finishes = ({e["id"]: e for e in entries if e["ph"] == phase} for phase in "sf")
    assert len(marks) == len(runs[1].events)
    assert set(starts) == set(finishes)
    assert starts["0.0." + str(runs[1].events[0]["donors"][0])]["tid"] == runs[1].events[0]["donors"][0]


def test_the_first_ranks_alone_can_be_shown(runs: list[Run], tmp_path: Path):
    """`--ranks 2` leaves no thread, mark or arrow of another rank."""
    assert {entry["tid"] for entry in written(runs, tmp_path, ranks=2)} == {0, 1}


def test_a_trace_names_ranks_that_did_something(runs: list[Run], tmp_path: Path):
    """One row of a rank with a large number is a short file: it filled the disk."""
    table = Table({"rank": np.array([2**31 - 1], np.int32), "time_s": np.ones(1), "loss": np.ones(1)})
    lonely = Run({}, table, [], {})
    assert len(written([lonely], tmp_path)) < 10
    texts = dict(table) | {name: np.array(["x"]) for name in ("compute_s", "iteration")}
    assert len(written([dataclasses.replace(lonely, table=Table(texts))], tmp_path)) < 10


def test_the_trace_command_prints_the_file(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`spawnsim trace RUN --out FILE`."""
    runs[0].save(tmp_path / "run")
    assert trace.main([str(tmp_path / "run"), "--out", str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "t.json")
