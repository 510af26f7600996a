"""Which policies and options have a form over columns, and `InTurn`: several policies, one after the other.

Everything else is refused by name, with the reason, before anything runs.
"""

from __future__ import annotations

from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.platform import Platform
from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    ExchangeOptions,
    GossipPolicy,
    Perturb,
    SpawnPolicy,
    When,
)
from spawnsim.policies.exchange.replacement import Explore
from spawnsim.policies.outer_optimizer import GlobalWeightsPolicy
from spawnsim.policies.rules.cadence import Every
from spawnsim.policies.rules.donors import Rules
from spawnsim.policies.state.layout import StateScope


class InTurn(SpawnPolicy):
    """Policies that act one after the other, as in a program that calls each of them; none: ranks train alone.

    Only over columns: an ordinary program calls the policies themselves.

    Args:
        policies: the policies, in their order; each acts at its own cadence, on the same metrics.
        report_every: iterations between further reports, at which nothing is exchanged; None: none.

    Raises:
        ParameterError: an argument is not a policy, or `report_every` is not a whole number of at least 1.
    """

    def __init__(self, *policies: SpawnPolicy, report_every: int | None = None) -> None:
        reports = When(lambda iteration: False) if report_every is None else Every(report_every)
        super().__init__(1 if report_every is None else report_every, cadence=reports)
        given: tuple[object, ...] = policies
        for each in given:
            if not isinstance(each, SpawnPolicy) or isinstance(each, InTurn):
                raise ParameterError(f"InTurn({each!r}): give policies")
        self.policies, self.report_every = policies, report_every


def parts_of(policy: SpawnPolicy) -> tuple[SpawnPolicy, ...]:
    """Return the policies that act in turn: usually one."""
    return policy.policies if isinstance(policy, InTurn) else (policy,)


def name_of(policy: SpawnPolicy) -> str:
    """Return the short name of a policy; "none" if ranks train alone."""
    return " + ".join(type(each).__name__.removesuffix("Policy") for each in parts_of(policy)) or "none"


def selective_of(policy: SpawnPolicy) -> AsyncSelectiveAveragingPolicy | None:
    """Return the first of the policies that act in turn which replaces ranks."""
    found = (each for each in parts_of(policy) if isinstance(each, AsyncSelectiveAveragingPolicy))
    return next(found, None)


def travels_of(policy: SpawnPolicy) -> StateScope:
    """Return the parts of a model that a policy exchanges."""
    if isinstance(policy, AsyncSelectiveAveragingPolicy):
        return policy.replacement.travels
    kinds = AverageAllPolicy, GlobalWeightsPolicy, GossipPolicy
    return policy.travels if isinstance(policy, kinds) else StateScope()


def check_policy(policy: SpawnPolicy) -> None:
    """Raise `UnsupportedError` for options whose effect on models would differ from virtual ranks."""
    if isinstance(policy, AsyncSelectiveAveragingPolicy) and policy.replacement.builder is not None:
        raise UnsupportedError(
            f"columnar: {type(policy).__name__} with a model_builder: give None, with which a replaced rank keeps its "
            "optimizer, with new values"
        )
    if other := {*travels_of(policy).settings} - {"lr"}:
        raise UnsupportedError(
            f"columnar: the setting {min(other)!r} travels with the optimizer's state, but over columns only learning "
            "rates (lr) differ from rank to rank"
        )


def check_neighbours(name: str, platform: Platform) -> None:
    """Raise `UnsupportedError` for a network on which messages between neighbours have no form over columns."""
    network = platform.network
    if network.contention in ("fifo", "fair"):
        raise UnsupportedError(
            f"columnar: {name} with contention = {network.contention!r} cannot run: its order of messages needs "
            'events; choose "serial" or "none"'
        )
    if network.changes:
        raise UnsupportedError(
            f"columnar: {name} with links that change with time cannot run: its messages are timed without a clock"
        )


def check_selective(policy: AsyncSelectiveAveragingPolicy, platform: Platform) -> None:
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
