"""The names of torchgfn's `spawn_policy` module, with its constructors, calls and defaults.

Every name here is one of `spawnsim.policies`, which documents further options. `group` may be a spawnsim `Comm`, a raw
`mpi4py.MPI.Comm` or a `torch.distributed` group; the default is the world of the job, as in the originals.

Three defaults are the originals'; `spawnsim.policies` has other ones, which suit large groups and models. (1) "mean"
and "weighted_mean" average all survivors (there: at most 8), so a round's traffic grows with the square of the group
(its memory does not: snapshots are averaged on arrival): use `donors=8` from some dozens of ranks on. (2) The one-sided
policies use half of the group (there: at most 8). (3) They publish their model in every call (there: at the cadence),
in four slots so that readers are not overtaken: this costs a pass over the model each time, and four times its memory;
`windows=WindowOptions("flat", publish_every=10)` publishes it in every tenth call, in two slots.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from spawnsim import policies
from spawnsim.comm import Comm, as_comm
from spawnsim.comm.backends import world
from spawnsim.policies import WindowOptions
from spawnsim.policies.rules.selection import Report, WorstRatio
from spawnsim.units import text_table

if TYPE_CHECKING:
    import torch

    from spawnsim.policies.base import Result
    from spawnsim.policies.exchange.replacement import ModelBuilder
    from spawnsim.policies.exchange.window_set import WindowLayout

logger = logging.getLogger(__name__)


class _Printing(policies.SpawnPolicy):
    """Prints its times and counters, and logs them as well."""

    captured: Mapping[str, int] = MappingProxyType({})

    def capture_comm(self, name: str, size: int) -> None:
        """Store the size of a communicator, for `print_stats`."""
        self.captured = {**self.captured, name: int(size)}

    def print_time(self) -> dict[str, dict[str, float]]:
        """Print the duration of each step; return its "calls", "total_s" and "mean_s"."""
        summary = {
            step: {"calls": len(each), "total_s": sum(each), "mean_s": sum(each) / len(each)}
            for step, each in self.timing.items()
            if each
        }
        rows = [(step, *(f"{value:.6g}" for value in row.values())) for step, row in summary.items()]
        _print_table(f"{type(self).__name__}: time", ("step", "calls", "total_s", "mean_s"), rows)
        return summary

    def print_stats(self) -> dict[str, float]:
        """Print and return `stats`, and the stored sizes of communicators."""
        stats = self.stats | {f"comm/{name}": float(size) for name, size in self.captured.items()}
        rows = [(name, f"{value:.6g}") for name, value in stats.items()]
        _print_table(f"{type(self).__name__}: counts", ("count", "value"), rows)
        return stats


def _print_table(title: str, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    table = f"{title}\n{text_table(head, rows)}"
    logger.info("%s", table)
    print(table)  # noqa: T201  print_time and print_stats are called for it


class SpawnPolicy(_Printing, abc.ABC):
    """The original's base class: abstract; subclasses define `__call__` (in `spawnsim.SpawnPolicy`: `act`)."""

    @abc.abstractmethod
    def __call__(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: float | None = None,
        group: Any = None,
    ) -> Result:
        """Average or replace if the policy decides so; return the model and optimizer to continue with, and `info`."""


@SpawnPolicy.register  # not a subclass, which would inherit the abstract call
class _OnTheWorld(_Printing):
    """Uses the world of the job if no group is given."""

    def comm_of(self, group: Any) -> Comm:
        """Return the communicator of `group`; for None, of all ranks: on a virtual rank, of its world."""
        return world() if group is None else as_comm(group)


class AverageAllPolicy(_OnTheWorld, policies.AverageAllPolicy):
    """Model averaging over all ranks; see `spawnsim.policies.AverageAllPolicy`."""


class AverageAllPolicympi4py(AverageAllPolicy):
    """`AverageAllPolicy`, which is the same on MPI, torch.distributed and virtual ranks."""


class AsyncSelectiveAveragingPolicy(_OnTheWorld, policies.AsyncSelectiveAveragingPolicy):
    """Asynchronous selective averaging by messages; see `spawnsim.policies.AsyncSelectiveAveragingPolicy`."""

    most_donors = None


