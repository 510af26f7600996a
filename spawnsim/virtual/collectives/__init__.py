"""Collectives: algorithms as schedules of messages, their timing as a dataflow over arrival times, their selection.

This room knows schedules, networks' costs and clocks as numbers. It must not know buffers, the kernel or greenlets.
"""

from spawnsim.virtual.collectives.catalogue import ALGORITHMS, names
from spawnsim.virtual.collectives.dataflow import Finish
from spawnsim.virtual.collectives.faulty import Damage, Strike, Struck
from spawnsim.virtual.collectives.plan import Plan, Step
from spawnsim.virtual.collectives.selection import Selection
from spawnsim.virtual.collectives.timing import Edges, Planner, Timing, depends, finish

__all__ = [
    "ALGORITHMS", "Damage", "Edges", "Finish", "Plan", "Planner", "Selection", "Step", "Strike", "Struck", "Timing",
    "depends", "finish", "names",
]  # fmt: skip
