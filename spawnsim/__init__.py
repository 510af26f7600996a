"""spawnsim: policies that average and replace models across ranks, on virtual clusters and on real ones.

Names are loaded on first use: `import spawnsim` brings neither torch nor MPI nor pyplot.

The layers, top to bottom. Imports point down only; siblings separated by | do not import one another (`lint-imports`):

    cli
    study · report · fidelity · fuzzing · rerun · testing · explain
    columnar
    plots · run
    record
    torchgfn · bagua
    policies | workloads | real | virtual
    training
    comm | models
    options
    backends · checkpoints · columns · importing · phantoms · random · scenario · signals · units · waits
    errors
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spawnsim.backends import Backend, register
from spawnsim.run import Run, run

if TYPE_CHECKING:  # the same names, where editors and type checkers look for them
    from spawnsim.comm import Comm
    from spawnsim.phantoms import PhantomArray
    from spawnsim.policies import (
        AsyncModelAveragePolicy,
        AsyncSelectiveAveragingPolicy,
        AverageAllPolicy,
        DecentralizedAverager,
        DecentralizedAveragingPolicy,
        SpawnPolicy,
    )
    from spawnsim.record import Table
    from spawnsim.study import Sweep
    from spawnsim.training import Evaluation, TrainingStep

__version__ = "0.1.0"

register(Backend("virtual", "spawnsim.virtual"))
register(
    Backend(
        "mpi",
        "spawnsim.real.mpi",
        "mpi4py.MPI:Comm",
        "mpi4py.MPI:COMM_WORLD",
        "mpiexec",
        survives=True,
        aliases=("mpi4py",),
    )
)
register(
    Backend(
        "torch", "spawnsim.real.torch", "torch.distributed:ProcessGroup", "torch.distributed:group.WORLD", "torchrun",
        aliases=("gloo", "nccl", "ccl", "xccl"),
        preloads=(
            "torch.distributed", "torch._dynamo",  # which every optimizer of torch imports
            "spawnsim.cli.run", "spawnsim.policies", "spawnsim.real.torch", "spawnsim.training",
        ),
    )
)  # fmt: skip

_HOME = {
    "Comm": "spawnsim.comm",
    "SpawnPolicy": "spawnsim.policies",
    "AverageAllPolicy": "spawnsim.policies",
    "AsyncSelectiveAveragingPolicy": "spawnsim.policies",
    "AsyncModelAveragePolicy": "spawnsim.policies",
    "DecentralizedAverager": "spawnsim.policies",
    "DecentralizedAveragingPolicy": "spawnsim.policies",
    "PhantomArray": "spawnsim.phantoms",
    "Table": "spawnsim.record",
    "Evaluation": "spawnsim.training",
    "Sweep": "spawnsim.study",
    "TrainingStep": "spawnsim.training",
}

__all__ = [
    "AsyncModelAveragePolicy", "AsyncSelectiveAveragingPolicy", "AverageAllPolicy", "Comm", "DecentralizedAverager",
    "DecentralizedAveragingPolicy", "Evaluation", "PhantomArray", "Run", "SpawnPolicy", "Sweep", "Table",
    "TrainingStep", "__version__", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        hint = "; for tests: from spawnsim.testing import virtual" if name == "virtual" else ""
        raise AttributeError(
            f"module 'spawnsim' has no attribute {name!r}; its names are: {', '.join(__all__)}{hint}"
        )
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
