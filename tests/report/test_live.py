"""A run that is watched: the live page over HTTP, what ranks do, and a whole run beside its watcher."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from support import synthetic

import spawnsim
from spawnsim.cli import main as command
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.record import Table
from spawnsim.record.folder import RUNNING
from spawnsim.record.journal import FOLDER, RankStates, read_states, write_states
from spawnsim.report import observers, ranks
from spawnsim.report.live import BEFORE, LivePage
from spawnsim.report.page import Live, render
from spawnsim.run import Run, watched

WAITING = RankStates(
    0.5, [("computing", "until 0.5 s"), *[("waiting", "Barrier() on <MPI_COMM_WORLD>")] * 11]
)
PROGRAM = """
import time
from pathlib import Path

def main(comm, flag=""):
    comm.record(iteration=0, loss=float(comm.rank))
    if comm.rank == comm.size - 1:
        while flag and not Path(flag).exists():
            time.sleep(0.02)
    comm.Barrier()
    comm.record(iteration=1, loss=0.5)
"""


@pytest.fixture
def live() -> Iterator[LivePage]:
    """A page that is served."""
    page = LivePage("runs/a")
    yield page
    page.close()


def running(count: int = 12, **changes: Any) -> Run:
    """Return a run that goes on."""
    return dataclasses.replace(
        synthetic.run(ranks=count, iterations=25), outcome=RUNNING, totals={"ranks": count}, **changes
    )


def asked(url: str, *, path: str | None = None, method: str = "GET", host: str = "") -> tuple[int, Any, str]:
    """Return status, headers and text of one request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.putrequest(method, path or parts.path, skip_host=bool(host))
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    with closing(connection):
        return answer.status, answer.headers, answer.read().decode()


class Stream:
    """A browser's stream of pages."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        self.connection.request("GET", f"{parts.path}events")
        self.answer = self.connection.getresponse()

    def pages(self) -> Iterator[tuple[str, str]]:
        """Yield kind and page of each event; comments are passed over."""
        kind, lines = "", list[str]()
        for raw in self.answer:
            line = raw.decode().rstrip("\n")
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                lines.append(line.removeprefix("data: "))
            elif not line and kind:
                yield kind, "\n".join(lines)
                kind, lines = "", []

    def until(self, *texts: str) -> tuple[str, str]:
        """Return the first page that has all these texts."""
        page = "none"
        for kind, page in self.pages():
            if all(text in page for text in texts):
                return kind, page
        raise AssertionError(f"the stream ended before a page with {texts}; the last one: {page}")

    def last(self) -> tuple[str, str]:
        """Return the last page. One before it may say as much: the run's folder is whole before its process ends."""
        return list(self.pages())[-1]


# ---------------------------------------------------------------------------------------------------- over HTTP
def test_only_who_knows_the_address_sees_the_page(live: LivePage) -> None:
    """Neither a wrong token nor another name of this machine (DNS rebinding) nor a request that would change things."""
    live.show(running(), WAITING)
    path, port = urlsplit(live.url).path, urlsplit(live.url).port
    assert asked(live.url)[0] == asked(live.url, host=f"localhost:{port}")[0] == 200
    wrongs = (
        "/",
        path[:-2] + "/",
        path.rstrip("/"),
        path + "x",
        path.upper(),
        f"/{'x' * (len(path) - 2)}/",
        "/%ff",
    )
    for wrong in wrongs:
        assert asked(live.url, path=wrong)[0] == 403, wrong
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}"):
        status, _, text = asked(live.url, host=host)
        assert (status, "<" in text) == (403, False), host
    assert [asked(live.url, method=method)[0] for method in ("POST", "PUT", "DELETE")] == [501, 501, 501]
    status, _, text = asked(live.url, method="HEAD")
    assert (status, text) == (200, "")
    assert urlsplit(live.url).hostname == "127.0.0.1"
    assert len(path) > 30


