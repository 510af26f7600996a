"""Validation: a real run, and the same run predicted on virtual ranks of a calibrated platform.

This floor knows both buildings and what they are compared by. It must not know what programs train.
"""

from spawnsim.validate.comparing import Repeat, Row, differences, summary, table
from spawnsim.validate.predicting import Prediction, Setting, Times, predict, times
from spawnsim.validate.watching import Seen, watched

__all__ = [
    "watched", "Seen", "predict", "Prediction", "Setting", "Times", "times", "Repeat", "Row", "summary",
    "table", "differences",
]  # fmt: skip
