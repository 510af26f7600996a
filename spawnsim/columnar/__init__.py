"""Columnar mode: ranks as rows of arrays, no stacks: decisions and times of a million, or thousands that train."""

from spawnsim.columnar.models import Quality, RandomWalk
from spawnsim.columnar.running import Round, run
from spawnsim.columnar.training import Training
from spawnsim.policies.rules.donors import Decision

__all__ = ["Decision", "Quality", "RandomWalk", "Round", "Training", "run"]
