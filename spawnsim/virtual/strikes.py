"""What faults of links do to one collective: who leaves when, for whom it never ends, whose data are damaged.

A message that is lost for good never arrives: those whose part depends on it wait until their deadline. A damaged one
damages a bit of what it carries, for all whom that reaches: of a block, the block; in a reduction, where many
contributions have become one, that of the message's sender. Copies are taken once, as on any reliable connection.

This room knows plans of collectives, verdicts and members. It must not know clocks or who waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from spawnsim.virtual.collectives import Damage, Finish, Plan, Struck
from spawnsim.virtual.damage import can_be_damaged, damaged, replaced
from spawnsim.virtual.faults import Verdict
from spawnsim.virtual.links import COLLECTIVE
from spawnsim.virtual.world import World


class Strikes:
    """The faults that strike one collective.

    Args:
        world: The cluster.
        members: World ranks of the communicator.
        key: What tells this collective from all others, for the draws.
        fields: What its events say of it.
    """

    def __init__(
        self, world: World, members: Sequence[int], key: tuple[int, ...], fields: dict[str, Any]
    ) -> None:
        self._world, self._members, self._fields = world, members, fields
        self._key = (COLLECTIVE, *key)
        self._told: set[tuple[int, int, int]] = set()
        self._plan: Plan | None = None
        self._struck: Struck | None = None

    # -- when ------------------------------------------------------------------------------------------------

    def finish(self, plan: Plan, arrivals: Any, out_free: Any, calls: Sequence[Any]) -> Finish:
        """Return when each member leaves: NaN for those for whom it never ends."""
        here = [call for call in calls if call is not None]
        self._plan, self._checked = plan, not any(can_be_damaged(call.part) for call in here)
        self._fields["call"] = here[0].name
        ranks = np.asarray(self._members)
        struck = plan.struck(arrivals, self._world.network, ranks, judge=self, out_free=out_free)
        self._struck = struck
        for strike in struck.strikes:
            place = strike.number, strike.source, strike.dest
            if place not in self._told:
                self._told.add(place)
                source, dest = self._rank(strike.source), self._rank(strike.dest)
                what = {"what": strike.verdict.describe(), "dest": dest, **self._fields}
                self._world.recorder.event(source, strike.sent_s, "link", what)
        return struck.finish

    def strikes(
        self, source: Any, dest: Any, sent_s: Any, numbers: Any
    ) -> Iterable[tuple[int, Verdict, float]]:
        """Judge the messages of a lane: see `collectives.faulty.Judge`."""
        plan, links = self._world.plan, self._world.links
        for index in plan.covered(source, dest, sent_s).tolist():
            key = (*self._key, int(numbers[index]))
            pair = int(source[index]), int(dest[index])
            verdict = links.judge(*pair, float(sent_s[index]), *key)
            if self._checked:  # the library's own words: damage is noticed, and they are asked for again
                verdict = verdict._replace(corrupt=False)
            yield index, verdict, plan.chance(*key, *pair)

    def late(self, me: int) -> list[int]:
        """Return the members whose messages member `me` waits for in vain, or waited for too long."""
        if self._struck is None:
            return []
        bits = self._struck.late.get(self._relative(me), 0)
        return sorted(self._member(rank) for rank in range(len(self._members)) if bits >> rank & 1)

    # -- what ------------------------------------------------------------------------------------------------

    def note(self, me: int) -> None:
        """Note in a member's trace what happened to its messages."""
        own = self._relative(me)
        for strike in [] if self._struck is None else self._struck.strikes:
            if strike.source == own:
                source, dest = self._rank(strike.source), self._rank(strike.dest)
                self._world.links.note(strike.verdict, source, dest, strike.sent_s)

    def heard_by(self, me: int, calls: Sequence[Any]) -> list[Any] | None:
        """Return the members' calls as member `me` hears them; None if nothing that it hears is damaged."""
        found = () if self._struck is None else self._struck.damage.get(self._relative(me), ())
        heard: list[Any] | None = None
        for damage in sorted(found):
            owner, member, place = self._place(damage)
            heard = list(calls) if heard is None else heard
            call = heard[owner]
            if call is not None:
                heard[owner] = replace(call, part=_damaged(call.part, member, place))
        return heard

    def _place(self, damage: Damage) -> tuple[int, Any, float]:
        """Return whose contribution is damaged, which block of it (None: it is one), and where in that."""
        plan = self._plan
        assert plan is not None
        source, dest = self._member(damage.source), self._member(damage.dest)
        if plan.operation in ("gather", "allgather"):
            return self._member(damage.block), None, damage.place
        if plan.operation == "scatter":
            return plan.root, self._member(damage.block), damage.place
        if plan.operation == "alltoall":
            return source, dest, damage.place
        if plan.operation == "neighbor":
            return source, (dest, damage.number), damage.place
        owner = plan.root if plan.operation == "bcast" else source
        return owner, None, plan.amounts.share(damage.block, damage.place)

    # -- who -------------------------------------------------------------------------------------------------

    def _member(self, relative: int) -> int:
        assert self._plan is not None
        return (relative + self._plan.root) % len(self._members)

    def _relative(self, me: int) -> int:
        return (me - (self._plan.root if self._plan is not None else 0)) % len(self._members)

    def _rank(self, relative: int) -> int:
        return self._members[self._member(relative)]


def _damaged(part: Any, member: Any, place: float) -> Any:
    if member is not None and isinstance(part, (list, dict)):
        return replaced(part, member, place)
    return damaged(part, place)
