"""Compute times of virtual ranks: durations, stragglers, recorded runs."""

from spawnsim.models.compute.model import ComputeModel, Fixed, Sampler, Trace, parse_base, parse_stragglers
from spawnsim.models.compute.stragglers import (
    Bimodal,
    Constant,
    Exponential,
    Gamma,
    Lognormal,
    Markov,
    Noise,
    Pareto,
    Slow,
    SlowRank,
    Speed,
    Straggler,
    StreamKey,
)

__all__ = [
    "ComputeModel", "Sampler", "Fixed", "Trace", "Straggler", "StreamKey", "Noise",
    "Lognormal", "Exponential", "Pareto", "Gamma", "Bimodal", "Constant", "Speed", "Slow", "SlowRank", "Markov",
    "parse_stragglers", "parse_base",
]  # fmt: skip
