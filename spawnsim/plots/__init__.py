"""Figures from runs: convergence, replacement, genealogy, time use, diversity.

Each figure is a pure function from a table to a NamedTuple of arrays and a thin function `draw…(info, ax=None)` that
returns the Axes; `figure(runs)` composes them at slide size. Nothing opens a window or changes matplotlib's state.
How runs are made is not known here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

# Loaded when they are first used: studies and searches for failures read runs by `experiments`, and matplotlib takes
# longer to load than all else that they need, in each of their processes.
_MODULES = {"convergence", "diversity", "gallery", "genealogy", "replacement", "series", "timeuse"}
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
