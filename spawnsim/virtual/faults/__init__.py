"""Faults of virtual ranks and links: as data (`events`, `plan`, `swarm`), and carried out on a run (`injection`,
`crashes`).

Only the data are exported: what goes wrong, where and when.
"""

from spawnsim.virtual.faults.events import (
    DELIVERED,
    KINDS,
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
    Restart,
    SlowDown,
    Verdict,
)
from spawnsim.virtual.faults.plan import FaultPlan
from spawnsim.virtual.faults.swarm import Swarm

__all__ = [
    "FaultPlan", "Swarm", "Fault", "LinkFault", "Verdict", "DELIVERED", "KINDS",
    "Crash", "Restart", "Pause", "SlowDown",
    "LinkDown", "Drop", "Duplicate", "Corrupt", "Delay", "Partition",
]  # fmt: skip
