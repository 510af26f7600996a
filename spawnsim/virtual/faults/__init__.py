"""Faults of virtual ranks and links, as data.

This room knows what goes wrong, where and when. It must not know the kernel that makes it so.
"""

from spawnsim.virtual.faults.events import (
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
)
from spawnsim.virtual.faults.plan import Plan
from spawnsim.virtual.faults.swarm import Swarm
from spawnsim.virtual.faults.verdict import DELIVERED, Verdict

__all__ = [
    "Plan", "Swarm", "Fault", "LinkFault", "Verdict", "DELIVERED", "KINDS",
    "Crash", "Restart", "Pause", "SlowDown",
    "LinkDown", "Drop", "Duplicate", "Corrupt", "Delay", "Partition",
]  # fmt: skip
