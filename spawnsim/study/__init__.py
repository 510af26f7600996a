"""Studies: grids of runs and seeds through any executor, a store that resumes, then figures.

This floor knows runs and figures; it must not know what a program trains or which policy is better.
"""

from __future__ import annotations

from spawnsim.study.cell import Cell, grid
from spawnsim.study.context import Context, Result
from spawnsim.study.store import Cost, Store
from spawnsim.study.sweeping import pool, sweep

__all__ = ["Cell", "Context", "Cost", "Result", "Store", "grid", "pool", "sweep"]
