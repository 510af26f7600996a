"""Post, Start, Complete, Wait and Test of windows on real ranks, by small messages between both sides.

Windows of the house hold their locks from birth, so MPI's own calls are closed to them; and MPI's meet no deadline. A
target tells the origins that it has posted, an origin tells the targets that its accesses are complete. Knows tokens,
groups and deadlines; how a token travels, and when an access is complete, is each building's business.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from spawnsim.comm.failures import ERR_GROUP, CallError
from spawnsim.comm.group import Group
from spawnsim.errors import Timeout

POST, COMPLETE = 1, 2
DUE = {POST: "Post", COMPLETE: "Complete"}


class Epochs:
    """The active-target epochs of one rank's window."""

    _comm: Any
    _home: Any

    def _begin_epochs(self) -> None:
        self._told: Counter[tuple[int, int]] = Counter()  # (rank, POST or COMPLETE): tokens that have come
        self._started: tuple[int, ...] = ()
        self._exposed: tuple[int, ...] = ()

    def _tell(self, rank: int, token: int) -> None:
        """Send a token to a rank of the window, without waiting."""
        raise NotImplementedError

    def _listen(self) -> None:
        """Count the tokens that have come."""

    def Flush(self, rank: int) -> None:
        """Complete all calls to one rank."""
        raise NotImplementedError

    def Sync(self) -> None:
        """Make own and others' stores see each other."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- as MPI has them
    def Post(self, group: Group, assertion: int = 0) -> None:
        """Let the ranks of a group access this rank's part; waits for nobody."""
        self._exposed = self._places(group)
        self.Sync()
        for rank in self._exposed:
            self._tell(rank, POST)

    def Start(self, group: Group, assertion: int = 0) -> None:
        """Begin to access the parts of a group's ranks; waits until they have posted."""
        places = self._places(group)
        self._expect(places, POST, "Start")
        self._started = places

    def Complete(self) -> None:
        """End the access that Start began: all calls are then complete at their targets."""
        for rank in self._started:
            self.Flush(rank)
            self._tell(rank, COMPLETE)
        self._started = ()

    def Wait(self) -> bool:
        """Wait until all ranks of Post's group have completed."""
        self._expect(self._exposed, COMPLETE, "Wait")
        return self._over()

    def Test(self) -> bool:
        """Return whether all ranks of Post's group have completed."""
        if self._silent(self._exposed, COMPLETE):
            self._home.poll()
            return False
        self._told.subtract((rank, COMPLETE) for rank in self._exposed)
        return self._over()

    # -------------------------------------------------------------------------------------------------- how
    def _over(self) -> bool:
        self._exposed = ()
        self.Sync()
        return True

    def _silent(self, ranks: tuple[int, ...], token: int) -> list[int]:
        """Return the ranks whose token has not come."""
        self._listen()
        return [rank for rank in ranks if self._told[rank, token] < 1]

    def _expect(self, ranks: tuple[int, ...], token: int, operation: str) -> None:
        """Wait for a token of each rank and take them; past the deadline none is taken."""
        home, comm, look = self._home, self._comm, partial(self._silent, ranks, token)
        limit_s = home.clock.limit_s()
        if not home.wait(lambda: not look(), limit_s, (f"Win.{operation}", -1, comm)) and (missing := look()):
            who = ", ".join(map(str, missing))
            text = f"rank {comm.rank} of {comm.label}: Win.{operation} met its deadline of {limit_s:g} s"
            text += f" at {home.clock.now():.3f} s; missing: {DUE[token]} of rank {who}, with this rank in its group"
            raise Timeout(missing, f"Win.{operation}", -1, text)
        self._told.subtract((rank, token) for rank in ranks)

    def _places(self, group: Group) -> tuple[int, ...]:
        """Return the window's ranks of a group."""
        members = self._comm.members
        outside = [member for member in group.live() if member not in members]
        if outside:
            raise CallError(
                ERR_GROUP, f"rank {outside[0]} of the world is not in the window of {self._comm.label}"
            )
        return tuple(members.index(member) for member in group.live())
