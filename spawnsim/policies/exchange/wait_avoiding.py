"""Wait-avoiding sums over groups: the first rank makes all members of its group contribute their latest values.

A round's group sums by a butterfly: in phase k each member exchanges its partial sum with the member whose place
differs in bit k. When a partial sum arrives at a rank before the rank's own contribution to that round, its background
task contributes the rank's previous contribution. So a round takes only the time of its messages, and a late rank finds
the sum complete. All members get the same bits. Source: Li et al. 2020 (WAGMA-SGD, arXiv 2005.00124), where activation
is a separate broadcast; here it follows the butterfly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spawnsim.comm import Comm
from spawnsim.errors import RankFailed, Timeout
from spawnsim.policies.exchange.endpoint import Endpoint, ProgressEngine
from spawnsim.policies.exchange.messages import Kind, Message
from spawnsim.policies.exchange.server import Form
from spawnsim.policies.state.layout import Tensors

POLL_S, BACKGROUND_WAIT_S, DEATH_CHECK_S = 1e-3, 1.0, 0.05


@dataclass
class _Round:
    """One round of one rank: its members in the order of their places, the partial sum, and early partial sums."""

    members: Sequence[int]
    total: Tensors | None = None  # None until this rank has contributed
    phase: int = 0
    staleness: int = 0
    early: dict[int, Tensors] = field(default_factory=dict)

    @property
    def phases(self) -> int:
        return len(self.members).bit_length() - 1

    @property
    def over(self) -> bool:
        return self.total is not None and self.phase == self.phases


class WaitAvoidingSums:
    """One rank's part in the rounds of one communicator.

    Args:
        comm: the communicator.
        tag: tag of all messages.
        first: the rank's contribution to a round that begins before its first own round; in the dtypes of the sums.
        groups: returns the members of this rank's group in a round, a power of two, in the order of their places.
    """

    def __init__(
        self, comm: Comm, tag: int, first: tuple[int, Tensors], groups: Callable[[int], Sequence[int]]
    ) -> None:
        self._comm, self._groups = comm, groups
        self._latest_round, self._latest = first[0] - 1, first[1]
        self.form = Form(self._latest)
        self._rounds: dict[int, _Round] = {}
        self.endpoint = Endpoint(comm, tag)
        self.endpoint.allocate = self.form.allocate
        self.engine = ProgressEngine(
            self.endpoint, self, poll_interval_s=POLL_S, background_wait_s=BACKGROUND_WAIT_S,
            death_check_s=DEATH_CHECK_S,
        )  # fmt: skip
        self.engine.run_in_background()

    def sum(self, round_: int, own: Tensors, patience_s: float) -> tuple[Tensors, Sequence[int], int]:
        """Sum over this rank's group in a round.

        Args:
            round_: the round's number; it increases on each rank.
            own: this rank's contribution, used unless its group has begun without it; must not be changed afterwards.
            patience_s: the longest wait.

        Returns:
            The sum over the group, its members, and the age in rounds of this rank's contribution to it.

        Raises:
            RankFailed: a member has died.
            Timeout: the sum did not arrive in time. The call may be repeated.
        """
        with self.engine.hold():
            self._latest_round, self._latest = round_, own
            current = self._round(round_)
            if current.total is None:
                self._contribute(round_, current)
        self.engine.drive(lambda: current.over or bool(self._lost(current)), patience_s)
        if not current.over:
            lost = self._lost(current)
            if lost:
                raise RankFailed(tuple(lost))
            others = tuple(rank for rank in current.members if rank != self._comm.Get_rank())
            raise Timeout(others, f"the sum of round {round_}")
        with self.engine.hold():
            del self._rounds[round_]
        assert current.total is not None
        return current.total, current.members, current.staleness

    def _lost(self, current: _Round) -> list[int]:
        return sorted(self.endpoint.failed.intersection(current.members))

    def _round(self, round_: int) -> _Round:
        if round_ not in self._rounds:
            self._rounds[round_] = _Round(self._groups(round_))
        return self._rounds[round_]

    def _contribute(self, round_: int, current: _Round) -> None:
        current.total, current.staleness = self._latest, round_ - self._latest_round
        self._send(round_, current)
        self._advance(round_, current)

    def _send(self, round_: int, current: _Round) -> None:
        if current.phase < current.phases:
            assert current.total is not None
            body = self.form.pack(self.form.weights, current.total)
            partner = current.members[current.members.index(self._comm.Get_rank()) ^ (1 << current.phase)]
            self.endpoint.send(partner, Message(Kind.SUM, round_, part=current.phase, body=body))

    def _advance(self, round_: int, current: _Round) -> None:
        """Add the sums of the phases that are due. The sum of two is the same in either order."""
        while current.total is not None and current.phase in current.early:
            theirs = current.early.pop(current.phase)
            current.total = {name: own + theirs[name] for name, own in current.total.items()}
            current.phase += 1
            self._send(round_, current)

    # ---------------------------------------------------------------------------------------------- for the engine
    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        """Store arrived partial sums, and contribute to their rounds."""
        for _, message in arrived:
            if message.damaged:
                continue  # treated as lost: the round times out
            current = self._round(message.number)
            current.early[message.part] = self.form.unpack(self.form.weights, message)
            if current.total is None:
                self._contribute(message.number, current)
            else:
                self._advance(message.number, current)

    def wake_s(self) -> float:
        return math.inf  # until a message arrives