def test_the_page_may_load_and_run_nothing_but_its_own(live: LivePage) -> None:
    """Style and script are known by a nonce; there is no attribute that the policy would block, and no address."""
    live.show(running(), WAITING)
    _, headers, html = asked(live.url)
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    (nonce,) = {*re.findall(r"'nonce-([^']+)'", policy)}
    assert re.findall(r"<(?:style|script)[^>]*>", html) == [
        f'<style nonce="{nonce}">',
        f'<script nonce="{nonce}">',
    ]
    assert not re.search(r'\s(style|on\w+|src|href)="', html)
    assert "://" not in html
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"


def test_browsers_are_sent_each_page_and_the_last_one(live: LivePage) -> None:
    """Before the ranks begin there is a page that looks again; what an event or a path says is text."""
    assert asked(live.url)[2] == BEFORE
    stream = Stream(live.url)
    found = stream.pages()
    live.show(running(events=[{"kind": "<b>", "time_s": 0.1, "rank": 3, "x": "<i>"}]), WAITING)
    kind, page = next(found)
    assert kind == "page"
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "<h2>Running</h2>" in page
    far = ranks.progress(running())
    assert far is not None and f"{far.text}</p>" in page
    totals = page[page.index('id="totals"') : page.index('id="finals"')]
    assert "<td>–</td>" not in totals  # six dashes while the run went on
    assert "11 waiting</span>" in page
    assert 'title="rank 11: waiting Barrier() on &lt;MPI_COMM_WORLD&gt;' in page
    live.end(synthetic.run(ranks=12, iterations=25))
    kind, page = list(found)[-1]
    assert (kind, "12 finished</span>" in page, "How the runs ended: finished" in page) == ("end", True, True)
    with pytest.raises(OSError, match="refused"):
        asked(live.url)


# ------------------------------------------------------------------------------------------------- what ranks do
def test_a_grid_shows_each_of_1000_ranks() -> None:
    """In rows of 50; a rank that was replaced of late is marked, and its cell tells its last row."""
    run = running(1000)
    end_s = float(run.table["time_s"].max())
    states = RankStates(end_s, [("computing", "")] * 600 + [("waiting", "Recv(source=3, tag=7)")] * 400)
    found = ranks.standing(run, states)
    assert [first for first, _ in found.rows] == list(range(0, 1000, 50))
    cells = [cell for _, row in found.rows for cell in row]
    assert len(cells) == 1000
    assert found.counts == [("computing", "computing", 600), ("waiting", "waiting", 400)]
    late = {event["rank"] for event in run.events if event["time_s"] >= 0.95 * end_s}
    assert {rank for rank, cell in enumerate(cells) if cell.fresh} == late
    assert found.fresh == len(late)
    assert re.match(
        r"rank 700: waiting Recv\(source=3, tag=7\); iteration 24, accuracy 0\.\d+, loss ", cells[700].text
    )


def test_the_report_of_a_run_tells_who_died() -> None:
    """A rank that was started again lives; others may have given one up; a run that failed has no finished ranks."""
    events = [
        {"kind": "crash", "time_s": 0.1, "rank": 3},
        {"kind": "crash", "time_s": 0.2, "rank": 11},
        {"kind": "recovered", "time_s": 0.3, "rank": 0, "dead": [3, 11]},
        {"kind": "restart", "time_s": 0.4, "rank": 3},
        {"kind": "given_up", "time_s": 0.5, "rank": 5, "error": "late"},
    ]
    run = dataclasses.replace(synthetic.run("none", ranks=12, iterations=5), events=events)
    counts = [(word, count) for _, word, count in ranks.standing(run).counts]
    assert counts == [("finished", 10), ("died", 1), ("given up", 1)]
    failed = dataclasses.replace(run, outcome="RankError: rank 2 raised")
    counts = [(word, count) for _, word, count in ranks.standing(failed).counts]
    assert counts == [("not finished", 10), ("died", 1), ("given up", 1)]


@pytest.mark.parametrize(("most", "rows", "left"), [(100, 2, 0), (60, 2, 40), (0, 0, 100)])
def test_a_grid_has_an_end(most: int, rows: int, left: int) -> None:
    """All ranks count; those that have no cell are told of."""
    found = ranks.standing(synthetic.run("none", ranks=100, iterations=2), most=most)
    assert (len(found.rows), found.left_out, found.counts) == (rows, left, [("finished", "finished", 100)])


