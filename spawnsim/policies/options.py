"""Arguments that several policies share, each documented once.

A constructor takes them as keywords, `**how`, and fills these objects with them. Their fields are further arguments of
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
    """Return an object of each class, filled with the keywords that match its fields.

    Raises:
        TypeError: neither class has a field of that name.
    """
    one, two = ([field.name for field in fields(cast("Any", kind))] for kind in (first, second))
    if unknown := how.keys() - {*one, *two}:
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}; there are {', '.join(one + two)}")
    filled = first(**{name: how[name] for name in one if name in how})
    return filled, second(**{name: how[name] for name in two if name in how})


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """Options of policies that replace ranks: which ranks are replaced, and by which donors.

    Args:
        donors: a donor rule, or a number of donors drawn uniformly from the survivors (a share if float; 1.0: all). The
            default for "best_only" is the single best rank, which donates to all replaced ranks; otherwise it is a
            number that keeps traffic from growing with the square of the group.
        selection: a custom rule in place of the named one.
        mixing: custom weights of donors, from their metrics, in place of the named ones.
        mode: "max" if higher metrics are better, else "min".
        nan_policy: handling of metrics that are not finite: "worst", "exclude" or "raise".
    """

    donors: DonorRule | Count = None
    selection: Selection | None = None
    mixing: Mixing | None = None
    mode: Mode = "max"
    nan_policy: NanPolicy = "worst"

    def rules(self, named: Selection, strategy: str, most: int | None) -> Rules:
        """Return the rules of a policy.

        Args:
            named: the selection named by the policy's other arguments.
            strategy: how donors are weighted.
            most: the default maximum number of donors; None: no maximum.

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
    """Options of a replacement: the parts of the state that a replaced rank takes over, and their transport.

    Args:
        travels: which parts of the state are exchanged, and the handling of the optimizer's state (by default: reset).
        explore: called as `explore(model, optimizer, rng)` after each replacement of this rank.
        compression: None; "float16" or "bfloat16": float32 and float64 parameters and buffers are sent in that type
            (unchanged if out of its range); or the name of another codec, or a codec. Sums use the models' types.
        guard: exclude donors whose state holds a NaN, or an infinity that the replaced rank lacks there, and record an
            event "left_out" and a warning. If no donor remains, the rank keeps its own weights.

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
        """Return the `Replacement` of a policy.

        Args:
            builder: creates the fresh (model, optimizer) of a replaced rank, or None.
            strategy: how donors are weighted.
            momentum: the share of a replaced rank's own weights that it keeps.
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
    """Options of policies with global weights: the outer optimizer, and the transport of differences.

    Args:
        lr: the outer learning rate.
        momentum: the outer momentum.
        nesterov: Nesterov momentum as in torch.optim.SGD; otherwise heavy ball.
        sign: change each weight by lr times the sign of the outer gradient.
        clip: largest magnitude of an element of the outer momentum.
        fragments: number of parts of the model, each with its own turn within `average_every` iterations; 0: one for
            each block, all at once.
        fragmenter: "strided", "sequential", "greedy", or a function: see `rules.merging`.
        compression: codec of the differences, by name or object; None sends them uncompressed, by Allreduce.
        feedback: share of the codec's error that is added to the next difference, from 0 to 1.
        travels: which tensors have global weights. "reset" resets the optimizer's state in each round.

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
            An optimizer without state.
        """
        return OuterSGD(self.lr, self.momentum, self.nesterov, self.sign, self.clip)
