"""What torchrun gives its processes: the environment variables, by the platform's nodes."""

from __future__ import annotations

import numpy as np

from spawnsim.virtual.engine.world import World

MASTER = "127.0.0.1", 29500  # the launcher's own store: known to all, and never opened


def environment(world: World, rank: int) -> dict[str, str]:
    """Return the variables of a rank.

    Args:
        world: the virtual cluster; its network says which ranks share a node.
        rank: the rank's number in the world.
    """
    nodes = world.network.place(np.arange(len(world.ranks))).tolist()
    beside = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    groups = list(dict.fromkeys(nodes))
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(world.ranks)),
        "LOCAL_RANK": str(beside.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(beside)),
        "GROUP_RANK": str(groups.index(nodes[rank])),
        "GROUP_WORLD_SIZE": str(len(groups)),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(len(world.ranks)),
        "MASTER_ADDR": MASTER[0],
        "MASTER_PORT": str(MASTER[1]),
        "TORCHELASTIC_RESTART_COUNT": str(world.ranks[rank].incarnation),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "spawnsim",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
