"""Columnar mode: ranks as rows of arrays, without stacks: a million ranks, or thousands of ranks that train."""

from spawnsim.columnar.models import Quality, RandomWalk
from spawnsim.columnar.running import Round, run
from spawnsim.columnar.training import Training
from spawnsim.policies.rules.donors import Decision

__all__ = ["Decision", "Quality", "RandomWalk", "Round", "Training", "run"]
