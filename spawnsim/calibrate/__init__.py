"""Calibration: measure a communicator, fit a platform to it, and say how well it fits.

This floor knows communicators, platforms and the virtual building. It must not know programs that train.
"""

from spawnsim.calibrate.fitting import fit
from spawnsim.calibrate.judging import Pair, Score, compare, scores, table
from spawnsim.calibrate.measuring import Measured, measure
from spawnsim.calibrate.sampling import Effort, Point
from spawnsim.calibrate.stragglers import fit_stragglers

__all__ = [
    "measure", "Measured", "Effort", "Point", "fit", "fit_stragglers", "compare", "scores", "table", "Pair", "Score",
]  # fmt: skip
