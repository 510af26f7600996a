"""Training tasks of ranks: small learners on real input, one object per rank.

A learner receives its rank and the number of ranks as plain integers, and never communicates with another learner: it
does not use communicators, policies and clocks. Steps and evaluations use `spawnsim.training`, which batches them on
virtual ranks.
"""

from spawnsim.workloads.digits import Digits
from spawnsim.workloads.gflownet import GFlowNet, HyperGrid
from spawnsim.workloads.mlp import MLP

__all__ = ["MLP", "Digits", "GFlowNet", "HyperGrid"]
