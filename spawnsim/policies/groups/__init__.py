"""Averaging in groups: find a few peers, average with them, find others next time.

Pure rooms first: `keys` and `static` (who belongs together), `directory` and `search` (how they find each other),
`balance` and `parts` (how a vector is cut; `compression` chooses how it is packed), `butterfly` with `reducing` and
`sending` (how a group averages), `sharing` (how a newcomer gets a state). Only `post` and `desk` send and receive;
`peer`, `averager` and `policy` tie them together.
"""

from __future__ import annotations

from spawnsim.policies.codecs import (
    Blockwise8Bit,
    Codec,
    Float16,
    NoCompression,
    Quantile8Bit,
    Scaled16Bit,
    Uniform8Bit,
)
from spawnsim.policies.groups.averager import DecentralizedAverager
from spawnsim.policies.groups.butterfly import Role
from spawnsim.policies.groups.compression import (
    CompressionInfo,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorRole,
)
from spawnsim.policies.groups.control import AveragingFailed, Cancelled, Stage, StepControl
from spawnsim.policies.groups.policy import DecentralizedAveragingPolicy
from spawnsim.policies.groups.results import Averaged
from spawnsim.policies.groups.static import Everyone, Exponential, Grid, Matchmaking, Pairs, RandomGroups

__all__ = [
    "Averaged",
    "AveragingFailed",
    "Blockwise8Bit",
    "Cancelled",
    "Codec",
    "CompressionInfo",
    "DecentralizedAverager",
    "DecentralizedAveragingPolicy",
    "Everyone",
    "Exponential",
    "Float16",
    "Grid",
    "Matchmaking",
    "NoCompression",
    "Pairs",
    "PerTensorCompression",
    "Quantile8Bit",
    "RandomGroups",
    "Role",
    "RoleAdaptiveCompression",
    "Scaled16Bit",
    "SizeAdaptiveCompression",
    "Stage",
    "StepControl",
    "TensorRole",
    "Uniform8Bit",
]
