"""How often clusters fail: published rates by name, and fault plans drawn from them.

Nodes fail at random and independently, each with all its ranks. The job as a whole also fails, through its software or
its shared parts, at a rate that does not grow with the number of nodes. The two are separate processes: 6.50 failures
per 1,000 node-days of RSC-1 give a job on 1,024 GPUs (128 nodes) one failure in 28.8 h, while 7.9 h were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spawnsim import random
from spawnsim.errors import ParameterError
from spawnsim.models.faults.events import Crash
from spawnsim.models.faults.plan import FaultPlan

DAY_S = 86_400.0

PERSISTENT = "speed:0.04"
"""Stragglers as measured by ByteDance (Lin et al., OSDI 2025; 3,079 jobs of at least 128 GPUs): slowness persists on a
machine, and hardly varies from step to step. The slowest of 128 ranks with this spread is 11 % slower than the mean,
close to the 10.4 % of GPU-hours that those jobs lost."""


@dataclass(frozen=True)
class FailureRate:
    """How often a cluster fails.

    Attributes:
        per_1000_node_days: failures of single nodes.
        job_mtbf_s: mean seconds between failures of a job as a whole; inf: not distinguished from node failures.
        source: publication of the figures.
    """

    per_1000_node_days: float
    job_mtbf_s: float
    source: str

    @property
    def node_mtbf_s(self) -> float:
        """Mean seconds between failures of one node."""
        return 1000.0 * DAY_S / self.per_1000_node_days

    def rank_mtbf_s(self, ranks_per_node: int) -> float:
        """Return the mean time between failures of one rank, derived from its node's.

        Args:
            ranks_per_node: number of ranks that fail together, at least 1.

        Returns:
            Seconds for one rank, such that a job of many nodes fails as often as its nodes do.

        Raises:
            ParameterError: fewer than 1 rank.
        """
        if ranks_per_node < 1:
            raise ParameterError(f"ranks_per_node={ranks_per_node}: give at least 1")
        return self.node_mtbf_s * ranks_per_node

    def plan(self, ranks: int, *, ranks_per_node: int = 8, horizon_s: float, seed: int = 0) -> FaultPlan:
        """Return crashes of nodes up to a time, drawn from the seed; each takes all ranks of its node.

        Failures of the whole job are not included, since no rank would survive them.

        Args:
            ranks: number of ranks of the job.
            ranks_per_node: neighbours that crash together, at least 1.
            horizon_s: virtual seconds to plan for.
            seed: seed of the draws; a node's time does not depend on the number of nodes.

        Returns:
            The plan; a node dies once at most.

        Raises:
            ParameterError: fewer than 1 rank, or a horizon that is not above 0 s.
        """
        if ranks < 1 or ranks_per_node < 1 or not 0 < horizon_s < math.inf:
            raise ParameterError(
                f"{ranks} ranks, {ranks_per_node} a node, {horizon_s} s: give at least 1 rank and a time above 0 s"
            )
        crashes = []
        for node in range(-(-ranks // ranks_per_node)):
            at_s = random.generator(seed, node, "faults.rates").exponential(self.node_mtbf_s)
            first = node * ranks_per_node
            members = range(first, min(first + ranks_per_node, ranks)) if at_s < horizon_s else ()
            crashes += [Crash(rank, float(at_s)) for rank in members]
        return FaultPlan(tuple(crashes), seed=seed)


_META = "Kokolis et al., arXiv 2410.21680"
FAILURES = {
    # Of the job: the remaining rate of the measured 7.9 h at 1,024 GPUs after subtracting the nodes' 28.8 h.
    "rsc-1": FailureRate(6.50, 3600 / (1 / 7.9 - 1 / 28.8), f"{_META}, Meta RSC-1"),
    "rsc-2": FailureRate(2.34, math.inf, f"{_META}, Meta RSC-2; node failures alone"),
    # 419 unexpected interruptions in 54 days on 2,048 servers, of any cause.
    "llama3": FailureRate(419 / 54 / 2.048, math.inf, "Llama 3, arXiv 2407.21783; 54 days, 16,384 GPUs"),
}
