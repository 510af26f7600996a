"""The distributed toolkit: the names of torchgfn's `gfn.utils.distributed`, on every building.

Where a function takes `group`, a rank is a rank *of that group*, for `src` and `dst_rank` too; without one the group is
the world of the job (`spawnsim.comm.job`). `backend` chooses which world that is ("mpi" or "torch"); a group given
decides by itself, and virtual ranks have one world only. What travels is the same for both.
This package knows communicators, tensors and layouts of ranks; it knows no policy's decisions.
"""

from __future__ import annotations

from spawnsim.distributed.averaging import average_gradients, average_models
from spawnsim.distributed.collectives import (
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    get_rank,
    get_world_size,
)
from spawnsim.distributed.contexts import DistributedContext, DistributedContextMPI4Py
from spawnsim.distributed.gathering import gather_distributed_data
from spawnsim.distributed.layouts import RankLayout, arithmetic_layout, host_layout
from spawnsim.distributed.starting import (
    initialize_distributed_compute,
    initialize_distributed_compute_mpi4py,
)
from spawnsim.distributed.timings import Imbalance, TimeInfo, logger, report_load_imbalance, report_time_info
from spawnsim.distributed.transport import AsyncSendHandle, isend, recv, send
from spawnsim.distributed.worlds import Group, _first_env, _get_MPI, default_backend

__all__ = [
    "AsyncSendHandle", "DistributedContext", "DistributedContextMPI4Py", "Group", "Imbalance", "RankLayout", "TimeInfo",
    "_first_env", "_get_MPI", "all_gather", "all_reduce", "arithmetic_layout", "average_gradients", "average_models",
    "barrier", "broadcast", "default_backend", "gather_distributed_data", "get_rank", "get_world_size", "host_layout",
    "initialize_distributed_compute", "initialize_distributed_compute_mpi4py", "isend", "logger", "recv",
    "report_load_imbalance", "report_time_info", "send",
]  # fmt: skip