class _OneSided(_OnTheWorld, policies.OneSidedSelectiveAveragingPolicy):
    """The originals' call, with `expose_params` before `group`, and their attributes.

    `debug_mode`: log each replacement of this rank, with its donors and the age of their snapshots.
    """

    most_donors = None
    debug_mode = False
    averaging_ranks = 0  # donors of the latest replacement

    @property
    def train_comm_group(self) -> Any:
        return self._group

    @property
    def myrank(self) -> int:
        return self.comm_of(self._group).Get_rank()

    @property
    def comm_size(self) -> int:
        return self.comm_of(self._group).Get_size()

    def __call__(  # type: ignore[override]
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        local_metric: float | None = None,
        expose_params: bool = True,
        group: Any = None,
    ) -> Result:
        """Take over other ranks' weights if this rank is due; `expose_params=False` publishes nothing in this call."""
        exposed = {"expose_params": expose_params}
        model, optimizer, info = super().__call__(iteration, model, optimizer, local_metric, group, **exposed)
        if info["is_replaced"]:
            self.averaging_ranks = info["donors"]
            if self.debug_mode:
                values = (self.myrank, iteration, info["donors"], info["staleness"])
                logger.info(
                    "rank %d, iteration %d: replaced by the models of %d, %d iterations old at most", *values
                )
        return model, optimizer, info

    def is_agent_dying(
        self,
        local_metric: float,
        threshold_metric: float,
        check_policy: int = 0,
        *,
        check_agent: int | None = None,
    ) -> bool:
        """Return whether this rank is to be replaced; `check_agent` is another name of `check_policy`."""
        return super().is_agent_dying(
            local_metric, threshold_metric, check_policy if check_agent is None else check_agent
        )


class AsyncSelectiveAveragingPolicympi4pyFast(_OneSided):
    """One-sided selective averaging over one flat window, for any mix of dtypes."""

    # fmt: off
    def __init__(
        self, model_builder: ModelBuilder, model: torch.nn.Module, average_every: int,
        threshold_metric: float = 0.0, replacement_ratio: float = 0.2, averaging_strategy: str = "mean",
        momentum: float = 0.0, age_range: tuple[int, int] = (50, 150), replacement_mode: str = "age",
        group: Any = None, **more: Any,
    ) -> None:
        # fmt: on
        super().__init__(
            model_builder, model, average_every, threshold_metric, replacement_ratio, averaging_strategy, momentum,
            age_range, replacement_mode, group, **{"windows": _published_in_each("flat"), **more},
        )  # fmt: skip


class AsyncSelectiveAveragingPolicympi4pyGeneral(_OneSided):
    """One-sided selective averaging over one window per tensor."""

    # fmt: off
    def __init__(
        self, model_builder: ModelBuilder, model: torch.nn.Module, average_every: int,
        threshold_metric: float = 0.0, replacement_ratio: float = 0.2, averaging_strategy: str = "mean",
        momentum: float = 0.0, poll_interval_s: float = 0.01, age_range: tuple[int, int] = (50, 150),
        replacement_mode: str = "age", group: Any = None, **more: Any,
    ) -> None:
        # fmt: on
        super().__init__(
            model_builder, model, average_every, threshold_metric, replacement_ratio, averaging_strategy, momentum,
            age_range, replacement_mode, group, **{"windows": _published_in_each("per_parameter"), **more},
        )  # fmt: skip
        self.poll_interval_s = float(poll_interval_s)  # unused: one-sided access does not poll


def _published_in_each(layout: WindowLayout) -> WindowOptions:
    """Return windows that publish the model in each call, like the originals, without overtaking readers."""
    return WindowOptions(layout, publish_every=1, slots=4)


def _compute_worst_ranks_by_ratio(metrics: Sequence[float], replacement_ratio: float) -> set[int]:
    reports = [Report(rank, float(metric)) for rank, metric in enumerate(metrics)]
    return set(WorstRatio(replacement_ratio)(reports))


__all__ = [
    "AsyncSelectiveAveragingPolicy",
    "AsyncSelectiveAveragingPolicympi4pyFast",
    "AsyncSelectiveAveragingPolicympi4pyGeneral",
    "AverageAllPolicy",
    "AverageAllPolicympi4py",
    "SpawnPolicy",
    "_compute_worst_ranks_by_ratio",
    "logger",
]
