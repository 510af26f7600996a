"""What ranks train on: small learners on real input, one object per rank.

A learner is given its rank and the number of ranks as plain integers, and never talks to another one: communicators,
policies and clocks are not known here. Steps and evaluations are those of `spawnsim.training`: on virtual ranks
executed together.
"""

from spawnsim.workloads.digits import Digits
from spawnsim.workloads.gflownet import GFlowNet, HyperGrid
from spawnsim.workloads.mlp import MLP

__all__ = ["MLP", "Digits", "GFlowNet", "HyperGrid"]
