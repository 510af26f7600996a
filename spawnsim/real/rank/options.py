"""How a real run behaves, whatever library moves its bytes."""

from __future__ import annotations

from dataclasses import dataclass

from spawnsim.errors import ParameterError


@dataclass(frozen=True)
class Options:
    """How a run behaves. The same on all ranks.

    `reduction`: "native" leaves the order of sums to the library, "ordered" sums in rank order everywhere.
    `fingerprints`: each collective first checks that all ranks are in the same one.
    `node_memory`: large sums among ranks of one node go through memory that they share, faster and with the same bits.
    `survive`: collectives are non-blocking calls with a deadline, so that a `Timeout` can be caught and recovered from.
    """

    reduction: str = "native"
    fingerprints: bool = False
    node_memory: bool = True
    survive: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in ("native", "ordered"):
            raise ParameterError(f"reduction={self.reduction!r}: give 'native' or 'ordered'")
