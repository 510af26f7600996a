"""The program's side of columns: the models that it builds, functions that may raise, and its generators.

Error messages name the function or rank at fault. Knows which models rows can hold; must not know how models train or
are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from spawnsim.columnar.rows import Plan, Rows
from spawnsim.columnar.shards import Shards
from spawnsim.errors import ParameterError, ProgramError, SpawnsimError, UnsupportedError, UsageError
from spawnsim.random import WORLD, GlobalStates, Streams, global_states, seeded, set_global_states
from spawnsim.scenario import available_B
from spawnsim.training.grouping import Ungroupable, key_of
from spawnsim.training.seats import Seat


# ---------------------------------------------------------------------------------------------------------- models
def built(made: Any, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the result of `build`; raise `UsageError` unless it is a model and its optimizer."""
    model, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (None, None)
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"columnar: build(rng) of rank {rank} returned {in_words(made)}: return (model, optimizer)"
        )
    return model, optimizer


def seat_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Seat:
    """Return the seat of a model; raise `UnsupportedError` if it has no form over columns."""
    try:
        seat = Seat(model, optimizer)
        if seat.rule is None:
            raise Ungroupable(
                f"its optimizer is {type(optimizer).__name__}, or has its own hooks or settings"
            )
        if optimizer.state:
            raise Ungroupable("its optimizer has made steps already")
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise Ungroupable(
                "a scheduler changes its learning rate: over columns use Training(schedule=...)"
            )
    except Ungroupable as why:
        raise UnsupportedError(
            f"columnar: the {type(model).__name__} of rank {rank} has no form over columns: {why}; or run it on "
            "virtual ranks"
        ) from why
    return seat


def kind_of(seat: Seat) -> Any:
    """Return a key that is equal for models that can train together."""
    assert seat.optimizer is not None
    assert seat.rule is not None
    settings = tuple([seat.rule.settings(group) for group in seat.optimizer.param_groups])
    return seat.key, settings, tuple(key_of(seat.buffer(number)) for number in range(len(seat.buffers)))


def rows_of(seat: Seat, shards: Sequence[Shards]) -> Rows:
    """Return this process's rows for the models of some experiments, with the structure and optimizer of a seat."""
    model, optimizer, rule = seat.module(), seat.optimizer, seat.rule
    assert optimizer is not None
    assert rule is not None
    plan, like = Plan(model, optimizer), seat.parameters[0]
    states = max((rule.states(rule.settings(group)) for group in optimizer.param_groups), key=len)
    rows, sharing = sum(each.count for each in shards), shards[0].on_node if like.device.type == "cpu" else 1
    nbytes, room = rows * plan.width * like.element_size() * (1 + len(states)), _room_B(like.device)
    if nbytes * sharing > room:
        raise ParameterError(
            f"ranks={sum(each.ranks for each in shards):,}: weights and optimizers of {type(model).__name__} take "
            f"{nbytes / 1e9:,.0f} GB{f' in each of {sharing} processes' * (sharing > 1)}; this "
            f"{'machine' if like.device.type == 'cpu' else 'GPU'} has {room / 1e9:,.0f} GB left"
        )
    return Rows(plan, like, rule, states=states, ranks=rows)


def _room_B(device: torch.device) -> float:
    if device.type == "cpu":
        return available_B()
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


def version(tensor: Tensor) -> int:
    """Return how often torch has changed a tensor's memory."""
    return 0 if tensor.is_inference() else tensor._version


# ---------------------------------------------------------------------------------------------------------- errors
class errors_of:  # noqa: N801 - used like a function
    """Convert errors raised by a function of the program to `ProgramError`, with function, rank and iteration.

    A class, since every batch of every rank is drawn within one: a generator takes four times as long.

    Args:
        function: function of the program.
        rank: rank for which it is called; may be set again.
        iteration: current iteration; None: before the first.
    """

    __slots__ = ("_function", "_iteration", "rank")

    def __init__(self, function: Any, rank: int = 0, iteration: int | None = None) -> None:
        self._function, self.rank, self._iteration = function, rank, iteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, SpawnsimError):
            return
        when = "" if self._iteration is None else f" in iteration {self._iteration}"
        raise ProgramError(
            f"columnar: {name_of(self._function)} raised {type(error).__name__} for rank {self.rank}{when}: {error}"
        ) from error


@contextmanager
def refused(name: str) -> Iterator[None]:
    """Convert errors of vmap to `UnsupportedError`."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # vmap refuses functions with many classes of errors
        text = f"{error}".splitlines()[0].partition(". ")[0]
        raise UnsupportedError(
            f"columnar: {name} cannot be computed for many models at once: {type(error).__name__}: {text}; run it on "
            "virtual ranks, where such models step alone"
        ) from error


def name_of(function: Any) -> str:
    """Return the name of a function for messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def in_words(value: Any) -> str:
    """Return a description of a value for messages."""
    if isinstance(value, Tensor):
        constant = "" if value.requires_grad else ", which depends on no weight"
        return f"a tensor of shape {tuple(value.shape)}{constant}"
    return f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------------------ generators
@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the global generators afterwards."""
    states = global_states(torch)
    try:
        yield
    finally:
        set_global_states(torch, states)


class Generators:
    """Global generators of each chunk of ranks, which continue from their last state when they are installed again."""

    def __init__(self, seed: int) -> None:
        self._seed, self._states = seed, dict[int, GlobalStates]()

    @contextmanager
    def of(self, chunk: int) -> Iterator[None]:
        """Install those of a chunk as the generators of the process for a block."""
        with generators_kept():
            if chunk in self._states:
                set_global_states(torch, self._states[chunk])
                yield
            else:
                streams = Streams(self._seed, WORLD)
                with seeded(Streams(streams.seed(f"columnar.chunk{chunk}"), WORLD) if chunk else streams):
                    yield
            self._states[chunk] = global_states(torch)
