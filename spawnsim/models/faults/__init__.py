"""Faults of virtual ranks and links: as data (`events`, `plan`, `swarm`), and applied to a run (`injection`).

This package exports only the data: the kind, place and time of each fault.
"""

from spawnsim.models.faults.events import (
    DELIVERED,
    KINDS,
    Clog,
    Corrupt,
    Crash,
    Delay,
    Drop,
    Duplicate,
    Fault,
    LinkDown,
    LinkFault,
    Partition,
    Pause,
    Reorder,
    Restart,
    Skew,
    SlowDown,
    Verdict,
)
from spawnsim.models.faults.failures import Failures
from spawnsim.models.faults.plan import FaultPlan
from spawnsim.models.faults.swarm import Swarm

__all__ = [
    "FaultPlan", "Swarm", "Fault", "LinkFault", "Verdict", "DELIVERED", "KINDS",
    "Crash", "Restart", "Pause", "SlowDown", "Skew", "Failures",
    "LinkDown", "Drop", "Duplicate", "Corrupt", "Delay", "Partition", "Clog", "Reorder",
]  # fmt: skip
