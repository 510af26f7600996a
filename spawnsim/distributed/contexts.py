"""What a rank knows of its place in the job: its part, its groups, and whom it works with.

This module knows layouts and communicators that were made for them; it makes none but torch's twins of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields

from spawnsim.comm import Comm
from spawnsim.distributed.layouts import RankLayout
from spawnsim.distributed.worlds import Group
from spawnsim.errors import ParameterError, UnsupportedError


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

        Collective over the members of each group; ranks outside have nothing to free. The world and MPI stay as they
        are: whoever started them ends them.
        """
        made, self._made = self._made, []
        self.agent_groups = self.train_global_group = self.buffer_group = None
        for comm in made:
            comm.Free()


@dataclass
class DistributedContext(DistributedContextMPI4Py):
    """A rank's place, as `initialize_distributed_compute` gives it. See `DistributedContextMPI4Py` for the fields.

    Over torch.distributed the groups are torch's own (`ProcessGroup`), for its calls and for those of this toolkit
    alike; over MPI and on virtual ranks they are communicators. `dc_mpi4py` is the same place with communicators, which
    have mpi4py's names everywhere.
    """

    agent_groups: list[Group] | None = None
    train_global_group: Group = None
    buffer_group: Group = None
    dc_mpi4py: DistributedContextMPI4Py | None = None
    _end: Callable[[], None] | None = field(default=None, repr=False)

    def get_train_group(self, backend: str = "mpi") -> Group:
        """Return the group of all training ranks, None on other ranks.

        Args:
            backend: "mpi" for the communicator, "torch" for the group of torch.distributed.

        Raises:
            UnsupportedError: "torch" in a job that was divided over MPI: torch.distributed has no group there.
        """
        if backend not in ("mpi", "torch"):
            raise ParameterError(f"backend={backend!r}: choose mpi or torch")
        comm = self.dc_mpi4py.train_global_group if self.dc_mpi4py is not None else None
        if backend == "mpi":
            return comm
        if comm is not None and comm.capabilities().backend == "mpi":
            raise UnsupportedError(
                f"rank {self.my_rank}: the groups of this job are MPI's, and torch.distributed has none of them: "
                "initialize_distributed_compute('gloo', …) makes both"
            )
        return self.train_global_group

    def cleanup(self) -> None:
        """Free all groups, and leave torch.distributed if `initialize_distributed_compute` has entered it.

        Collective; a second call does nothing.
        """
        super().cleanup()
        if self.dc_mpi4py is not None:
            self.dc_mpi4py.cleanup()
        end, self._end = self._end, None
        if end is not None:
            end()


def with_both_faces(
    place: DistributedContextMPI4Py, end: Callable[[], None] | None = None
) -> DistributedContext:
    """Return a context over the same ranks, with torch's groups where torch.distributed carries the communicators.

    Collective among the members of each group. `end` is called once all groups have been freed.
    """
    shared = {each.name: getattr(place, each.name) for each in fields(place) if each.name != "_made"}
    shared |= {
        "agent_groups": [_as_torch_has_it(comm) for comm in place.agent_groups or ()],
        "train_global_group": _as_torch_has_it(place.train_global_group),
        "buffer_group": _as_torch_has_it(place.buffer_group),
    }
    return DistributedContext(**shared, dc_mpi4py=place, _end=end)


def _as_torch_has_it(comm: Comm | None) -> Group:
    make = getattr(comm, "as_process_group", None)
    return comm if make is None else make()


def members_only(comms: Iterable[Comm | None]) -> list[Comm]:
    """Return the communicators that this rank is in."""
    return [comm for comm in comms if comm is not None]
