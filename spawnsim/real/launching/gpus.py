"""Ranks and GPUs: which one a rank uses, and whether its MPI reaches GPU memory by itself.

Knows launchers' variables and MPI's own answer. Loads neither torch nor, before it is asked about it, MPI.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from spawnsim.errors import ParameterError
from spawnsim.real.launching.launch import recognise

LOCAL_RANKS = (
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
)  # fmt: skip
"""What torchrun, mpiexec (Open MPI, MPICH, MVAPICH) and srun call the rank within a node; the innermost first."""


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's rank among those of its node, by its launcher's variables.

    Without any it is the rank in the job, as on a single node.
    """
    seen = os.environ if environ is None else environ
    name = next((name for name in LOCAL_RANKS if name in seen), None)
    if name is None:
        return recognise(seen).rank
    if not seen[name].isdigit():
        raise ParameterError(f"{name}={seen[name]!r}: a launcher sets an integer of at least 0")
    return int(seen[name])


def gpu_of_rank(gpus: int, environ: Mapping[str, str] | None = None) -> int | None:
    """Return the index of the GPU that this rank should use of `gpus` visible ones; None if there are none.

    Ranks of a node take turns, so with more ranks than GPUs some share one. Before a model is built:

        index = gpu_of_rank(torch.cuda.device_count())
        if index is not None:
            torch.cuda.set_device(index)
    """
    return local_rank(environ) % gpus if gpus else None


def cuda_aware() -> bool:
    """Return whether MPI takes pointers to GPU memory: its own answer, which Open MPI and MPICH give when it is up.

    Cray's MPICH is told by MPICH_GPU_SUPPORT_ENABLED=1. What gives no answer is taken for one that does not.
    """
    from mpi4py import MPI

    if "CRAY" in MPI.Get_library_version().upper():
        return os.environ.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    try:
        library = ctypes.CDLL(MPI.__file__)  # finds names also in the MPI that mpi4py is linked with
        return bool(library.MPIX_Query_cuda_support())
    except (OSError, AttributeError):
        return False
