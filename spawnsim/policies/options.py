"""Arguments that many policies share, each described once.

A constructor takes them as keywords, `**how`, and fills these objects with them: their fields are further arguments of
the policy (`SpawnPolicy.parameters` lists all).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

from spawnsim.errors import ParameterError
from spawnsim.policies.exchange.replacement import Explore, ModelBuilder, Replacement, Rule
from spawnsim.policies.rules.donors import Count, DonorRule, Mixing, Rules, Uniform, default_donors
from spawnsim.policies.rules.merging import Fragmenter
from spawnsim.policies.rules.selection import Mode, NanPolicy, Selection
from spawnsim.policies.state.codecs import Codec
from spawnsim.policies.state.layout import StateScope
from spawnsim.policies.state.outer import OuterSGD
from spawnsim.policies.state.snapshot import Compression

First = TypeVar("First")
Second = TypeVar("Second")


def split(how: dict[str, Any], first: type[First], second: type[Second]) -> tuple[First, Second]:
    """Return an object of each kind, filled with the keywords that are its fields.

    Raises:
        TypeError: neither has a field of that name.
    """
    one, two = ([field.name for field in fields(cast("Any", kind))] for kind in (first, second))
    if unknown := how.keys() - {*one, *two}:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; there are {', '.join(one + two)}")
    filled = first(**{name: how[name] for name in one if name in how})
    return filled, second(**{name: how[name] for name in two if name in how})


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """Who is replaced, and from whom: of policies that replace ranks.

    Args:
        donors: a donor rule, or a number of donors drawn uniformly from the survivors (share if float; 1.0: all). By
            default the best alone for "best_only", which then gives to all replaced ranks; else a number that keeps
            traffic from growing with the square of the group.
        selection: your own rule in place of the named one.
        mixing: your own weights of donors, from their metrics, in place of the named ones.
        mode: "max" if higher metrics are better, else "min".
        nan_policy: what becomes of metrics that are not finite: "worst", "exclude" or "raise".
    """

    donors: DonorRule | Count = None
    selection: Selection | None = None
    mixing: Mixing | None = None
    mode: Mode = "max"
    nan_policy: NanPolicy = "worst"

    def rules(self, named: Selection, strategy: str, most: int | None) -> Rules:
        """Return the rules of a policy.

        Args:
            named: the selection that its other arguments name.
            strategy: how donors are weighed.
            most: how many donors there are where nothing else is said; None: all.

        Returns:
            The rules.

        Raises:
            ParameterError: an argument is not among its choices.
        """
        donors = self.donors if callable(self.donors) else Uniform(self.donors)
        if self.donors is None:
            donors = default_donors(strategy, self.mode, most)
        selection = self.selection if self.selection is not None else named
        return Rules(selection, donors, strategy, self.mixing, self.mode, self.nan_policy)


@dataclass(frozen=True, slots=True)
class TravelOptions:
    """What a replaced rank takes over, and how it travels.

    Args:
        travels: which parts of the state are exchanged, and what becomes of the optimizer's, which is reset by default.
        explore: called as `explore(model, optimizer, rng)` after each replacement of this rank.
        compression: None; "float16" or "bfloat16": float32 and float64 parameters and buffers travel in that type
            (out of its range: as they are); or another codec's name, or a codec. Sums stay in the models' types.
        guard: leave out donors whose state holds a NaN, or an infinity that the replaced rank does not have there,
            with an event "left_out" and a warning; if none is left, the rank goes on with its own weights.

    Raises:
        ParameterError: `compression` is unknown.
    """

    travels: StateScope | None = None
    explore: Explore | None = None
    compression: str | Codec | None = None
    guard: bool = True

    def __post_init__(self) -> None:
        Compression(self.compression)

    def replacement(
        self, builder: ModelBuilder | None, strategy: str, momentum: float, rule: Rule
    ) -> Replacement:
        """Return how a policy replaces a rank.

        Args:
            builder: makes the fresh (model, optimizer) of a replaced rank, or None.
            strategy: how donors are weighed.
            momentum: the share of its own weights that a replaced rank keeps.
            rule: "replace" or "delta".

        Returns:
            The replacement.

        Raises:
            ParameterError: an argument is not among its choices or outside its range.
        """
        travels = self.travels if self.travels is not None else StateScope(optimizer_state="reset")
        return Replacement(builder, strategy, float(momentum), rule, travels, self.explore)


@dataclass(frozen=True, slots=True)
class OuterOptions:
    """How global weights move, and what travels for it: of policies with global weights.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum.
        nesterov: torch.optim.SGD's; else heavy ball.
        sign: move each weight by lr and the sign of the outer gradient.
        clip: the largest magnitude of a number of the outer momentum.
        fragments: into how many parts the model is cut, each with a turn of its own in `average_every` iterations;
            0: one for each block, and all at once.
        fragmenter: "strided", "sequential", "greedy", or a function: see `rules.merging`.
        compression: how differences travel: the name of a codec, or a codec; None sends them as they are, by Allreduce.
        feedback: how much of what the codec left out is added to the next difference, from 0 to 1.
        travels: which tensors have global weights. "reset" forgets the optimizer's state in each round.

    Raises:
        ParameterError: an argument is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    sign: bool = False
    clip: float = float("inf")
    fragments: int = 1
    fragmenter: str | Fragmenter = "strided"
    compression: str | Codec | None = None
    feedback: float = 0.0
    travels: StateScope | None = None

    def __post_init__(self) -> None:
        if self.travels is not None and self.travels.with_optimizer:
            raise ParameterError("optimizer_state: global weights have no optimizer of ranks; reset or keep")
        self.rule()

    def rule(self) -> OuterSGD:
        """Return the outer optimizer.

        Returns:
            It holds no state.
        """
        return OuterSGD(self.lr, self.momentum, self.nesterov, self.sign, self.clip)
