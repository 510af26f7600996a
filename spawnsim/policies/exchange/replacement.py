"""A rank's replacement, from the donors' snapshots to its new model and optimizer; and the record of a replacement.

A donor packs its state in one pass, directly into the send buffer, which is reused afterwards. It does so between two
training steps, so a snapshot never mixes two versions of a model. With a `model_builder` the replaced rank gets a
freshly built model and optimizer (which may have other hyper-parameters: exploring); without one its own are
overwritten in place. Tensors are matched by name and shape; tensors that no donor has keep the rank's own values. The
record contains the keys of `info` and the fields of events.jsonl for a replacement, including all that `replay` needs.

If all survivors of a large group are donors, a replaced rank cannot keep their states until the last has arrived: over
all replaced ranks the memory would grow with the square of the group. Up to `MOST_DONORS` states are kept and mixed in
order of rank. More are added to a running mean in order of arrival, and the record lists them in that order, so that a
replay gets the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError
from spawnsim.policies.exchange.messages import Kind, Message, Unreadable, body_at, seal, write_head
from spawnsim.policies.rules.donors import MOST_DONORS, STRATEGIES, check_momentum
from spawnsim.policies.rules.selection import check_choice
from spawnsim.policies.state.arithmetic import (
    CPU,
    accumulate,
    add,
    all_finite,
    as_one_view,
    as_tensor,
    blend,
    is_whole,
    sum_dtype,
    surely_finite,
    with_delta,
    with_momentum,
    without_data,
)
from spawnsim.policies.state.codecs import Bytes
from spawnsim.policies.state.layout import (
    Layout,
    ModelAndOptimizer,
    StateScope,
    Tensors,
    assign,
    assign_optimizer,
    collect,
    reset_optimizer,
)
from spawnsim.policies.state.snapshot import Compression, allocator_for, device_of, laid_out, lay_out

logger = logging.getLogger(__name__)

ModelBuilder = Callable[[], tuple[torch.nn.Module, torch.optim.Optimizer]]
Explore = Callable[[torch.nn.Module, torch.optim.Optimizer, np.random.Generator], None]
Rule = Literal["delta", "replace"]


class Packer:
    """Packs and unpacks states; caches layouts, so that a model's description is written and parsed once."""

    def __init__(
        self, part_nbytes: int, *, checksum: bool = False, compression: Compression | None = None
    ) -> None:
        self._part_nbytes, self._checksum = part_nbytes, checksum
        self._compression = compression if compression is not None else Compression()
        self._layout: Layout | None = None
        self._parts: list[Layout] = []
        self._known: dict[bytes, Layout] = {}
        self._made: dict[int, Bytes] = {}  # the memory of the last snapshot, by part

    def pack(
        self,
        live: Tensors,
        round_: int,
        iteration: int,
        *,
        busy: Callable[[Bytes], bool] = lambda memory: True,
    ) -> list[Bytes]:
        """Return the SNAPSHOT messages of the current tensors; memory for which `busy` is true is not reused."""
        encoded, device = self._compression.encode(live), device_of(live)
        if encoded.layout is not self._layout:
            self._layout, self._made = encoded.layout, {}
            self._parts = encoded.layout.split(self._part_nbytes)
        messages = []
        for index, layout in enumerate(self._parts):
            start = body_at(len(layout.text))
            array = self._memory(index, start + layout.nbytes, device, busy)
            head = Message(Kind.SNAPSHOT, round_, iteration, index, len(self._parts), meta=layout.text)
            write_head(array, head)
            lay_out(layout, as_tensor(array[start:]), encoded.sources, device)
            seal(array, len(layout.text), body=self._checksum)
            messages.append(array)
        return messages

    def _memory(self, index: int, nbytes: int, device: torch.device, busy: Callable[[Bytes], bool]) -> Bytes:
        made = self._made.get(index)
        if made is None or busy(made):
            made = self._made[index] = allocator_for(device)(nbytes)
        return made

    def unpack(self, parts: Sequence[Message], device: torch.device = CPU) -> Tensors:
        """Return the tensors in the parts of one snapshot: views into the messages, if they are not compressed.

        Raises `UsageError` if they are compressed by a codec that this rank does not know.
        """
        tensors: Tensors = {}
        for part in parts:
            layout = self._known.get(part.meta)
            if layout is None:
                layout = self._known[part.meta] = Layout.parse(part.meta)
            if part.body.size != layout.nbytes:
                raise Unreadable(f"a part of {part.body.size} bytes that describes {layout.nbytes}")
            tensors.update(laid_out(layout, as_tensor(part.body), device))
        try:
            return self._compression.decode(tensors)
        except ValueError as error:
            raise Unreadable(f"a snapshot that cannot be decoded: {error}") from error


