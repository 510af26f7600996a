"""Collectives: algorithms as schedules of messages, their timing as a dataflow over arrival times, their selection.

This room knows schedules, networks' costs and clocks as numbers. It must not know buffers, the kernel or greenlets.
"""

from spawnsim.virtual.collectives.catalogue import ALGORITHMS, names
from spawnsim.virtual.collectives.dataflow import Finish
from spawnsim.virtual.collectives.selection import Selection
from spawnsim.virtual.collectives.timing import Edges, Plan, Planner, Step, Timing, depends, finish

__all__ = [
    "ALGORITHMS", "Edges", "Finish", "Plan", "Planner", "Selection", "Step", "Timing", "depends", "finish", "names",
]  # fmt: skip
