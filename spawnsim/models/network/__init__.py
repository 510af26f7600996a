"""Networks: the costs of messages, by link model and by place; and links that flows share.

All of it is numpy and numbers: no ranks' programs, no kernel, no collectives.
"""

from spawnsim.models.network.changing import BandwidthTrace, Changing
from spawnsim.models.network.cost import (
    Completed,
    Contention,
    Cost,
    Costs,
    Flow,
    FlowNetwork,
    Network,
    SharedLinks,
    fair_share,
)
from spawnsim.models.network.fabric import Fabric, Nodes, Switch
from spawnsim.models.network.links import Hockney, Link, LogGP, Piecewise, Tcp
from spawnsim.models.network.topologies import Dragonfly, FatTree, HomeLinks, Regions, Torus

__all__ = [
    "Network", "Contention", "Cost", "Costs", "Link", "Hockney", "LogGP", "Tcp", "Piecewise", "Changing",
    "BandwidthTrace", "Fabric", "Switch", "Nodes", "FatTree", "Torus", "Dragonfly", "Regions", "HomeLinks",
    "SharedLinks", "Flow", "FlowNetwork", "Completed", "fair_share",
]  # fmt: skip
