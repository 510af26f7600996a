"""One rank's part in a group with global weights: how the group meets, and its means of differences.

A group meets when a policy is first called with its communicator: at the start, after deaths, and when ranks join. The
rank with the most outer steps (the lowest such rank) sends its whole model, global weights and momentum to all ranks
with fewer steps. So all ranks start from one model, a newcomer receives everything, and after a death in the middle of
a round all ranks have the same global weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from spawnsim.comm import IN_PLACE, Comm
from spawnsim.errors import MismatchError, ParameterError, UsageError
from spawnsim.phantoms import PhantomArray
from spawnsim.policies.exchange.group_mean import check_same
from spawnsim.policies.rules.merging import Fragmenter, blocks
from spawnsim.policies.state.arithmetic import CPU, META, as_memory, new_buffer, new_memory, phantom_memory
from spawnsim.policies.state.codecs import Codec
from spawnsim.policies.state.difference_codecs import ErrorFeedback
from spawnsim.policies.state.layout import Collector, Layout, StateScope, Tensors, assign, digest_of
from spawnsim.policies.state.outer import FlatFloats, Fragment
from spawnsim.policies.state.snapshot import device_of, laid_out, lay_out

Split = Callable[[Tensors], list[Tensors]]
KEPT, LONGEST_KEPT_NBYTES = 8, 4 << 20  # cached sums of decoded vectors
NEVER = -1  # outer steps before the first meeting, and iteration before the first round
_sums: dict[Any, torch.Tensor] = {}  # by codec, dtype, length, and digest of the codes; oldest first


class Mean:
    """The mean of the ranks' vectors over a group, in place after `wait`.

    Uncompressed vectors are summed by one Allreduce per dtype. Encoded vectors are gathered, because a sum of codes is
    not a code, then decoded and summed in the order of ranks.

    Args:
        comm: the group.
        vectors: this rank's vectors, all finite; after `wait` the mean.
        feedback: encodes the vectors; None sends them uncompressed.
        key: identifies the vectors for `feedback`.
        later: begin without waiting; otherwise the group is waited for immediately.
    """

    def __init__(
        self,
        comm: Comm,
        vectors: FlatFloats,
        feedback: ErrorFeedback | None = None,
        *,
        key: Any = 0,
        later: bool = False,
    ) -> None:
        self._comm, self._vectors, self._feedback, self._key = comm, vectors, feedback, key
        self._requests: list[Any] = []
        self._rooms: list[Any] = []
        self.nbytes = 0
        for number, row in enumerate(vectors.rows):
            if feedback is None:
                call = comm.Iallreduce if later else comm.Allreduce
                request = call(IN_PLACE, as_memory(row))
                self.nbytes += row.nbytes
            else:
                body = feedback.encode((key, number), _array(row))
                make = phantom_memory if vectors.device == META else new_memory
                self._rooms.append(make(comm.Get_size() * body.nbytes))
                gather = comm.Iallgather if later else comm.Allgather
                request = gather(body, self._rooms[-1])
                self.nbytes += self._rooms[-1].nbytes
            self._requests += [request] if later else []

    def wait(self) -> None:
        """Wait until the mean has arrived.

        Raises:
            RankFailed, Revoked, Timeout: the group did not complete the mean; the vectors are invalid.
        """
        for request in self._requests:
            request.Wait()
        size = self._comm.Get_size()
        for number, row in enumerate(self._vectors.rows):
            if self._feedback is not None:
                if row.device != META:
                    _take_sum(row, self._feedback.codec, self._rooms[number].reshape(size, -1))
                self._feedback.commit((self._key, number))
            row.div_(size)


def _take_sum(row: torch.Tensor, codec: Codec, bodies: Any) -> None:
    """Set a row to the sum of all ranks' encoded vectors, in the order of ranks."""
    # All ranks decode the same codes. Virtual ranks, which share a process, decode them once; otherwise a thousand
    # would decode a million. Long rows are not cached: there memory matters more, and a process with long rows is a
    # real rank.
    key: Any = None
    if row.nbytes <= LONGEST_KEPT_NBYTES and isinstance(codec, Hashable):
        key = codec, row.dtype, row.numel(), blake2b(bodies, digest_size=16).digest()
        if (known := _sums.get(key)) is not None:
            row.copy_(known)
            return
    row.zero_()
    for body in bodies:
        row.add_(torch.from_numpy(codec.decode(body, row.numel())))
    if key is not None:
        _sums[key] = row.clone()
        for old in list(_sums)[:-KEPT]:
            _sums.pop(old, None)


