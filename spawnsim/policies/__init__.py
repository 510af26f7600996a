"""Policies: when, who, from whom, how much, and how weights travel between ranks.

A policy is cadence × selection × donors × mixing × transport. The first four are plain functions and small frozen
objects (`cadence`, `selection`, `donors`, `mixing`), tested without a communicator; transports are `average_all`
(one collective), `selective` (asynchronous messages), `one_sided` (windows), `groups` (small groups that find each
other) and `by_clock` (exchanges while training goes on). This floor knows `spawnsim.comm`,
torch and numpy; it knows neither building.
"""

from __future__ import annotations

from spawnsim.policies.average_all import AverageAllPolicy
from spawnsim.policies.by_clock import AsyncModelAveragePolicy
from spawnsim.policies.cadence import Cadence, Every, When
from spawnsim.policies.consensus import Consensus
from spawnsim.policies.deadlines import Adaptive, Deadline, Fixed
from spawnsim.policies.donors import Best, ByMetric, Neighbours, Uniform
from spawnsim.policies.groups import DecentralizedAverager, DecentralizedAveragingPolicy
from spawnsim.policies.one_sided import OneSidedSelectiveAveragingPolicy
from spawnsim.policies.policy import SpawnPolicy
from spawnsim.policies.renewal import Renewal
from spawnsim.policies.replay import ReplayPolicy, replay
from spawnsim.policies.selection import Expired, Report, Threshold, WorstRatio
from spawnsim.policies.selective import AsyncSelectiveAveragingPolicy
from spawnsim.policies.state import Travels
from spawnsim.policies.storage import one_storage
from spawnsim.policies.windows import Windows
from spawnsim.policies.wiring import Wiring

__all__ = [
    "Adaptive",
    "AsyncModelAveragePolicy",
    "AsyncSelectiveAveragingPolicy",
    "AverageAllPolicy",
    "Best",
    "ByMetric",
    "Cadence",
    "Consensus",
    "Deadline",
    "DecentralizedAverager",
    "DecentralizedAveragingPolicy",
    "Every",
    "Expired",
    "Fixed",
    "Neighbours",
    "OneSidedSelectiveAveragingPolicy",
    "Renewal",
    "ReplayPolicy",
    "Report",
    "SpawnPolicy",
    "Threshold",
    "Travels",
    "Uniform",
    "When",
    "Windows",
    "Wiring",
    "WorstRatio",
    "one_storage",
    "replay",
]
