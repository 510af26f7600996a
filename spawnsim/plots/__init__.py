"""Figures from runs: convergence, replacement, genealogy, time use, diversity.

All figures have one protocol: pure functions from tables to NamedTuples of arrays; thin functions `draw…(info,
ax=None)` that return the Axes; and `figure(runs)`, which passes panels, title and caption to `style.compose`, the
only place that makes a figure. Nothing opens a window or changes matplotlib's state. This package does not know how
runs are made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spawnsim.plots import (
        convergence,
        curves,
        diversity,
        gallery,
        genealogy,
        replacement,
        series,
        timeuse,
    )
    from spawnsim.plots.experiments import Group, Groups, Recorded, grouped, read
    from spawnsim.plots.gallery import figures, save_all
    from spawnsim.plots.style import FORMATS, save, talk

__all__ = [
    "FORMATS",
    "Group",
    "Groups",
    "Recorded",
    "convergence",
    "curves",
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

# Loaded at first use: studies and searches for failures read runs with `experiments`, and matplotlib takes longer to
# load than everything else that they need, in each of their processes.
_MODULES = {"convergence", "curves", "diversity", "gallery", "genealogy", "replacement", "series", "timeuse"}
_HOME = {
    **dict.fromkeys(("Group", "Groups", "Recorded", "grouped", "read"), "experiments"),
    **dict.fromkeys(("figures", "save_all"), "gallery"),
    **dict.fromkeys(("FORMATS", "save", "talk"), "style"),
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