@dataclass(frozen=True)
class Contribution:
    """One donor's contribution: its complete state at its `iteration`, and its weight."""

    donor: int
    iteration: int
    weight: float
    tensors: Tensors

    @cached_property
    def row(self) -> torch.Tensor | None:
        return as_one_view([*self.tensors.values()]) if self.tensors else None

    @property
    def precedence(self) -> tuple[float, int]:
        """Order of donors: optimizer state is copied from the donor with the highest precedence."""
        return self.weight, -self.donor


def normalized(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Return the arrived contributions with weights that sum to 1."""
    # If donors died or timed out, the sum is less than 1, which would shrink the model.
    total = sum(each.weight for each in contributions)
    if is_whole(total) or not total > 0:
        return list(contributions)
    return [replace(each, weight=each.weight / total) for each in contributions]


def nonfinite_donors(contributions: Sequence[Contribution], own: Callable[[], Tensors]) -> list[int]:
    """Return the donors whose state holds a NaN, or an infinity that this rank lacks there (masks may hold some)."""
    return [
        each.donor
        for each in contributions
        if not (each.row is not None and each.row.is_floating_point() and surely_finite(each.row))
        and not all(map(_finite, each.tensors.values()))
        and not all(_is_usable(tensor, own().get(name)) for name, tensor in each.tensors.items())
    ]


def _finite(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or all_finite(value)


def _is_usable(value: torch.Tensor, own: torch.Tensor | None) -> bool:
    if _finite(value):
        return True
    if own is None or own.shape != value.shape:
        return False
    # An attention mask holds infinities on every rank, in the same places; they are part of the model, not an error.
    places = ~torch.isfinite(value)
    return bool((value[places] == own[places]).all())


@dataclass(frozen=True, slots=True)
class ReplacementResult:
    """The model and optimizer to continue with; `unmatched` names tensors that no donor had."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    unmatched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Replacement:
    """Rule of a replacement: θ_new = Σ w_k θ_k over the donors, then θ ← m·θ_own + (1 - m)·θ_new.

    Args:
        builder: creates the fresh (model, optimizer) of a replaced rank; None overwrites its own in place.
        strategy: rule of the weights w: "mean", "weighted_mean" or "best_only"; "reset_weights" uses no donors and
            needs a builder.
        momentum: m, from 0 to 1.
        rule: "delta" adds to θ_new the steps of the rank since it asked its donors; "replace" does not.
        travels: which parts of the state are exchanged, and the handling of the optimizer's state.
        explore: called last, as `explore(model, optimizer, rng)`.

    Raises:
        ParameterError: an argument is not among its choices or outside its range.
    """

    builder: ModelBuilder | None = None
    strategy: str = "mean"
    momentum: float = 0.0
    rule: Rule = "replace"
    travels: StateScope = field(default_factory=lambda: StateScope(optimizer_state="reset"))
    explore: Explore | None = None

    def __post_init__(self) -> None:
        check_choice("averaging_strategy", self.strategy, STRATEGIES)
        check_momentum(self.momentum)
        check_choice("rule", self.rule, get_args(Rule))
        if self.builder is None and self.strategy == "reset_weights":
            raise ParameterError(
                "averaging_strategy='reset_weights' needs a model_builder to make the fresh weights"
            )
        if self.builder is not None and not callable(self.builder):
            raise ParameterError(
                f"model_builder is a {type(self.builder).__name__}: give a function that returns (model, optimizer)"
            )

    def reference(self, model: torch.nn.Module) -> Tensors:
        """Return the reference of the delta rule, at the time when donors are asked.

        Args:
            model: model of the rank to be replaced.

        Returns:
            A copy of its parameters by name; empty with another rule.
        """
        if self.rule == "replace" or self.strategy == "reset_weights":
            return {}
        own = collect(model, None, StateScope(buffers=False))
        return {name: tensor.clone() for name, tensor in own.items()}

    def __call__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        contributions: Sequence[Contribution],
        *,
        reference: Tensors,
        rng: np.random.Generator,
    ) -> ReplacementResult:
        """Replace a model.

        Args:
            model: the replaced rank's model.
            optimizer: the optimizer of that model.
            contributions: the donors' contributions, with weights that sum to 1; none for fresh weights of the builder.
            reference: the result of `reference` when the donors were asked; empty without the delta rule.
            rng: for `explore`.

        Returns:
            The model and optimizer to continue with, and the names of tensors that no donor had: they keep their
            values.
        """
        fresh, fresh_optimizer = self.builder() if self.builder else (model, optimizer)
        if _is_scheduled(optimizer) and not _is_scheduled(fresh_optimizer):
            logger.warning(
                "a replaced rank continues with a new optimizer, whose learning rate the old scheduler does "
                "not change: give model_builder=None, with which a rank keeps its model and optimizer, with "
                "new values"
            )
        plain = StateScope(self.travels.frozen, self.travels.buffers)
        own, live = collect(model, None, plain), collect(fresh, None, plain)
        changed = [name for name in own if name in live and own[name].shape != live[name].shape]
        if changed:
            name = changed[0]
            logger.warning(
                "model_builder makes a different model from the replaced one: %s is %s, and was %s",
                name, tuple(live[name].shape), tuple(own[name].shape),
            )  # fmt: skip
        values, unmatched = self._values(own, live, contributions, reference)
        assign(live, values)  # after all tensors have been mixed: a model is never replaced in part
        self._optimizer((model, optimizer), (fresh, fresh_optimizer), contributions)
        if self.explore is not None:
            self.explore(fresh, fresh_optimizer, rng)
        return ReplacementResult(fresh, fresh_optimizer, unmatched)

    def _values(
        self, own: Tensors, live: Tensors, contributions: Sequence[Contribution], reference: Tensors
    ) -> tuple[Tensors, tuple[str, ...]]:
        values: Tensors = {}
        unmatched: list[str] = []
        mixtures = _mixtures(live, contributions) if contributions else live
        for name, target in live.items():
            mixed, before = mixtures[name], own.get(name)
            if before is not None and before.shape != target.shape:
                before = None
            if mixed is not None:
                values[name] = self._step(mixed, before, reference.get(name))
                continue
            # A tensor that no donor has keeps this rank's value, also in a freshly built model if it fits: a layer that
            # only this rank has should not return to its initial weights because the other layers were replaced.
            unmatched.append(name)
            if before is not None:
                values[name] = before
        return values, tuple(unmatched)

    def _step(
        self, mixed: torch.Tensor, own: torch.Tensor | None, reference: torch.Tensor | None
    ) -> torch.Tensor:
        if own is None:
            return mixed
        if reference is not None and reference.shape == own.shape:
            mixed = with_delta(mixed, own, reference)
        return with_momentum(mixed, own, self.momentum)

    def _optimizer(
        self, own: ModelAndOptimizer, new: ModelAndOptimizer, contributions: Sequence[Contribution]
    ) -> None:
        how, (fresh, fresh_optimizer) = self.travels.optimizer_state, new
        # Moments of the old weights do not apply to the new ones: so reset is the policies' default, and the only
        # choice for fresh weights (reset_weights).
        if how == "reset" or self.strategy == "reset_weights":
            reset_optimizer(fresh_optimizer)
            return
        if fresh_optimizer is not own[1]:
            everything = collect(*own, StateScope(optimizer_state="copy"))
            assign_optimizer(fresh, fresh_optimizer, of_optimizer(everything))
        if how == "copy" and contributions:
            heaviest = max(contributions, key=lambda each: each.precedence)
            assign_optimizer(fresh, fresh_optimizer, of_optimizer(heaviest.tensors))
        elif how == "average" and contributions:
            first: Tensors = {}  # by tensor, from the first donor that has it: shape and dtype
            for each in contributions:
                for name, tensor in of_optimizer(each.tensors).items():
                    first.setdefault(name, tensor)
            mixed = {name: mixture(name, tensor, contributions) for name, tensor in first.items()}
            found = {name: value for name, value in mixed.items() if value is not None}
            assign_optimizer(fresh, fresh_optimizer, found)


