"""What has come of an all-reduce: who was averaged with whom, and in how much of the vector.

This room knows a finished butterfly; it knows no step and no communicator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spawnsim.policies.groups.butterfly import Butterfly, Role


class Averaged(dict[int, Any]):
    """The result of a step: what each averaged rank gave to `gather`, by rank; and how whole the average is.

    Ranks of the group of whose values nothing was averaged are not in it.

    Attributes:
        received: the share of this rank's elements that came back averaged; the others keep their local values,
            because a reducer failed, or because this rank's values came too late or damaged.
        missing: ranks whose values are not in all that came back, with the share in which they are not (1: in none).
        complete: whether all of the group were averaged in all elements.
    """

    def __init__(
        self, members: Mapping[int, Any], *, received: float = 1.0, missing: Mapping[int, float]
    ) -> None:
        super().__init__(members)
        self.received, self.missing = received, dict(missing)

    @property
    def complete(self) -> bool:
        """Whether all of the group were averaged in all elements."""
        return self.received == 1 and not self.missing


def why_nothing(butterfly: Butterfly) -> str | None:
    """Return why a finished all-reduce has averaged nothing, None if it has."""
    if butterfly.received == 0:
        return "no reducer answered"
    others = set(butterfly.reducer.senders) - {butterfly.rank}
    missing = butterfly.missing()
    if butterfly.sends and others and all(missing.get(rank) == 1 for rank in others):
        return "no other member's values came"
    return None


def result_of(butterfly: Butterfly) -> Averaged:
    """Return the result of a finished all-reduce: without the members of whose values nothing was averaged."""
    missing = butterfly.missing()
    failed = {rank for rank in butterfly.sending.failed if not butterfly.sending.answers(rank)}
    members = {
        member.rank: member.gathered
        for member in butterfly.group.members
        if not (missing.get(member.rank) == 1 or (member.role is Role.AUX and member.rank in failed))
    }
    return Averaged(members, received=butterfly.received, missing=missing)
