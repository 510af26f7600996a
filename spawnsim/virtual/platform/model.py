"""What a platform is: a network, how it progresses and chooses algorithms, and how long a compute step takes there.

This room knows the parts by their faces. It must not know files, nor the kernel that runs on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from spawnsim.errors import ParameterError
from spawnsim.virtual.collectives import Selection
from spawnsim.virtual.compute import ComputeModel, Fixed, Straggler, Trace, parse_base, parse_stragglers
from spawnsim.virtual.network import Network

Progress = Literal["poll", "async", "hardware"]
PROGRESS: tuple[Progress, ...] = ("poll", "async", "hardware")


@dataclass(frozen=True)
class Platform:
    """A cluster as virtual ranks see it.

    Attributes:
        name: for captions and manifests.
        network: what messages cost, between whom.
        step: how long a `comm.compute()` takes that states nothing; None: such a block is an error.
        stragglers: what stretches compute blocks, unless the run names its own.
        progress: when a rank that computes answers one-sided accesses: "poll" when it next enters MPI, "async" at once
            by a thread of its own, "hardware" at once by the network card.
        collectives: which algorithms run.
        description: one sentence.
        fitted: what it was measured on, as (name, value) pairs; empty if it was not measured.
    """

    name: str
    network: Network
    step: Fixed | Trace | None = None
    stragglers: tuple[Straggler, ...] = ()
    progress: Progress = "poll"
    collectives: Selection = field(default_factory=Selection)
    description: str = ""
    fitted: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.progress not in PROGRESS:
            raise ParameterError(f"progress={self.progress!r}: give one of {', '.join(PROGRESS)}")

    @property
    def eager_bytes(self) -> int:
        """Longest message that leaves without asking the receiver."""
        return self.network.eager_bytes

    @property
    def call_overhead_s(self) -> float:
        """Seconds that an observation costs."""
        return self.network.call_overhead_s

    def compute_model(
        self,
        compute: str | float | Fixed | Trace | None = None,
        stragglers: str | Straggler | Sequence[Straggler] | None = None,
    ) -> ComputeModel:
        """Return the compute model of a run here; what the run states goes before what the platform has."""
        return ComputeModel(
            self.step if compute is None else parse_base(compute),
            self.stragglers if stragglers is None else parse_stragglers(stragglers),
        )

    def check(self, ranks: int) -> None:
        """Raise ParameterError if so many ranks do not fit."""
        self.network.check(ranks)
