"""`SpawnPolicy`: the call that all policies share, and the info that each call returns. No strategy, no message."""

from __future__ import annotations

import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch

from spawnsim.comm import Comm, as_comm
from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies.rules.cadence import Cadence, Every
from spawnsim.policies.state.layout import ModelAndOptimizer

logger = logging.getLogger("spawnsim.policies")

PACKAGE = str(Path(__file__).parents[1]) + os.sep
Info = dict[str, Any]
Result = tuple[torch.nn.Module, torch.optim.Optimizer, Info]


def blank_info(mode: str, check_every: int) -> Info:
    """Return the initial `info` mapping of a call: the values if nothing happens.

    averaged_this_iteration: whether weights were averaged in this call, or in the background since the last one.
    replacement_mode: "none" or the selection's name. is_replaced: whether this rank was replaced in this call.
    num_replacements_so_far: replacements of this rank. local_metric: as given, NaN if none. replacement_check_every:
    calls between two checks. global_min_metric, global_max_metric: extremes over the group, NaN if this call did not
    receive them. donors: number of donors. staleness: iterations between the oldest donor's snapshot and the donor
    metric that chose it. bytes: sent and received in this call. wait_s: seconds from request to arrival (asynchronous)
    or spent in the collective (synchronous).
    """
    return {
        "averaged_this_iteration": False,
        "replacement_mode": mode,
        "is_replaced": False,
        "num_replacements_so_far": 0,
        "local_metric": math.nan,
        "replacement_check_every": check_every,
        "global_min_metric": math.nan,
        "global_max_metric": math.nan,
        "donors": 0,
        "staleness": 0,
        "bytes": 0,
        "wait_s": 0.0,
    }


