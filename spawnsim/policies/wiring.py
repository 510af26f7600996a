"""How the asynchronous exchange waits and sends: quorum, deadlines, coordinator, tag, sizes.

This room is configuration, checked where it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spawnsim.errors import ParameterError
from spawnsim.policies.coordinator import Quorum, check_quorum
from spawnsim.policies.deadlines import Deadline, Fixed, as_deadline


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the exchange waits and sends.

    `quorum`: how many reports decide a round at once, a share of the group (float) or a number of ranks (int).
    `deadline`: seconds until a round is decided with those that have reported, and until a replaced rank goes on with
    what its donors have sent; None learns both from past arrivals (`Adaptive`). `coordinator`: which rank of the
    group decides (it takes part like any other); in a group that has fewer, as recoveries leave them, it is the last.
    `tag`: every message of the policy has it. `part_nbytes`: larger snapshots travel in several messages. `checksum`:
    check the weights too, at about 4 GB/s (control messages always are).
    """

    quorum: Quorum = 1.0
    deadline: float | Callable[[], Deadline] | None = None
    coordinator: int = 0
    tag: int = 7001
    part_nbytes: int = 2**26
    checksum: bool = True
    poll_interval_s: float = 0.01
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_quorum(self.quorum)
        if isinstance(self.deadline, (int, float)):
            Fixed(self.deadline)
        for name in ("part_nbytes", "poll_interval_s", "shutdown_timeout_s"):
            if not getattr(self, name) > 0:
                raise ParameterError(f"{name}={getattr(self, name)!r}: give a number above 0")
        if self.coordinator < 0 or self.tag < 0:
            raise ParameterError(
                f"coordinator={self.coordinator}, tag={self.tag}: give numbers of at least 0"
            )

    def new_deadline(self) -> Deadline:
        """Return a deadline that has seen nothing yet."""
        return self.deadline() if callable(self.deadline) else as_deadline(self.deadline)
