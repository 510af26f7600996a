"""Columnar mode: ranks as rows of arrays, without stacks: a million ranks, or thousands of ranks that train."""

from spawnsim.columnar.experiment import Experiment
from spawnsim.columnar.models import Quality, RandomWalk
from spawnsim.columnar.records import Round
from spawnsim.columnar.running import run, run_all
from spawnsim.columnar.supported import InTurn
from spawnsim.columnar.training import Training
from spawnsim.policies.rules.donors import Decision

__all__ = ["Decision", "Experiment", "InTurn", "Quality", "RandomWalk", "Round", "Training", "run", "run_all"]
