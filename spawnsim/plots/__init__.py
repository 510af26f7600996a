"""Figures from runs: convergence, replacement, genealogy, time use, diversity.

Each figure is a pure function from a table to a NamedTuple of arrays and a thin function `draw…(info, ax=None)` that
returns the Axes; `figure(runs)` composes them at slide size. Nothing opens a window or changes matplotlib's state.
How runs are made is not known here.
"""

from __future__ import annotations

from spawnsim.plots import convergence, diversity, gallery, genealogy, replacement, series, timeuse
from spawnsim.plots.experiments import Group, Groups, Recorded, grouped, read
from spawnsim.plots.gallery import figures, save_all
from spawnsim.plots.style import FORMATS, save, talk

__all__ = [
    "FORMATS",
    "Group",
    "Groups",
    "Recorded",
    "convergence",
    "diversity",
    "figures",
    "gallery",
    "genealogy",
    "grouped",
    "replacement",
    "read",
    "save",
    "save_all",
    "series",
    "talk",
    "timeuse",
]
