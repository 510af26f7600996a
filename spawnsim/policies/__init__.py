"""Policies: when ranks average or replace models, which ranks do, from which donors, and how weights travel.

The modules with policies: `average_all` (one collective), `selective` (asynchronous messages), `one_sided` (windows),
`population` (PBT and soups), `decentralized` (small groups that find each other), `gossip` (neighbours on a graph),
`asynchronous` (exchanges during training), `server` (workers and servers), `outer_optimizer` (FedAvg to DiLoCo),
`streaming` (DiLoCo in fragments, and one round late), `decoupled` (by quorum), `edit`, `noloco`, `easgd`, `sparta`,
`wagma` (groups that wait for no rank), and `replay` (a recorded run's decisions). `base` defines the call that they
share. Their parts: `rules` (pure decisions, without communicator or torch), `state` (a model as bytes, without a
communicator), `exchange` (messages, windows and collectives between ranks), and `averaging` (groups, pairs and trees of
ranks that average). Policies import `spawnsim.comm`, torch and numpy, and no backend.
"""

from __future__ import annotations

from spawnsim.policies.asynchronous import AsyncModelAveragePolicy
from spawnsim.policies.average_all import AverageAllPolicy
from spawnsim.policies.averaging import DecentralizedAverager
from spawnsim.policies.base import SpawnPolicy
from spawnsim.policies.decentralized import DecentralizedAveragingPolicy
from spawnsim.policies.decoupled import DecoupledDiLoCoPolicy
from spawnsim.policies.easgd import EASGDPolicy
from spawnsim.policies.edit import EDiTPolicy
from spawnsim.policies.exchange.coordinator import ExchangeOptions, Wiring
from spawnsim.policies.exchange.group_mean import Consensus
from spawnsim.policies.exchange.replacement import Renewal, Replacement
from spawnsim.policies.exchange.server import ServerOptions, Tier
from spawnsim.policies.exchange.window_set import WindowOptions, Windows
from spawnsim.policies.gossip import GossipPolicy
from spawnsim.policies.noloco import NoLoCoPolicy
from spawnsim.policies.one_sided import OneSidedSelectiveAveragingPolicy
from spawnsim.policies.outer_optimizer import OuterOptimizerPolicy
from spawnsim.policies.population import Perturb, PopulationBasedTrainingPolicy, greedy_soup, uniform_soup
from spawnsim.policies.replay import ReplayPolicy, replay
from spawnsim.policies.rules import graphs
from spawnsim.policies.rules.cadence import Adaptive, Cadence, Deadline, Every, Fixed, When
from spawnsim.policies.rules.donors import Best, ByMetric, Neighbours, OneOfBest, Uniform
from spawnsim.policies.rules.merging import OutlierFilter
from spawnsim.policies.rules.selection import Expired, Report, Threshold, WorstRatio
from spawnsim.policies.rules.staleness import Polynomial, ServerRule, constant
from spawnsim.policies.selective import AsyncSelectiveAveragingPolicy
from spawnsim.policies.server import HALOS, AsyncServerPolicy
from spawnsim.policies.sparta import SPARTAPolicy
from spawnsim.policies.state.difference_codecs import DCT, LowBit, TopK
from spawnsim.policies.state.layout import StateScope, Travels, one_storage
from spawnsim.policies.streaming import OneRoundLatePolicy, StreamingDiLoCoPolicy
from spawnsim.policies.wagma import WAGMAPolicy

__all__ = [
    "HALOS",
    "Adaptive",
    "AsyncModelAveragePolicy",
    "AsyncSelectiveAveragingPolicy",
    "AsyncServerPolicy",
    "AverageAllPolicy",
    "Best",
    "ByMetric",
    "Cadence",
    "Consensus",
    "DCT",
    "Deadline",
    "DecentralizedAverager",
    "DecentralizedAveragingPolicy",
    "DecoupledDiLoCoPolicy",
    "EASGDPolicy",
    "EDiTPolicy",
    "Every",
    "ExchangeOptions",
    "Expired",
    "Fixed",
    "LowBit",
    "GossipPolicy",
    "Neighbours",
    "NoLoCoPolicy",
    "OneRoundLatePolicy",
    "OneSidedSelectiveAveragingPolicy",
    "OuterOptimizerPolicy",
    "OutlierFilter",
    "OneOfBest",
    "Perturb",
    "Polynomial",
    "PopulationBasedTrainingPolicy",
    "Renewal",
    "Replacement",
    "ReplayPolicy",
    "Report",
    "SPARTAPolicy",
    "ServerOptions",
    "ServerRule",
    "SpawnPolicy",
    "StateScope",
    "StreamingDiLoCoPolicy",
    "Threshold",
    "TopK",
    "Tier",
    "Travels",
    "Uniform",
    "WAGMAPolicy",
    "When",
    "WindowOptions",
    "Windows",
    "Wiring",
    "WorstRatio",
    "constant",
    "graphs",
    "greedy_soup",
    "one_storage",
    "replay",
    "uniform_soup",
]
