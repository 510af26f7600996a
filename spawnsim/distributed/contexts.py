"""What a rank knows of its place in the job: its part, its groups, and whom it works with.

This room knows layouts and communicators that were made for them; it makes none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from spawnsim.comm import Comm
from spawnsim.distributed.layouts import RankLayout
from spawnsim.errors import ParameterError


@dataclass
class DistributedContextMPI4Py:
    """A rank's place. Groups are communicators; None stands where this rank is not a member.

    `agent_groups` has an entry for each group, `agent_group_id` says which is this rank's. `train_global_group` holds
    all training ranks, `buffer_group` all buffer ranks. `assigned_buffer` keeps this training rank's buffer,
    `assigned_training_ranks` are those a buffer rank serves. Ranks are those of the world.
    """

    my_rank: int
    world_size: int
    num_training_ranks: int
    agent_group_size: int
    agent_groups: list[Comm | None] | None = None
    agent_group_id: int | None = None
    train_global_group: Comm | None = None
    assigned_buffer: int | None = None
    buffer_group: Comm | None = None
    assigned_training_ranks: list[int] | None = None
    coordinator_rank: int | None = None
    layout: RankLayout | None = None
    _made: list[Comm] = field(default_factory=list, repr=False)

    @property
    def role(self) -> str:
        """What this rank does: "training", "buffer" or "coordinator"; without a layout, the first ranks train."""
        if self.layout is not None:
            return self.layout.role_of(self.my_rank)
        if self.my_rank == self.coordinator_rank:
            return "coordinator"
        return "training" if self.my_rank < self.num_training_ranks else "buffer"

    def is_training_rank(self) -> bool:
        """Return whether this rank trains."""
        return self.role == "training"

    def is_buffer_rank(self) -> bool:
        """Return whether this rank keeps a replay buffer."""
        return self.role == "buffer"

    def is_coordinator_rank(self) -> bool:
        """Return whether this rank is the coordinator."""
        return self.role == "coordinator"

    def cleanup(self) -> None:
        """Free the groups that were made for this rank, and forget all groups. A second call does nothing.

        Collective over the members of each group; ranks outside have nothing to free. The world, MPI and
        torch.distributed stay as they are: whoever started them ends them.
        """
        made, self._made = self._made, []
        self.agent_groups = self.train_global_group = self.buffer_group = None
        for comm in made:
            comm.Free()


@dataclass
class DistributedContext(DistributedContextMPI4Py):
    """A rank's place, as `initialize_distributed_compute` gives it. See `DistributedContextMPI4Py` for the fields.

    `dc_mpi4py` is the same place for programs that ask for the mpi4py one; its groups are the same communicators.
    """

    dc_mpi4py: DistributedContextMPI4Py | None = None

    def get_train_group(self, backend: str = "mpi") -> Comm | None:
        """Return the group of all training ranks, None on other ranks; both backends' groups carry the same calls."""
        if backend not in ("mpi", "torch"):
            raise ParameterError(f"backend={backend!r}: choose mpi or torch")
        if backend == "mpi" and self.dc_mpi4py is not None:
            return self.dc_mpi4py.train_global_group
        return self.train_global_group

    def cleanup(self) -> None:
        """Free the groups; see `DistributedContextMPI4Py.cleanup`."""
        super().cleanup()
        if self.dc_mpi4py is not None:
            self.dc_mpi4py.cleanup()


def with_both_faces(place: DistributedContextMPI4Py) -> DistributedContext:
    """Return a context over the same groups; it frees them, the one inside only forgets them."""
    shared = {each.name: getattr(place, each.name) for each in fields(place)}
    context = DistributedContext(**shared, dc_mpi4py=place)
    place._made = []
    return context


def members_only(comms: Iterable[Comm | None]) -> list[Comm]:
    """Return the communicators that this rank is in."""
    return [comm for comm in comms if comm is not None]