def as_metric(value: Any) -> float:
    """Return a metric as a number, also if it is a tensor that requires a gradient."""
    if isinstance(value, (str, bytes)):  # `float` would accept these too
        raise ParameterError(f"local_metric is a {type(value).__name__}, {value!r}: give one number")
    try:
        return float(value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch has raised each of the last two
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ParameterError(
            f"local_metric is a {type(value).__name__}{shape}: give one number, or a tensor of one element"
        ) from error


@dataclass(slots=True)
class _Use:
    """State of a policy that outlives it: whether it was shut down, and its latest iteration."""

    name: str
    cadence: Cadence
    needs_shutdown: bool
    last: int = 0
    open: bool = True

    def warnings(self) -> Iterator[str]:
        """Yield the warnings for the end of the program."""
        if self.needs_shutdown:
            yield (
                "shutdown() was not called, so messages and averages still under way at the end were "
                "dropped: call it after the training loop, or put the loop into `with policy:`"
            )
        if sentence := _never_due(self.cadence, self.last):
            yield sentence


# By rank (its clock). Neither communicator nor policy is stored: both reference the clock, so entries would never be
# freed.
_USED: WeakKeyDictionary[Any, list[_Use]] = WeakKeyDictionary()


def warn_of_the_open(comm: Comm) -> None:
    """Record a warning for each policy of this rank that was not shut down; called when its program ends.

    Args:
        comm: the communicator of the whole run.
    """
    for use in _USED.pop(comm.clock, ()):
        for sentence in use.warnings() if use.open else ():
            comm.record.event("warning", text=f"{use.name}: {sentence}")


class SpawnPolicy:
    """Decides, after each training step, whether and how models are averaged or replaced across ranks.

    Call it once per iteration, after `optimizer.step()`, and rebind its results: a replaced rank may get a new model
    and a new optimizer. `with policy:` shuts it down at the end.

    `promises` lists the properties that `spawnsim fuzz` checks in each call. "mean": an averaging keeps the mean of the
    group's models. "equal": the ranks that average in one iteration of a group end with the same trainable parameters,
    to the bit. "range": no element of a tensor exceeds the largest value that the tensor ever had on any rank.
    "progress": every rank averages again and again. `states` lists what can happen to a policy, for the coverage of
    `spawnsim fuzz`: "average" (`averaged_this_iteration`), and the kinds of events that it records.

    A custom policy implements `act`; docs/policies.md shows one. `acts_in_every_call` selects whether `act` is called
    in each call, for a policy that serves other ranks between its own turns, or only when the cadence is due.
    `idle_info` holds the keys of every `info` of the policy; a constructor adds its own keys to it. A subclass may also
    replace `__call__` as a whole, and then needs no `act`.

    Args:
        average_every: iterations from one turn to the next, at least 1.
        cadence: when the policy acts, in place of `average_every`.
        timing: a dictionary to fill with durations in seconds, by step; a new one by default.

    Raises:
        ParameterError: `average_every` is not a whole number of at least 1.
    """

    acts_in_every_call: ClassVar[bool] = False
    option_types: ClassVar[tuple[type, ...]] = ()  # their fields are further arguments of the constructor
    decided: ClassVar[tuple[str, ...]] = ()  # arguments of its bases that the class itself gives
    paper: ClassVar[str] = ""  # where the rule was published, for `spawnsim list policies`
    promises: tuple[str, ...] = ()
    states: ClassVar[tuple[str, ...]] = ("average",)
    _draining = False
    _warned = False  # of a result that was not rebound

    def __init__(
        self,
        average_every: int = 1,
        *,
        cadence: Cadence | None = None,
        timing: dict[str, list[float]] | None = None,
    ) -> None:
        self.cadence: Cadence = cadence if cadence is not None else Every(average_every)
        self.average_every = int(average_every)
        self.num_replacements = 0
        self.timing: dict[str, list[float]] = timing if timing is not None else {}
        self.idle_info = blank_info("none", self.average_every)
        self._group: Any = None
        self._comm: Comm | None = None
        self._last: tuple[int, Any] | None = None  # iteration and group of the latest call
        self._use: _Use | None = None
        self._replaced: list[Callable[[], Any]] = []  # objects that the latest call replaced: weak references

    def __call__(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: float | None = None,
        group: Any = None,
    ) -> Result:
        """Average or replace the model if the policy decides so.

        Args:
            iteration: iteration of this rank's training loop, from 0.
            model: the model after the latest optimizer step.
            optimizer: the model's optimizer.
            local_metric: this rank's metric, a number or a tensor of one element; None reports nothing.
            group: a communicator of spawnsim, mpi4py or torch.

        Returns:
            The model and the optimizer to continue with, and an info mapping (`blank_info` lists the keys).

        Raises:
            ParameterError: `model` is not a module, `local_metric` not a number, or `group` not a communicator.
            UsageError: `act` of a custom policy does not return a model and an optimizer, or returns a new model with
                an optimizer that does not train it; or its `__init__` lacks `super().__init__`.
        """
        if not isinstance(model, torch.nn.Module):
            raise ParameterError(
                f"model is a {type(model).__name__}: call policy(iteration, model, optimizer, local_metric=..., "
                "group=comm)"
            )
        try:
            info = self.idle_info.copy()
        except AttributeError:
            raise UsageError(
                f"{type(self).__name__}: its __init__ must call super().__init__(average_every)"
            ) from None
        if local_metric is not None:
            info["local_metric"] = local_metric = as_metric(local_metric)
        if self._replaced:
            self._warn_if_not_rebound(model, optimizer)
        if self._last is None:
            self._open(group)
        self._last = (iteration, group)
        if self._use is not None:
            self._use.last = iteration
        if self.acts_in_every_call or self.cadence.due(iteration):
            acted: object = self.act(iteration, model, optimizer, local_metric, self._bound(group), info)
            if not (isinstance(acted, tuple) and len(acted) == 2 and isinstance(acted[0], torch.nn.Module)):
                raise UsageError(
                    f"{type(self).__name__}.act returned {_shown(acted)}: end it with `return model, optimizer`"
                )
            if acted[0] is not model and not _trains(*acted):
                raise UsageError(
                    f"{type(self).__name__}.act returned a new model, but the returned optimizer lacks its "
                    "parameters, so nothing would train it: make a new optimizer with it, or change the model in "
                    "place"
                )
            if acted[0] is not model:
                self._replaced.append(ref(model))
            if acted[1] is not optimizer:
                self._replaced.append(ref(optimizer))
            model, optimizer = acted
        return model, optimizer, info

    def _open(self, group: Any) -> None:
        """Register the policy: at the end of the program a policy that was not shut down causes a warning."""
        clock = getattr(group, "clock", None)
        if self._use is None and clock is not None:
            # The base class's own `shutdown` drops nothing. A user's `shutdown` may not call super(), so it cannot be
            # tracked.
            ends = type(self).shutdown
            needed = ends is not SpawnPolicy.shutdown and ends.__module__.startswith("spawnsim.")
            self._use = _Use(type(self).__name__, self.cadence, needed)
            _USED.setdefault(clock, []).append(self._use)
        if self._use is not None:
            self._use.open = True

    def _closed(self) -> tuple[int, Any] | None:
        last, self._last = self._last, None
        if self._use is not None:
            self._use.open = False
        return last

    def _warn_if_not_rebound(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, if a call receives an object that an earlier call has replaced."""
        replaced, self._replaced = self._replaced, []
        given = {id(model), id(optimizer)}
        old = [each for each in (made() for made in replaced) if each is not None and id(each) in given]
        ignored = ["model" if isinstance(each, torch.nn.Module) else "optimizer" for each in old]
        if ignored and not self._warned:
            self._warned = True
            logger.warning(
                "%s: %s passes the %s that an earlier call has replaced, so training continues with the old state: "
                "rebind the results of each call, model, optimizer, info = policy(...)",
                type(self).__name__, _line_of_the_program(), " and the ".join(ignored),
            )  # fmt: skip

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        """Execute the policy's action in a call; `__call__` has checked its arguments.

        Args:
            iteration: as in the call.
            model: as in the call; to be changed in place, or replaced.
            optimizer: the model's optimizer.
            metric: the local metric as a number, None if the call has no metric.
            comm: the communicator of the call's group: the same object until another group is given.
            info: the mapping that the call returns, to be filled in.

        Returns:
            The model and the optimizer to continue with.

        Raises:
            NotImplementedError: the policy's class defines neither `act` nor its own `__call__`.
        """
        raise NotImplementedError(f"{type(self).__name__}: define act(), or __call__() as a whole")

    def _bound(self, group: Any) -> Comm:
        """Return the group's communicator, created once: wrapping a foreign one may be collective."""
        if self._comm is None or group is not self._group:
            self._group, self._comm = group, self.comm_of(group)
        return self._comm

    def comm_of(self, group: Any) -> Comm:
        """Return the communicator for the argument `group`; override it to give None a meaning.

        Args:
            group: a communicator of spawnsim, mpi4py or torch.

        Returns:
            The group itself, or a wrapper around it.

        Raises:
            ParameterError: the argument is not a communicator.
        """
        return as_comm(group)

    def shutdown(self) -> None:
        """Finish the work under way; warn if the policy was never due. May be called twice; its waits are bounded."""
        last = self._closed()
        if last is not None:
            self.warn_if_never_due(*last)

    def drain(self) -> None:
        """Complete exchanges with other ranks before a checkpoint, so that `state_dict()` contains the whole state.

        All ranks of the group call it at the same iteration, and continue: the next call creates the communicator's
        resources again. By default this is `shutdown` without its warnings, and then `load_state_dict` of the policy's
        own `state_dict`. So a policy that continues after a checkpoint, and a new one that loads it, have the same
        state. A policy whose `shutdown` is final overrides it.
        """
        lost = [name for name, value in vars(self).items() if _holds_arrays(value)]
        if lost and type(self).state_dict is SpawnPolicy.state_dict and self._comm is not None:
            names = ", ".join(lost)
            self.warn(
                self._comm, f"checkpoints do not save {names}: define state_dict() and load_state_dict()"
            )
        # Queues, requests and windows are not saved: they have no meaning in another process.
        self._draining = True
        try:
            self.shutdown()
        finally:
            self._draining = False
        self._group = self._comm = None
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to continue without a difference.

        Returns:
            Numbers, strings, None, lists and mappings of them, and tensors, by name.
        """
        return {"num_replacements": self.num_replacements}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint, before the first call of the policy or after `drain`.

        Args:
            state: the result of `state_dict`; tuples may have become lists.
        """
        self.num_replacements = self.idle_info["num_replacements_so_far"] = int(state["num_replacements"])

    def count_replacement(self) -> None:
        """Count a replacement of this rank; the `info` of later calls contains the new count."""
        self.num_replacements += 1
        self.idle_info["num_replacements_so_far"] = self.num_replacements

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def warn(self, group: Any, sentence: str, *, by: int = 0) -> None:
        """Record an event "warning", on one rank of the group only; it is added to `run.what["warnings"]`.

        Args:
            group: the communicator; if it is another package's, nothing is recorded.
            sentence: the warning; the policy's name is put in front.
            by: the rank that records it.
        """
        record = getattr(group, "record", None)
        if record is not None and not self._draining and group.Get_rank() == by:
            record.event("warning", text=f"{type(self).__name__}: {sentence}")

    def warn_if_never_due(self, last: int, group: Any) -> None:
        """Warn if the policy was never due, because `average_every` exceeds the run's last iteration `last`."""
        if sentence := _never_due(self.cadence, last):
            self.warn(group, sentence)

    def warn_if_all_lived(self, age_range: tuple[int, int], calls: int, group: Any) -> None:
        """Warn if no rank can have reached the age of replacement within `calls` calls."""
        if age_range[0] >= calls:
            self.warn(
                group, f"age_range={age_range} begins beyond the {calls} iterations: no rank was replaced"
            )

    def note(self, step: str, seconds: float) -> None:
        """Append a duration to `timing`, under the name of its step."""
        self.timing.setdefault(step, []).append(seconds)

    @classmethod
    def parameters(cls) -> list[str]:
        """Return the names of all arguments of the constructor, including the fields of option objects.

        Returns:
            The class's own names first, then its bases' names.
        """
        names: dict[str, None] = {}
        for kind in (each for each in cls.__mro__ if issubclass(each, SpawnPolicy)):
            taken = inspect.signature(kind).parameters.values()
            names |= dict.fromkeys(each.name for each in taken if each.kind is not each.VAR_KEYWORD)
            names |= dict.fromkeys(field.name for options in kind.option_types for field in fields(options))
        return [name for name in names if name not in cls.decided]

    @property
    def stats(self) -> dict[str, float]:
        """Counters of this rank."""
        return {"num_replacements": self.num_replacements}


def _never_due(cadence: Cadence, last: int) -> str:
    """Return a warning if the policy was never due up to the last iteration; else an empty string."""
    if not (isinstance(cadence, Every) and 0 < last < cadence.first):
        return ""
    due = (
        f"due in iteration 0 and then in {cadence.first}"
        if cadence.at_zero
        else f"first due in {cadence.first}"
    )
    return f"average_every={cadence.period} is {due}, and the last iteration was {last}"


def _line_of_the_program() -> str:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return "the program" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _shown(returned: object) -> str:
    if isinstance(returned, tuple):
        kinds = [type(each).__name__ for each in returned]
        return " and ".join(kinds) if len(kinds) == 2 else f"{len(kinds)} values"
    return "nothing" if returned is None else f"a {type(returned).__name__} alone"


def _trains(model: Any, optimizer: Any) -> bool:
    """Return whether an optimizer has a parameter of the model; true if it has no parameters or is not torch's."""
    held = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    own = {id(each) for each in model.parameters()}
    return not held or any(id(each) in own for each in held)


def _holds_arrays(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    members = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(each, (torch.Tensor, np.ndarray)) for each in members)
