"""Entering torch.distributed under torchrun, mpiexec, srun, or as one process.

Knows launchers' variables and torch's ways to meet; knows no communicator.
"""

from __future__ import annotations

import hashlib
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from spawnsim.errors import ParameterError
from spawnsim.real.dist.home import FOREVER
from spawnsim.real.launch import Here


def join(here: Here) -> None:
    """Enter torch.distributed the way that the launcher asks for."""
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        local = int(os.environ.get("LOCAL_RANK", here.rank))
        if int(os.environ.get("LOCAL_WORLD_SIZE", here.size)) <= torch.cuda.device_count():
            backend = (
                "cpu:gloo,cuda:nccl"  # NCCL takes one rank per GPU; more of them go through pinned memory
            )
            torch.cuda.set_device(local)
    if here.launcher == "torchrun":
        dist.init_process_group(backend, timeout=FOREVER)
    elif here.size == 1:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=FOREVER)
    else:
        where = f"tcp://{_meeting_point(here)}"
        dist.init_process_group(
            backend, init_method=where, rank=here.rank, world_size=here.size, timeout=FOREVER
        )


def _meeting_point(here: Here) -> str:
    """Return host and port where ranks meet that mpiexec or srun started; MASTER_ADDR and MASTER_PORT say otherwise."""
    seen = os.environ
    nodes = seen.get("SLURM_STEP_NODELIST") or seen.get("SLURM_JOB_NODELIST", "")
    if "MASTER_ADDR" not in seen and ("," in nodes or "[" in nodes):
        raise ParameterError(
            f"ranks on {nodes}: set MASTER_ADDR to the first host (scontrol show hostnames), and MASTER_PORT"
        )
    job = seen.get("SLURM_JOB_ID") or seen.get("PMIX_NAMESPACE") or str(os.getppid())
    port = 20000 + int.from_bytes(hashlib.blake2b(job.encode(), digest_size=2).digest(), "little") % 20000
    return f"{seen.get('MASTER_ADDR', nodes or '127.0.0.1')}:{seen.get('MASTER_PORT', port)}"
