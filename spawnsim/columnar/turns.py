"""Which turn a policy has over columns, and which policies and options have none.

A turn class lists the calls of its policy: collectives in `meetings`, messages between neighbours in `gossiping`.
"""

from __future__ import annotations

from collections.abc import Callable

from spawnsim.columnar.durations import Streams
from spawnsim.columnar.gossiping import GossipTurn
from spawnsim.columnar.meetings import (
    AveragingTurn,
    Group,
    OuterTurn,
    SelectiveTurn,
    SharesTurn,
    StreamingTurn,
    Turn,
)
from spawnsim.columnar.models import Models, Sizes
from spawnsim.columnar.supported import InTurn, check_selective
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.network.cost import Floats
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EASGDPolicy,
    GossipPolicy,
    OuterOptimizerPolicy,
    SPARTAPolicy,
    SpawnPolicy,
    StreamingDiLoCoPolicy,
)
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.donors import Decision
from spawnsim.policies.state.codecs import encoded_nbytes
from spawnsim.policies.state.difference_codecs import RandomMask


class TurnsInOrder(Turn):
    """`InTurn`: the turns of its policies that are due, in order."""

    def __init__(self, policy: InTurn, group: Group, turns: list[Turn]) -> None:
        selective = [each.nbytes for each in turns if isinstance(each, SelectiveTurn)]
        super().__init__(policy, group, [*selective, *[each.nbytes for each in turns], 0][0])
        self._turns = turns
        for each in turns:
            each.notes = self.notes

    def due(self, iteration: int) -> bool:
        return super().due(iteration) or any(each.due(iteration) for each in self._turns)

    def tick(self) -> None:
        for each in self._turns:
            each.tick()

    def act(self, iteration: int, metrics: Floats, models: Models) -> Decision | None:
        found: Decision | None = None
        for each in self._turns:
            if each.due(iteration):
                decision = each.act(iteration, metrics, models)
                found = decision if decision is not None else found
        return found


def turn_of(
    policy: SpawnPolicy,
    group: Group,
    sizes: Callable[[SpawnPolicy], Sizes],
    *,
    seed: int,
    streams: Streams,
) -> Turn:
    """Return the turn of a policy.

    Args:
        policy: the policy.
        group: the ranks.
        sizes: returns the bytes of a policy's messages, see `Models.sizes`.
        seed: seed of the run.
        streams: how donors and ages are drawn.

    Returns:
        Its turn over columns.

    Raises:
        UnsupportedError: the policy, or one of its parts, has no form over columns.
        ParameterError: a size is not a whole number of at least 1.
    """
    if isinstance(policy, InTurn):
        turns = [turn_of(each, group, sizes, seed=seed, streams=streams) for each in policy.policies]
        if sum(isinstance(each, SelectiveTurn) for each in turns) > 1:
            raise UnsupportedError(
                "columnar: InTurn of two policies that replace ranks has no form over columns"
            )
        return TurnsInOrder(policy, group, turns)
    act, turn = getattr(type(policy), "act", None), getattr(type(policy), "turn", None)
    nbytes, whole_nbytes = sizes(policy)
    if isinstance(policy, StreamingDiLoCoPolicy) and turn is StreamingDiLoCoPolicy.turn:
        sent = nbytes if isinstance(nbytes, list) else [int(nbytes or 1)] * max(policy.fragments, 1)
        return StreamingTurn(policy, group, sent, int(whole_nbytes or sum(sent)))
    assert not isinstance(nbytes, list)
    if nbytes is None or isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 1:
        raise ParameterError(f"model_nbytes={nbytes!r}: give the bytes of one model, at least 1")
    measured = whole_nbytes is not None
    whole_nbytes = int(nbytes if whole_nbytes is None else whole_nbytes)
    # Compare methods, not classes: a subclass that overrides `act` is a different policy.
    kind = type(policy)
    if isinstance(policy, AverageAllPolicy) and act is AverageAllPolicy.act:
        return AveragingTurn(policy, group, int(nbytes))
    if isinstance(policy, GlobalWeightsPolicy) and act is GlobalWeightsPolicy.act:
        if isinstance(policy, SPARTAPolicy) and turn is SPARTAPolicy.turn:
            if not measured:
                nbytes = RandomMask(policy.share).encoded_nbytes(int(nbytes) // 4)
            return SharesTurn(policy, group, int(nbytes), whole_nbytes, seed=seed)
        if turn in (OuterOptimizerPolicy.turn, EASGDPolicy.turn):
            if policy.outer.feedback is not None and not measured:
                nbytes = encoded_nbytes(policy.outer.feedback.codec, int(nbytes) // 4)
            return OuterTurn(policy, group, int(nbytes), whole_nbytes)
    if isinstance(policy, GossipPolicy) and act is GossipPolicy.act:
        return GossipTurn(policy, group, int(nbytes), seed=seed, sum_nbytes=whole_nbytes)
    if isinstance(policy, AsyncSelectiveAveragingPolicy) and act is AsyncSelectiveAveragingPolicy.act:
        check_selective(policy, group.platform)
        return SelectiveTurn(policy, group, int(nbytes), seed=seed, streams=streams)
    raise UnsupportedError(
        f"columnar: {kind.__name__} has no form over columns (docs/columnar.md lists the policies that have): each of "
        "its ranks acts at its own time, or on messages. Run it on virtual ranks: spawnsim.run(main, ranks=...)"
    )