def _array(row: torch.Tensor) -> Any:
    if row.device == META:
        return PhantomArray(row.numel(), str(row.dtype).removeprefix("torch."))
    return row.numpy()


class OuterGroup:
    """The global weights of one rank's group, in fragments, and the number of their outer steps.

    Args:
        split: cuts the tensors that travel into fragments.
        travels: which floating-point tensors have global weights.
        settings: a string that must be equal on all ranks.
        feedback: encodes differences.

    Attributes:
        split: cuts the tensors that travel into fragments.
        comm: the communicator of the latest meeting.
        steps: outer steps of this rank's global weights; `NEVER` before the first meeting.
        last: the iteration of this rank's last round.
    """

    def __init__(
        self, split: Split, travels: StateScope, settings: str, feedback: ErrorFeedback | None = None
    ) -> None:
        self.split, self._settings, self.feedback = split, settings, feedback
        self._collect = Collector(travels)
        self.comm: Comm | None = None
        self.fragments: list[Fragment] = []
        self.steps, self.last = NEVER, NEVER

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: counts, global weights, momentum, and the codec's errors."""
        owed = {} if self.feedback is None else self.feedback.errors
        return {
            "steps": self.steps,
            "last": self.last,
            "fragments": [fragment.state() for fragment in self.fragments],
            "errors": [[*key, torch.from_numpy(error.copy())] for key, error in owed.items()],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint; the group meets again."""
        self.comm, self.steps, self.last = None, int(state["steps"]), int(state["last"])
        self.fragments = [Fragment.from_state(each) for each in state["fragments"]]
        if self.feedback is not None:
            self.feedback.errors = {
                (place, number): error.numpy().copy() for place, number, error in state["errors"]
            }

    def live(self, model: torch.nn.Module) -> Tensors:
        """Return the model's tensors that have global weights.

        Args:
            model: this rank's model.

        Raises:
            ParameterError: the model has no floating-point parameters.
            UsageError: the tensors differ from those with global weights: layers were frozen or unfrozen.
        """
        found = {name: each for name, each in self._collect(model, None).items() if each.is_floating_point()}
        if not found:
            raise ParameterError("the model has no floating-point parameters: there is nothing to average")
        held = [name for fragment in self.fragments for name in fragment.names]
        if self.fragments and found.keys() != set(held):  # else they would stay each rank's own, unnoticed
            other = sorted(found.keys() ^ set(held))
            raise UsageError(
                f"{len(other)} tensors were frozen or unfrozen since the policy began ({other[0]}, …): use "
                "travels=StateScope() from the beginning, which also sends frozen tensors, or make a new policy now"
            )
        return found

    def meet(self, comm: Comm, model: torch.nn.Module, *, newcomers_only: bool = False) -> bool:
        """Meet on a communicator: check that the settings agree, and update the ranks that are behind.

        Args:
            comm: the group; collective.
            model: this rank's model; overwritten by the donor's if this rank is behind.
            newcomers_only: ranks with fewer outer steps are behind only if they have no outer steps.

        Returns:
            Whether all ranks have just taken over one model: a round would find no differences.

        Raises:
            MismatchError: on all ranks, if models or settings differ.
        """
        rows = np.empty((comm.Get_size(), 3), np.int64)
        digest = digest_of(self._settings.encode()) >> 1
        comm.Allgather(np.array([self.steps, self.last, digest], np.int64), rows)
        _check_settings(comm, rows[:, 2], self._settings)
        check_same(comm, Layout.of(Collector(StateScope())(model, None)), guard=False)
        donor = int(np.argmax(rows[:, 0]))
        least = int(rows[donor, 0]) if not newcomers_only else min(int(rows[donor, 0]), 0)
        behind = rows[:, 0] < least if rows[donor, 0] > NEVER else np.ones(len(rows), bool)
        if behind.any():
            self._update(comm, model, donor, bool(behind[comm.Get_rank()]), fresh=rows[donor, 0] == NEVER)
        if behind[comm.Get_rank()]:
            self.steps, self.last = max(int(rows[donor, 0]), 0), int(rows[donor, 1])
        if newcomers_only and not behind.all():
            # Some ranks have completed a round that a death kept from the rest: all repeat it, or one would wait.
            self.last = int(rows[~behind, 1].min())
        self.comm = comm
        return bool(behind.all())

    def _update(self, comm: Comm, model: torch.nn.Module, donor: int, behind: bool, *, fresh: bool) -> None:
        """Send the donor's model, global weights and momentum to the ranks that are behind."""
        everything = Collector(StateScope())(model, None)
        _broadcast(comm, everything, donor, take=behind)
        if not self.fragments:
            self.fragments = [Fragment(part) for part in self.split(self.live(model))]
        if fresh:
            return
        live = self.live(model)
        for fragment in self.fragments:
            for vectors in (fragment.weights, fragment.momentum):
                memory = vectors.memory if behind or comm.Get_rank() == donor else vectors.zeros().memory
                comm.Bcast(as_memory(memory), donor)
            if behind:
                assign(live, fragment.weights.tensors())

    def mean(self, place: int, vectors: FlatFloats, *, later: bool = False) -> Mean:
        """Begin the mean of a fragment's vectors over the group; see `Mean`."""
        assert self.comm is not None
        return Mean(self.comm, vectors, self.feedback, key=place, later=later)

    def stepped(self, iteration: int) -> None:
        self.steps, self.last = self.steps + 1, iteration


def _broadcast(comm: Comm, live: Tensors, donor: int, *, take: bool) -> None:
    """Broadcast the donor's tensors; ranks with `take` overwrite their own."""
    layout, device = Layout.of(live), device_of(live)
    memory = new_buffer(layout.nbytes, torch.uint8, META if device == META else CPU)
    lay_out(layout, memory, live, device)
    comm.Bcast(as_memory(memory), donor)
    if take:
        assign(live, laid_out(layout, memory, device))


def _check_settings(comm: Comm, digests: Any, settings: str) -> None:
    if (digests == digests[0]).all():
        return
    others = np.flatnonzero(digests != digests[0]).tolist()
    texts = comm.allgather(settings)
    raise MismatchError(
        f"rank {comm.Get_rank()}: the policies of this group differ: {texts[0]} on rank 0, {texts[others[0]]} on ranks "
        f"{others}; give all ranks the same arguments"
    )


def fragments_of(count: int, fragmenter: Fragmenter, live: Tensors) -> list[Tensors]:
    """Return the tensors of each of `count` fragments (0: one per block), cut by a fragmenter."""
    names = list(live)
    # Without the prefix for the kind of tensor: blocks are identified by module names.
    short = [name.partition("/")[2] for name in names]
    sizes = [live[name].numel() for name in names]
    everything = [*range(len(names))]
    if count == 1:
        cut = [everything]
    else:
        cut = fragmenter(short, sizes, count) if count else blocks(short)
    if sorted(place for part in cut for place in part) != everything or not all(cut):
        raise ParameterError("fragmenter: put each tensor into exactly one fragment, and leave none empty")
    return [{names[place]: live[names[place]] for place in part} for part in cut]
