"""Studies: grids of runs and seeds through any executor, a store that resumes, then figures.

What a program trains, or which policy is better, is not known here.
"""

from __future__ import annotations

from spawnsim.study.context import Context, Result
from spawnsim.study.store import Cell, Cost, Store, grid
from spawnsim.study.sweeping import pool, sweep

__all__ = ["Cell", "Context", "Cost", "Result", "Store", "grid", "pool", "sweep"]
