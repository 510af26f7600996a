"""Networks: what a message costs, by link model and by place; and links that flows share.

This room knows numpy and numbers; it must not know ranks' programs, the kernel or collectives.
"""

from spawnsim.virtual.network.cost import Contention, Cost, Costs, Network
from spawnsim.virtual.network.fabric import Fabric, Nodes, Switch
from spawnsim.virtual.network.home import HomeLinks
from spawnsim.virtual.network.links import Hockney, Link, LogGP, Piecewise
from spawnsim.virtual.network.sharing import Completed, Flow, FlowNetwork, SharedLinks, fair_share
from spawnsim.virtual.network.topologies import Dragonfly, FatTree, Regions, Torus

__all__ = [
    "Network", "Contention", "Cost", "Costs", "Link", "Hockney", "LogGP", "Piecewise", "Fabric", "Switch", "Nodes",
    "FatTree", "Torus", "Dragonfly", "Regions", "HomeLinks", "SharedLinks", "Flow", "FlowNetwork", "Completed",
    "fair_share",
]  # fmt: skip
