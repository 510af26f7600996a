"""The measured cluster: the fit gives its points back, the table is what the study makes, and follows a closed form."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.studies import STUDIES, study_of

from spawnsim.study import Context

EXPECTED = STUDIES / "expected" / "diloco_measured_predictions.csv"


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    """The study's module."""
    return study_of("diloco_measured")


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_made_up_cluster_is_given_back(measured: ModuleType) -> None:
    """Points that follow the model give its numbers; a fit of a link that lost nothing has no losses."""
    truth = measured.Fit(0.030, 0.08, 400e6 / 8, 0.020)
    points = {rate: (truth.wire_s(rate) + 0.030 + 300e-6, 0.020) for rate in measured.LINKS_BPS.values()}
    found = measured.fit(points)
    assert found.overhead_s == pytest.approx(0.030)
    assert found.loss == pytest.approx(0.08)
    assert found.lossless_rate == pytest.approx(400e6 / 8)
    assert measured.fit({rate: points[rate] for rate in list(points)[2:]}).loss == 0.0


def test_points_left_out_are_predicted(measured: ModuleType) -> None:
    """Each of the four points from the other three, within 5 %."""
    points, _ = measured.read_points(STUDIES / "data" / "diloco_measured.csv")
    errors = dict(measured.leave_one_out(points))
    assert len(errors) == 4
    assert max(map(abs, errors.values())) < 0.05
    assert max(map(abs, errors.values())) > 0.01  # they are errors of prediction, not residuals


def test_the_table_follows_a_closed_form(measured: ModuleType) -> None:
    """All 69 runs: a ring's bytes over the goodput, and so many exchanges as the window of steps holds."""
    points, rows = measured.read_points(STUDIES / "data" / "diloco_measured.csv")
    found, table = measured.fit(points), _rows(EXPECTED)
    assert len(table) == 69
    rates = measured.LINKS_BPS | {"none": measured.UNSHAPED_BPS}
    for row in table:
        rate, h = rates[row["link"]], int(row["H"])
        lost = found.loss * max(math.log(found.lossless_rate / rate), 0.0)
        exchange_s = 1.5 * 4 * 30_846_720 / (rate * 8949 / 9015) * (1 + lost) + found.overhead_s + 6 * 50e-6
        steps, warmup = measured.window(h, row["link"])
        exchanges = steps // h - warmup // h
        first_s = measured.FIRST_S if h > warmup else 0.0  # the median has all of it, half of it, or nothing
        sync_s = exchange_s + first_s * {1: 1.0, 2: 0.5}.get(exchanges, 0.0)
        assert float(row["sync_ms"]) == pytest.approx(1e3 * sync_s, rel=1e-5, abs=0.2)
        computed_s = (steps - warmup) * found.step_s
        assert float(row["utilisation"]) == pytest.approx(
            computed_s / (computed_s + exchanges * exchange_s + first_s), abs=1e-5, rel=1e-3
        )
    # Where there is a measured point, its own count of exchanges and its utilisation come out.
    predicted = {(row["algorithm"], row["H"], row["link"]): row for row in table}
    for row in rows:
        steps, warmup = measured.window(8, row["link"])
        assert (steps, warmup, steps // 8 - warmup // 8) == (
            int(row["steps"]),
            int(row["warmup"]),
            int(row["outer_steps"]),
        )
        own = predicted[row["algorithm"], row["H"], row["link"]]
        assert float(own["sync_ms"]) == pytest.approx(float(row["sync_ms"]), rel=0.01)
        assert float(own["utilisation"]) == pytest.approx(float(row["utilisation"]), rel=0.008)


def test_the_table_is_complete_and_monotone(measured: ModuleType) -> None:
    """Every combination as often as it was run; a faster link or a rarer exchange never leaves less for computing."""
    table = {tuple(row.values())[:4]: row for row in _rows(EXPECTED)}
    links, cadences = list(measured.LINKS_BPS), [str(h) for h in measured.H]
    runs = [("ddp", "1", link, "0") for link in (*links, "none")]
    runs += [("localsgd", h, link, "0") for h in cadences for link in links]
    runs += [("diloco", h, link, str(repeat)) for h in cadences for link in links for repeat in range(3)]
    assert sorted(table) == sorted(runs)
    for name in ("localsgd", "diloco"):
        used = [[float(table[name, h, link, "0"]["utilisation"]) for link in links] for h in cadences]
        took = [[float(table[name, h, link, "0"]["sync_ms"]) for link in links] for h in cadences]
        for row in used + [list(column) for column in zip(*used, strict=True)]:
            assert row == sorted(set(row)), row
        for row in took:
            assert row == sorted(row, reverse=True)
        for row in took[:2]:
            assert row == pytest.approx(took[0], rel=1e-3)  # an exchange takes as long, whatever the cadence
        first_ms = 1e3 * measured.FIRST_S  # but with one exchange in 128 steps, it is a first one
        assert took[3] == pytest.approx([each + first_ms for each in took[0]], rel=1e-3)
    assert float(table["ddp", "1", "none", "0"]["sync_ms"]) < float(table["ddp", "1", "5g", "0"]["sync_ms"])


def test_the_study_makes_the_table(measured: ModuleType, tmp_path: Path) -> None:
    """The small version's rows are rows of the committed table."""
    said: list[str] = []
    measured.study(Context("diloco_measured", STUDIES, tmp_path, quick=True, jobs=0, say=said.append))
    own, expected = _rows(tmp_path / EXPECTED.name), _rows(EXPECTED)
    keys = ("algorithm", "H", "link", "repeat")
    table = {tuple(row[key] for key in keys): row for row in expected}
    assert len(own) == 4 + 4 + 12 + 1
    for row in own:
        twin = table[tuple(row[key] for key in keys)]
        assert [float(row[key]) for key in row if key not in keys] == pytest.approx(
            [float(twin[key]) for key in row if key not in keys], rel=1e-4
        ), row
    assert any("left out: predicted" in line for line in said)