Renewal = Replacement  # earlier name


def _is_scheduled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a torch scheduler controls the learning rate: it has replaced the optimizer's `step`."""
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")


def _mixtures(live: Tensors, contributions: Sequence[Contribution]) -> Mapping[str, torch.Tensor | None]:
    """Return `mixture` of each tensor; in one operation, to the same bits, if each donor's tensors lie end to end."""
    rows = [_as_one(live, each) for each in contributions]
    whole = [row for row in rows if row is not None]
    if not live or len(whole) < len(rows):
        return {name: mixture(name, target, contributions) for name, target in live.items()}
    mixed = blend(whole, [each.weight for each in contributions])
    pieces = torch.split(mixed, [target.numel() for target in live.values()])
    return {
        name: piece.view(target.shape).to(device=target.device, dtype=target.dtype)
        for (name, target), piece in zip(live.items(), pieces, strict=True)
    }


def _as_one(like: Tensors, contribution: Contribution) -> torch.Tensor | None:
    """Return a donor's tensors of the same names and shapes as one flat view, if all exist and lie end to end."""
    tensors = contribution.tensors
    found = [tensor for name in like if (tensor := tensors.get(name)) is not None]
    if len(found) < len(like) or any(map(without_data, found)):
        return None
    if any(tensor.shape != other.shape for tensor, other in zip(found, like.values(), strict=True)):
        return None
    if [*tensors] == [*like]:
        return contribution.row
    return as_one_view(found) if found else None


