"""What ranks train on: small learners on real input, one object per rank.

This floor knows torch, random streams and its own data. It must not know communicators, policies or clocks: a
learner is given its rank and the number of ranks as plain integers, and never talks to another one.
"""

from spawnsim.workloads.arena import Arena
from spawnsim.workloads.digits import Digits
from spawnsim.workloads.gflownet import GFlowNet
from spawnsim.workloads.hypergrid import HyperGrid
from spawnsim.workloads.mlp import MLP
from spawnsim.workloads.sgd import SGD

__all__ = ["MLP", "SGD", "Arena", "Digits", "GFlowNet", "HyperGrid"]
