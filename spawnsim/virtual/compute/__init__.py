"""Compute times of virtual ranks: durations, stragglers, traces.

This room knows how long blocks take. It must not know what happens in them, nor the kernel whose clock they move.
"""

from spawnsim.virtual.compute.episodes import Markov
from spawnsim.virtual.compute.model import ComputeModel, Fixed, Sampler
from spawnsim.virtual.compute.noise import Bimodal, Exponential, Gamma, Lognormal, Noise, Pareto
from spawnsim.virtual.compute.persistent import Constant, Slow, SlowRank, Speed
from spawnsim.virtual.compute.straggler import Straggler, StreamKey
from spawnsim.virtual.compute.text import parse_base, parse_stragglers
from spawnsim.virtual.compute.trace import Trace

__all__ = [
    "ComputeModel", "Sampler", "Fixed", "Trace", "Straggler", "StreamKey", "Noise",
    "Lognormal", "Exponential", "Pareto", "Gamma", "Bimodal", "Constant", "Speed", "Slow", "SlowRank", "Markov",
    "parse_stragglers", "parse_base",
]  # fmt: skip
