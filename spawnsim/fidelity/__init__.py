"""Fidelity of the simulator: calibrate it with measurements of a cluster, and validate it with real runs.

Calibration measures a communicator (`microbenchmarks`, `measuring`), fits a platform to the measurements (`fitting`),
and reports how well it fits (`scoring`). Validation watches a real run (`watching`), predicts the same run on virtual
ranks of a calibrated platform, and compares the two (`predicting`). Advice ranks policies on a platform (`goodput`,
`advising`). `inputs` reads files of other tools.
"""

from __future__ import annotations

from spawnsim.fidelity.fitting import fit, fit_stragglers
from spawnsim.fidelity.measuring import Measured, measure
from spawnsim.fidelity.microbenchmarks import Effort, Point
from spawnsim.fidelity.predicting import (
    Prediction,
    Repeat,
    Row,
    Setting,
    Times,
    differences,
    error_table,
    predict,
    summary,
    times,
)
from spawnsim.fidelity.scoring import Pair, Score, compare, score_table, scores
from spawnsim.fidelity.watching import Seen, watched

__all__ = [
    "Effort",
    "Measured",
    "Pair",
    "Point",
    "Prediction",
    "Repeat",
    "Row",
    "Score",
    "Seen",
    "Setting",
    "Times",
    "compare",
    "differences",
    "error_table",
    "fit",
    "fit_stragglers",
    "measure",
    "predict",
    "score_table",
    "scores",
    "summary",
    "times",
    "watched",
]
