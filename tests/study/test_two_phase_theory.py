"""Two-phase optimizers: the recursion of second moments against brute force and Monte Carlo, and the quick study."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.studies import STUDIES, study_of

from spawnsim.study import Context
from spawnsim.study.claims import read


@pytest.fixture(scope="module")
def study() -> ModuleType:
    """Return the study's module."""
    return study_of("two_phase_theory")


@pytest.mark.parametrize("divisor", ["all", "present"])
def test_absence_is_averaged_over_all_masks(study: ModuleType, divisor: str) -> None:
    """E[s], E[s²] and E[s²/K] equal an enumeration; without absence they are 1, 1 and 1/M."""
    outer = study.Outer(4, absent=0.3, divisor=divisor)
    found = np.zeros(3)
    for mask in itertools.product((0, 1), repeat=4):
        count = sum(mask)
        scale = count / 4 if divisor == "all" else float(count > 0)
        found += 0.7**count * 0.3 ** (4 - count) * np.array([scale, scale**2, scale**2 / max(count, 1)])
    assert outer.moments() == pytest.approx(tuple(found))
    assert replace(outer, absent=0.0).moments() == pytest.approx((1.0, 1.0, 0.25))


def test_one_worker_with_a_plain_unit_step_is_sgd(study: ModuleType) -> None:
    """Then rounds are nothing but steps; settings along an axis are those one by one."""
    matrix, shift = study.worker(1 + 3 * study.H)
    plain = study.predicted(study.Outer(1), 3)
    assert plain[3] == pytest.approx((matrix @ np.ones(study.D) + shift) @ study.SPECTRUM / 2)
    betas = np.array([0.0, 0.5])
    for nesterov in (False, True):
        both = study.predicted(study.Outer(3, 0.7, betas, nesterov), 4)
        alone = [study.predicted(study.Outer(3, 0.7, beta, nesterov), 4) for beta in betas]
        np.testing.assert_allclose(both, np.transpose(alone))


@pytest.mark.parametrize(
    ("momentum", "nesterov", "absent", "divisor"),
    [(0.0, False, 0.0, "all"), (0.7, False, 0.0, "all"), (0.8, True, 0.0, "all"),
     (0.8, True, 0.5, "all"), (0.7, False, 0.5, "present")],
)  # fmt: skip
def test_lives_agree_with_the_recursion(
    study: ModuleType, momentum: float, nesterov: bool, absent: float, divisor: str
) -> None:
    """Means of 3,000 lives of 3 workers over 5 rounds within 4 standard errors, which are at most 3 %."""
    outer = study.Outer(3, 0.7, momentum, nesterov, absent, divisor)
    lives = study.sampled(outer, 5, 3000, seed=1)
    theory, error = study.predicted(outer, 5), lives.std(1, ddof=1) / math.sqrt(3000)
    assert (np.abs(lives.mean(1) - theory) < 4 * error).all()
    assert (error < 0.03 * theory).all()


def test_fourth_moments_count(study: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large rate and single samples: lives agree with the recursion, which is 11 % lower without its 1/B."""
    monkeypatch.setattr(study, "RATE", 0.3)
    monkeypatch.setattr(study, "BATCH", 1)
    lives = study.sampled(study.Outer(1), 1, 40_000, seed=1)[1]
    theory = study.predicted(study.Outer(1), 1)[1]
    assert abs(lives.mean() - theory) < 4 * lives.std(ddof=1) / math.sqrt(len(lives)) < 0.02 * theory


def test_the_quick_study(study: ModuleType, tmp_path: Path) -> None:
    """Live columns agree with theory in every round; the best momentum changes with absence."""
    study.study(Context("two_phase_theory", STUDIES, tmp_path, quick=True))
    oracle, acceleration, absence = read(tmp_path)
    assert oracle.verdict == absence.verdict == "holds"
    assert "16 workers, 12 rounds" in acceleration.found
    assert (tmp_path / "two_phase_theory.png").exists()
