"""Groups of torch.distributed for communicators: what torch's own calls take.

`torch.distributed.new_group` numbers groups by calls that all ranks of the job must make in one order; here only the
members meet, under the communicator's name. Knows torch's registry of groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

if TYPE_CHECKING:
    from spawnsim.real.torch.comm import TorchComm


def make_group(comm: TorchComm) -> Any:
    """Return a group of torch of a communicator's ranks, in its order. Collective among them."""
    home = comm._home
    if comm.label == "world":
        return home.group
    default: Any = dist.group.WORLD
    ranks = [dist.get_global_rank(home.group, member) for member in comm.members]
    name: Any = f"{home.run_name}/{comm.label}"
    kind, store = c10d._world.pg_map[default]
    group, _ = c10d._new_process_group_helper(
        comm.size, comm.rank, ranks, dist.Backend(kind), store, name, timeout=c10d.default_pg_timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group
