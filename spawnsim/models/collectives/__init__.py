"""Collectives: algorithms as schedules of messages, their timing as a dataflow over arrival times, their selection.

All of this is schedules, networks' costs and clocks as numbers: no buffers, no kernel, no greenlets.
"""

from spawnsim.models.collectives.catalogue import ALGORITHMS, Selection, names
from spawnsim.models.collectives.dataflow import Finish
from spawnsim.models.collectives.faulty import Damage, Strike, Struck
from spawnsim.models.collectives.timing import CollectivePlan, Edges, Planner, Timing, depends, finish

__all__ = [
    "ALGORITHMS", "CollectivePlan", "Damage", "Edges", "Finish", "Planner", "Selection", "Strike", "Struck",
    "Timing", "depends", "finish", "names",
]  # fmt: skip
