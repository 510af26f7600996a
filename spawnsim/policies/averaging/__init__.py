"""Averaging among ranks that find each other: in groups by hivemind's protocol or by a rule, in pairs, over a tree.

Pure first: `grouping` (who may form a group), `vector` (the averaged tensors, cut into parts), `butterfly` (the
all-reduce of a group), `matchmaking` (finding one), `gossip` and `tree` (averaging at intervals of the clock),
`leadership` (which rank coordinates a tree). `steps`, `download` and `averager` tie them together; `interface` is what
a caller gives and gets. Messages travel by `exchange.endpoint`.
"""

from __future__ import annotations

from spawnsim.policies.averaging.averager import DecentralizedAverager
from spawnsim.policies.averaging.butterfly import Role
from spawnsim.policies.averaging.grouping import Everyone, Exponential, Grid, Matchmaking, Pairs, RandomGroups
from spawnsim.policies.averaging.interface import Averaged, AveragingFailed, Cancelled, Stage, StepControl
from spawnsim.policies.state.codecs import (
    Blockwise8Bit,
    Codec,
    CompressionInfo,
    Float16,
    NoCompression,
    PerTensorCompression,
    Quantile8Bit,
    RoleAdaptiveCompression,
    Scaled16Bit,
    SizeAdaptiveCompression,
    TensorRole,
    Uniform8Bit,
)

__all__ = [
    "Averaged",
    "AveragingFailed",
    "Blockwise8Bit",
    "Cancelled",
    "Codec",
    "CompressionInfo",
    "DecentralizedAverager",
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