def test_a_run_that_goes_on_says_how_far_it_is() -> None:
    """By the program's parameter `iterations`, if it has one; a rank that lags is told of."""
    run = synthetic.run("none", ranks=12, iterations=99)
    what = {**run.what, "parameters": {"iterations": 400}}
    lags = (run.table["rank"] != 3) | (run.table["iteration"] < 40)
    table = Table({name: column[lags] for name, column in run.table.items()})
    behind = dataclasses.replace(run, what=what, table=table)
    assert ranks.progress(behind) == (99, 40, 400)
    assert ranks.progress(dataclasses.replace(run, table=Table({"rank": np.zeros(0, int)}))) is None
    bar = '<progress value="99" max="400"></progress> iteration 99 of 400; the slowest rank: 40</p>'
    assert bar in render([behind], live=Live())
    assert "<progress value" not in render([behind])


def test_events_are_cut_between_their_parts() -> None:
    """Equal weights of many donors filled the row, and the last part was cut amid a list."""
    event = {
        "kind": "replacement",
        "time_s": 1.0,
        "rank": 2,
        "donors": list(range(64)),
        "weights": [0.125] * 64,
    }
    event |= {"versions": [7, 8], "why": "x" * 90, "more": "y" * 20}
    (row,) = ranks.latest([event])
    donors = "donors [0, 1, 2, 3, 4, 5, 6, 7 … (64 in all)], weights 64 × 0.125, versions [7, 8]"
    assert row[3] == f"{donors} …"


def test_a_curve_needs_two_points() -> None:
    """Of one iteration, or of nothing but NaN, there is none; infinite losses do not end in the path."""
    run = synthetic.run("none", ranks=12, iterations=30)
    drawn = ranks.curve(run, "loss")
    assert drawn is not None
    assert drawn.median.count("L") == 29
    run.table["loss"][-1] = float("inf")
    assert "nan" not in (ranks.curve(run, "loss") or drawn).band
    assert ranks.curve(synthetic.run("none", ranks=12, iterations=1), "loss") is None
    run.table["loss"][:] = float("nan")
    assert ranks.curve(run, "loss") is None


def test_real_ranks_are_what_their_monitors_and_they_themselves_say(tmp_path: Path) -> None:
    """An end counts more than a wait; a rank that has long said nothing may do anything."""
    now_s = observers.time.time()
    (tmp_path / FOLDER).mkdir()
    registry = tmp_path / "registry"
    registry.mkdir()
    for name in ("begun 0", "begun 1", "begun 2", "begun 3", "dead 1", "ended 2"):
        (registry / name).touch()
    for rank, age_s in ((0, 0.0), (1, 0.0), (3, 60.0)):
        write_states(tmp_path, RankStates(now_s - age_s, [("waiting", "in Barrier number 4")]), rank)
    run = dataclasses.replace(running(5), what={"backend": "mpi", "ranks": 5})
    found = observers.real_states(tmp_path, run, registry).ranks
    assert [word for word, _ in found] == ["waiting", "died", "finished", "running", "running"]
    assert (found[0][1], found[3][1][:13]) == ("in Barrier number 4", "no report for")
    assert [word for word, _ in observers.real_states(tmp_path, run, None).ranks][1:3] == [
        "waiting",
        "running",
    ]
    write_states(tmp_path / "nowhere", WAITING)
    assert read_states(tmp_path / "nowhere") is None


