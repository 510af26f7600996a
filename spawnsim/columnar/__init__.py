"""Columnar mode: a policy's timing and decisions for a million ranks, each a row of arrays; no models, no stacks."""

from spawnsim.columnar.decisions import Decision
from spawnsim.columnar.quality import Quality, RandomWalk
from spawnsim.columnar.running import Round, run

__all__ = ["Decision", "Quality", "RandomWalk", "Round", "run"]
