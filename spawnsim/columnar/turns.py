"""Which turn a policy has over columns, and which policies and options have none.

A turn class lists the calls of its policy: collectives in `meetings`, messages between neighbours in `gossiping`.
"""

from __future__ import annotations

from spawnsim.columnar.durations import Streams
from spawnsim.columnar.gossiping import GossipTurn, check_neighbours
from spawnsim.columnar.meetings import AveragingTurn, Group, OuterTurn, SelectiveTurn, SharesTurn, Turn
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.platform import Platform
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    EASGDPolicy,
    ExchangeOptions,
    GossipPolicy,
    OuterOptimizerPolicy,
    Perturb,
    SPARTAPolicy,
    SpawnPolicy,
)
from spawnsim.policies.exchange.replacement import Explore
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.donors import Rules
from spawnsim.policies.state.difference_codecs import RandomMask


def turn_of(
    policy: SpawnPolicy,
    group: Group,
    nbytes: int | None,
    *,
    seed: int,
    streams: Streams,
    whole_nbytes: int | None = None,
) -> Turn:
    """Return the turn of a policy.

    Args:
        policy: the policy.
        group: the ranks.
        nbytes: size of one model on the wire.
        seed: seed of the run.
        streams: how donors and ages are drawn.
        whole_nbytes: see `Models`; None: `nbytes`.

    Returns:
        Its turn over columns.

    Raises:
        UnsupportedError: the policy, or one of its parts, has no form over columns.
        ParameterError: `nbytes` is not a whole number of at least 1.
    """
    if nbytes is None or isinstance(nbytes, bool) or int(nbytes) != nbytes or nbytes < 1:
        raise ParameterError(f"model_nbytes={nbytes!r}: give the bytes of one model, at least 1")
    measured = whole_nbytes is not None
    whole_nbytes = int(nbytes if whole_nbytes is None else whole_nbytes)
    # Compare methods, not classes: a subclass that overrides `act` is a different policy.
    kind = type(policy)
    act, turn = getattr(kind, "act", None), getattr(kind, "turn", None)
    if isinstance(policy, AverageAllPolicy) and act is AverageAllPolicy.act:
        return AveragingTurn(policy, group, int(nbytes))
    if isinstance(policy, GlobalWeightsPolicy) and act is GlobalWeightsPolicy.act:
        _check_outer(policy)
        if isinstance(policy, SPARTAPolicy) and turn is SPARTAPolicy.turn:
            if not measured:
                nbytes = RandomMask(policy.share).encoded_nbytes(int(nbytes) // 4)
            return SharesTurn(policy, group, int(nbytes), whole_nbytes, seed=seed)
        if turn in (OuterOptimizerPolicy.turn, EASGDPolicy.turn):
            return OuterTurn(policy, group, int(nbytes), whole_nbytes)
    if isinstance(policy, GossipPolicy) and act is GossipPolicy.act:
        return GossipTurn(policy, group, int(nbytes), seed=seed, sum_nbytes=whole_nbytes)
    if isinstance(policy, AsyncSelectiveAveragingPolicy) and act is AsyncSelectiveAveragingPolicy.act:
        _check_selective(policy, group.platform)
        return SelectiveTurn(policy, group, int(nbytes), seed=seed, streams=streams)
    raise UnsupportedError(
        f"columnar: {kind.__name__} has no form over columns (docs/columnar.md lists the policies that have): each of "
        "its ranks acts at its own time, or on messages. Run it on virtual ranks: spawnsim.run(main, ranks=...)"
    )


def _check_outer(policy: GlobalWeightsPolicy) -> None:
    """Raise `UnsupportedError` for an outer optimizer that has no form over columns."""
    if policy.outer.feedback is not None:
        raise UnsupportedError(
            f"columnar: {type(policy).__name__} with compression has no form over columns: run it on virtual ranks"
        )


def _check_selective(policy: AsyncSelectiveAveragingPolicy, platform: Platform) -> None:
    """Raise `UnsupportedError` for options that selective replacement in lockstep lacks."""
    _check_rules(policy.rules)
    check_neighbours(type(policy).__name__, platform)
    plain, wiring = ExchangeOptions(), policy.wiring
    refused = [
        (
            not _perturbs_rates(policy.replacement.explore),
            "explore",
            "give a Perturb of the learning rate, lr",
        ),
        (policy.compression is not None, "compression", "give model_nbytes as they travel"),
        (wiring.quorum != plain.quorum, "a quorum", "in lockstep each round waits for all reports"),
        (wiring.deadline is not None, "a deadline", "in lockstep each round waits for all reports"),
    ]
    for is_so, what, why in refused:
        if is_so:
            raise UnsupportedError(f"columnar: {type(policy).__name__} with {what} cannot run: {why}")


def _perturbs_rates(explore: Explore | None) -> bool:
    """Return whether a function that explores changes learning rates alone, or is None."""
    return explore is None or (isinstance(explore, Perturb) and not {*explore.settings} - {"lr"})


def _check_rules(rules: Rules) -> None:
    """Raise `UnsupportedError` for rules that have no form over columns."""
    refused = [
        (not hasattr(rules.selection, "columns"), f"selection={_name(rules.selection)}"),
        (not hasattr(rules.donors, "columns"), f"donors={_name(rules.donors)}"),
        (rules.mixing is not None, f"mixing={_name(rules.mixing)}"),
        (rules.strategy == "reset_weights", "averaging_strategy='reset_weights'"),
    ]
    for is_so, what in refused:
        if is_so:
            raise UnsupportedError(
                f"columnar: {what} has no form over columns: it decides on one object per rank. "
                "Run the policy on virtual ranks, or give it a method `columns` as `rules.selection.WorstRatio` has"
            )


def _name(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)
