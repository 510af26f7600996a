"""Averaging among ranks that find each other: in groups by hivemind's protocol or by a rule, in pairs, over a tree.

Pure modules: `vector` (the averaged tensors, cut into parts), `butterfly` (the all-reduce of a group), `gossip` and
`tree` (averaging at intervals of the clock), `interface` (settings, static rules, handles and results). The others are
`directory` (declarations, and the download of states), `matchmaking` (finding a group), `steps`, and `averager`, which
combines them. `exchange.endpoint` transports the messages.
"""

from __future__ import annotations

from spawnsim.policies.averaging.averager import DecentralizedAverager
from spawnsim.policies.averaging.butterfly import Role
from spawnsim.policies.averaging.interface import (
    Averaged,
    AveragingFailed,
    Cancelled,
    Everyone,
    Exponential,
    Grid,
    Matchmaking,
    RandomGroups,
    Stage,
    StepControl,
)
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