# ------------------------------------------------------------------------------------------------ whole commands
def started(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run that waits for a file, for as long as this test takes: its ranks meet no deadline meanwhile."""
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    line = [
        sys.executable,
        "-m",
        "spawnsim",
        "run",
        str(file),
        "--set",
        f"flag={str(tmp_path / 'go')!r}",
        "--observe",
        "live",
    ]
    line += ["--deadline", "600", "--out", str(tmp_path / "run"), "--json", *more]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def address(process: subprocess.Popen[str]) -> str:
    """Return the address that a run prints."""
    assert process.stderr is not None
    return next(line for line in process.stderr if "live: " in line).rpartition(" ")[2].strip()


def test_a_virtual_run_is_seen_while_it_goes_on(tmp_path: Path) -> None:
    """Ranks that wait show, the last page says that the run has finished, and the digest is that of a run unseen."""
    run = started(tmp_path, "--ranks", "12", "--seed", "3")
    stream = Stream(address(run))
    kind, page = stream.until(
        "11 waiting</span>", "1 computing</span>", "rank 7: waiting Barrier(), number 0", "loss 7"
    )
    assert (kind, "&#39;flag&#39;" in page or "flag" in page) == ("page", True)
    (tmp_path / "go").touch()
    kind, page = stream.last()
    assert (kind, "12 finished</span>" in page, "How the runs ended: finished" in page) == ("end", True, True)
    out, _ = run.communicate(timeout=60)
    again = spawnsim.run(tmp_path / "train.py", ranks=12, seed=3, parameters={"flag": str(tmp_path / "go")})
    assert json.loads(out)["digest"] == again.totals["digest"]
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == [
        "events.jsonl",
        "inputs",
        "metrics.npz",
        "run.json",
    ]


def test_who_watches_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    """The page says then that the run has not finished, with all that was recorded."""
    run = started(tmp_path, "--ranks", "12")
    stream = Stream(address(run))
    stream.until("11 waiting</span>")
    run.send_signal(signal.SIGKILL)
    kind, page = stream.last()
    assert (kind, "12 not finished</span>" in page) == ("end", True)
    run.communicate(timeout=60)


@pytest.mark.mpi
@pytest.mark.flaky(reruns=2)
def test_a_real_run_is_seen_while_it_goes_on(tmp_path: Path) -> None:
    """The rank that waits tells its call, of its own accord, and the only row that it has recorded is there."""
    run = started(tmp_path, "--backend", "mpi", "-n", "3")
    stream = Stream(address(run))
    stream.until(
        "2 waiting</span>", "1 computing</span>", "rank 0: waiting in Barrier", "iteration 0, loss 1"
    )
    (tmp_path / "go").touch()
    kind, page = stream.last()
    assert (kind, "3 finished</span>" in page, "How the runs ended: finished" in page) == ("end", True, True)
    run.communicate(timeout=60)
    assert run.returncode == 0


def test_what_cannot_be_read_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that has ended nothing more comes, so there is nothing to wait for."""
    synthetic.run(ranks=2, iterations=2).save(tmp_path)
    (tmp_path / "metrics.npz").write_bytes(b"PK")
    assert command(["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"spawnsim: cannot read {tmp_path}/metrics.npz: ")


@pytest.mark.parametrize(
    ("names", "out", "kind", "message"),
    [
        (
            ["tensorbord"],
            "a",
            ParameterError,
            "observe='tensorbord': no such observer; did you mean tensorboard?",
        ),
        (["x"], "a", ParameterError, "the observers are: live, tensorboard, wandb"),
        (["live"], None, ParameterError, r"an observer reads the run folder: give one \(--out DIR\)"),
        (
            ["wandb"],
            "a",
            UnsupportedError,
            r"observe='wandb' needs no_such_package: pip install 'spawnsim\[wandb\]'",
        ),
    ],
)
def test_what_cannot_watch_is_refused_before_anything_runs(
    names: list[str],
    out: str | None,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One sentence, also on real ranks; no folder is made."""
    monkeypatch.chdir(tmp_path)
    gone = watched.OBSERVERS["wandb"]._replace(package="no_such_package")
    monkeypatch.setitem(watched.OBSERVERS, "wandb", gone)
    (tmp_path / "train.py").write_text(PROGRAM)
    with pytest.raises(kind, match=message):
        spawnsim.run("train.py", ranks=2, out=out, observe=names)
    line = ["run", "train.py", "-n", "2", "--observe", names[0], *(["--out", out] if out else [])]
    assert [command(line), command([*line, "--backend", "mpi"])] == [2, 2]
    assert os.listdir(tmp_path) == ["train.py"]