def mixture(name: str, like: torch.Tensor, contributions: Sequence[Contribution]) -> torch.Tensor | None:
    """Return the weighted mean of a tensor over the donors that have it in this shape; None without such a donor."""
    having = [
        (tensor, each.weight)
        for each in contributions
        if (tensor := each.tensors.get(name)) is not None and tensor.shape == like.shape
    ]
    if not having:
        return None
    mixed = blend([tensor for tensor, _ in having], [weight for _, weight in having])
    return mixed.to(device=like.device, dtype=like.dtype)


def of_optimizer(tensors: Tensors) -> Tensors:
    """Return the optimizer's tensors of a state."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith("optimizer/")}


Served = Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class ReplacementRecord:
    """Record of a replacement of a rank at `iteration`.

    `round` is the iteration whose metrics decided, `asked` this rank's iteration when the donors were asked (the
    reference of the delta rule), `low` and `high` the range of the known metrics, `mode` "max" or "min" if it is known
    which metrics are better.
    """

    iteration: int
    round: int
    asked: int
    metric: float
    contributions: Sequence[Contribution]
    low: float = math.nan
    high: float = math.nan
    nbytes: int = 0
    wait_s: float = 0.0
    unmatched: tuple[str, ...] = ()
    mode: str = ""

    @property
    def staleness(self) -> int:
        """Iterations by which the oldest donor snapshot is behind this rank; negative if it is ahead."""
        return max((self.iteration - each.iteration for each in self.contributions), default=0)

    def publish(
        self, comm: Comm, info: dict[str, Any], so_far: int, how: Replacement, *, served: Served
    ) -> None:
        """Write the replacement to the `info` of its call, and record the event "replacement".

        The event contains everything that `replay` needs. Its ranks are ranks of the whole run, even if the
        communicator covers only a part of it. `served` states whether donors send before or after their own replacement
        in the same call. Logs a warning for tensors that no donor had.
        """
        info.update(
            averaged_this_iteration=bool(self.contributions), is_replaced=True, num_replacements_so_far=so_far,
            global_min_metric=self.low, global_max_metric=self.high, donors=len(self.contributions),
            staleness=self.staleness, bytes=self.nbytes, wait_s=self.wait_s,
        )  # fmt: skip
        world = comm.Get_group().members
        comm.record.event(
            "replacement", iteration=self.iteration, round=self.round, replaced=world[comm.Get_rank()],
            donors=[world[each.donor] for each in self.contributions],
            weights=[each.weight for each in self.contributions],
            versions=[each.iteration for each in self.contributions], asked=self.asked, metric=self.metric,
            low=self.low, high=self.high, bytes=self.nbytes, wait_s=self.wait_s, served=served,
            strategy=how.strategy, momentum=how.momentum, rule=how.rule,
            optimizer_state=how.travels.optimizer_state, mode=self.mode,
        )  # fmt: skip
        if self.unmatched:
            shown = ", ".join(self.unmatched[:5]) + (", …" if len(self.unmatched) > 5 else "")
            logger.warning(
                "rank %d: no donor has a match for these tensors, which stay unchanged: %s", comm.rank, shown
            )


def usable(
    comm: Comm, contributions: Sequence[Contribution], own: ModelAndOptimizer, travels: StateScope, *, guard: bool
) -> list[Contribution]:  # fmt: skip
    """Return the contributions to mix, with weights that sum to 1.

    With `guard`, donors whose state holds a NaN, or an infinity that this rank's model lacks there, are excluded, with
    an event "left_out" and a warning.
    """
    out = nonfinite_donors(contributions, lambda: collect(*own, travels)) if guard else []
    leave_out(comm, out)
    return normalized([each for each in contributions if each.donor not in out])


def leave_out(comm: Comm, donors: Sequence[int]) -> None:
    """Record the excluded donors and log a warning, if there are any."""
    if donors:
        world = comm.Get_group().members
        comm.record.event("left_out", donors=[world[donor] for donor in donors])
        logger.warning(
            "rank %d: donors %s sent values that are not finite: they are ignored", comm.rank, donors
        )


class _RunningMean:
    """The weighted mean of states of one layout: equal to the bit to `blend` in the order of addition."""

    def __init__(self, first: Contribution) -> None:
        self._first, self._total = first, first.weight
        self._drifts = [torch.zeros_like(each, dtype=sum_dtype(each.dtype)) for each in _pieces(first)]

    def add(self, given: Contribution) -> None:
        self._total += given.weight
        for drift, value, base in zip(self._drifts, _pieces(given), _pieces(self._first), strict=True):
            accumulate(drift, value, base, given.weight)

    def finish(self) -> Contribution:
        """Return the mean as one contribution with the total weight; no state can be added afterwards."""
        first, total = self._first, self._total
        if total > 0 and not is_whole(total):
            for drift in self._drifts:
                drift.div_(total)
        mixed = [add(base, drift) for base, drift in zip(_pieces(first), self._drifts, strict=True)]
        if first.row is not None:
            mixed = [*torch.split(mixed[0], [tensor.numel() for tensor in first.tensors.values()])]
        views = zip(first.tensors.items(), mixed, strict=True)
        return replace(first, weight=total, tensors={name: new.view(old.shape) for (name, old), new in views})


def _pieces(given: Contribution) -> list[torch.Tensor]:
    return [*given.tensors.values()] if given.row is None else [given.row]


def _layout(given: Contribution) -> Any:
    tensors = given.tensors.items()
    return given.row is None, *((name, tensor.dtype, tensor.shape) for name, tensor in tensors)


class Gathering:
    """The donors' contributions to one replacement. With `guard`, donors whose state is not finite are excluded."""

    def __init__(self, weights: Mapping[int, float], travels: StateScope, *, guard: bool) -> None:
        self.weights, self.travels, self.guard = weights, travels, guard
        # A replay has only the donors that arrived; their weights sum to less than 1 only if a running mean was used.
        self.running = len(weights) > MOST_DONORS or not math.isclose(sum(weights.values()), 1)
        self._given: list[Contribution] = []
        self._means: dict[Any, _RunningMean] = {}
        self._heaviest: Contribution | None = None
        self._out: list[int] = []

    def add(self, donor: int, iteration: int, tensors: Tensors, whose: ModelAndOptimizer) -> None:
        """Add a donor's complete state; `whose` are this rank's model and optimizer."""
        given = Contribution(donor, iteration, self.weights[donor], tensors)
        if not self.running:
            self._given.append(given)
            return
        if self.guard and nonfinite_donors([given], lambda: collect(*whose, self.travels)):
            self._out.append(donor)
            return
        self._given.append(replace(given, tensors={}))
        if self.travels.optimizer_state == "copy":
            if self._heaviest is None or given.precedence > self._heaviest.precedence:
                self._heaviest = given
            moments = of_optimizer(tensors)
            given = replace(given, tensors={n: t for n, t in tensors.items() if n not in moments})
        layout = _layout(given)
        if layout in self._means:
            self._means[layout].add(given)
        else:
            self._means[layout] = _RunningMean(given)

    def finish(self, comm: Comm, whose: ModelAndOptimizer) -> tuple[list[Contribution], list[Contribution]]:
        """Return the contributions to mix, with weights that sum to 1, and those to record, in order of their sum."""
        if not self.running:
            kept = sorted(self._given, key=lambda each: each.donor)
            kept = usable(comm, kept, whose, self.travels, guard=self.guard)
            return kept, kept
        leave_out(comm, sorted(self._out))
        moments = {} if self._heaviest is None else of_optimizer(self._heaviest.tensors)
        means = [mean.finish() for mean in self._means.values()]
        return normalized([replace(mean, tensors=mean.tensors | moments) for mean in means]), self._given
