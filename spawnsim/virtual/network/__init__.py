"""Networks: what a message costs, by link model and by place.

This room knows numpy and numbers; it must not know ranks' programs, the kernel or collectives.
"""

from spawnsim.virtual.network.cost import Cost, Costs, Network
from spawnsim.virtual.network.fabric import Fabric, Nodes, Switch
from spawnsim.virtual.network.links import Hockney, Link, LogGP, Piecewise

__all__ = ["Network", "Cost", "Costs", "Link", "Hockney", "LogGP", "Piecewise", "Fabric", "Switch", "Nodes"]
