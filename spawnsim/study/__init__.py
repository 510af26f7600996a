"""Studies: grids of runs and seeds through any executor, a store that resumes, then figures.

This package does not know what a program trains, or which policy is better.
"""

from __future__ import annotations

from spawnsim.study.context import Context, Result
from spawnsim.study.executors import pool
from spawnsim.study.results import Sweep
from spawnsim.study.store import Cell, Cost, Store, grid
from spawnsim.study.sweeping import sweep

__all__ = ["Cell", "Context", "Cost", "Result", "Store", "Sweep", "grid", "pool", "sweep"]
