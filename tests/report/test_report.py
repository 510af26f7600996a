"""The HTML page."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support import synthetic

from spawnsim.cli import serve
from spawnsim.plots import timeuse
from spawnsim.plots.experiments import clock_of, grouped
from spawnsim.report import page
from spawnsim.run import Run


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Two policies on 12 ranks."""
    return [synthetic.run(policy, ranks=12, iterations=25) for policy in ("average", "selective")]


def test_the_page_is_whole_and_loads_nothing(runs: list[Run]):
    """Totals, replacements and imbalance are there; every picture is inside the page, and every tag is closed."""
    html = page.render(runs, "Two policies")
    for text in (
        "Two policies",
        "would wait, if in lockstep",
        "Replacements",
        "0f3c" * 8,
        "54,321",
        "average",
        "selective",
    ):
        assert text in html
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert html.count("data:image/png;base64,") == 7
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
    """Outcome, date, version, seed and command come before all numbers: a crashed run looked like one that finished."""
    made = {"date": "2026-11-22T10:00:00+00:00", "command": "spawnsim run train.py --ranks 12", "threads": 2}
    what = {**runs[0].what, "made": made, "versions": {"spawnsim": "9.8.7"}}
    broken = dataclasses.replace(runs[0], outcome="RankError: rank 3 raised\nand its table", what=what)
    html = page.render([broken, runs[1]])
    said = [
        "1 of 2 finished",
        "failed</span>: rank 3 raised",
        "and its table</pre>",
        made["date"],
        "9.8.7",
        "seed 7",
    ]
    places = [
        html.index(text, html.index("<h2>")) for text in (*said, made["command"], "finished</span>", "54,321")
    ]
    assert places == sorted(places)
    assert "average (failed)" in html


@pytest.mark.parametrize(
    ("outcome", "word", "reason"),
    [
        ("finished", "finished", ""),
        ("interrupted", "interrupted", ""),
        ("stopped by SIGTERM", "stopped by SIGTERM", ""),
        ("Deadlock: deadlock: 12 of 12 ranks wait\n  rank 0", "deadlock", "12 of 12 ranks wait"),
        ("RankError: rank 11 raised ValueError: no", "failed", "rank 11 raised ValueError: no"),
        ("out of memory", "failed", "out of memory"),
    ],
)
def test_an_outcome_is_a_word_and_its_reason(outcome: str, word: str, reason: str):
    """What the eye falls on first."""
    assert page.Ending.of(outcome)[:2] == (word, reason)


def test_the_page_tells_one_share_of_computing(runs: list[Run]):
    """The table's share is the figure's; what a lockstep would lose is named as such."""
    used = timeuse.time_use(runs[0].table)
    assert used is not None
    assert f"<td>{timeuse.computing_share(used):.0%}</td>" in page.render(runs[:1])


def test_the_command_writes_one_file(runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """`spawnsim report RUN --out PAGE` prints the page's path."""
    runs[0].save(tmp_path / "run")
    assert serve("report", [str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
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
