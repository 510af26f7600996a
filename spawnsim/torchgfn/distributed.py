"""The names of torchgfn's `gfn.utils.distributed`, on every backend; and its reports of times and load imbalance.

If a function takes `group`, ranks are ranks *of that group*, also `src` and `dst_rank`; without one the group is the
world of the job (`spawnsim.comm.backends`). `backend` selects that world ("mpi" or "torch"); a given group determines
its own backend, and virtual ranks have only one world. Both backends send the same bytes.

Reports return data, and log one table. Their timings are one dictionary per rank, {"step": [seconds of iteration 0, 1,
…]} or {"step": seconds}.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spawnsim.errors import ParameterError
from spawnsim.torchgfn.communication import (
    AsyncSendHandle,
    Group,
    _first_env,
    _get_MPI,
    all_gather,
    all_reduce,
    average_gradients,
    average_models,
    barrier,
    broadcast,
    default_backend,
    gather_distributed_data,
    get_rank,
    get_world_size,
    isend,
    recv,
    send,
)
from spawnsim.torchgfn.contexts import (
    DistributedContext,
    DistributedContextMPI4Py,
    RankLayout,
    arithmetic_layout,
    host_layout,
    initialize_distributed_compute,
    initialize_distributed_compute_mpi4py,
)
from spawnsim.units import text_table

__all__ = [
    "AsyncSendHandle",
    "DistributedContext",
    "DistributedContextMPI4Py",
    "Group",
    "Imbalance",
    "RankLayout",
    "TimeInfo",
    "_first_env",
    "_get_MPI",
    "all_gather",
    "all_reduce",
    "arithmetic_layout",
    "average_gradients",
    "average_models",
    "barrier",
    "broadcast",
    "default_backend",
    "gather_distributed_data",
    "get_rank",
    "get_world_size",
    "host_layout",
    "initialize_distributed_compute",
    "initialize_distributed_compute_mpi4py",
    "isend",
    "logger",
    "recv",
    "report_load_imbalance",
    "report_time_info",
    "send",
]


logger = logging.getLogger("spawnsim.torchgfn.distributed")

Timings = Sequence[Mapping[str, "Sequence[float] | float"]]


@dataclass(frozen=True, slots=True)
class Imbalance:
    """One step over all iterations: seconds of work, and seconds for which an average rank waits for the slowest.

    `ranks` is the number of ranks that measured the step, `iterations` their largest number of iterations. Each
    iteration counts only the ranks that measured it.
    """

    step: str
    useful_s: float
    waiting_s: float
    ranks: int
    iterations: int

    @property
    def efficiency(self) -> float:
        """Useful share of the time, in [0, 1]."""
        total = self.useful_s + self.waiting_s
        return self.useful_s / total if total > 0 else 1.0


@dataclass(frozen=True, slots=True)
class TimeInfo:
    """Seconds per step. `per_rank[r][step]` is (mean, total); `longest_s` and `mean_s` are over the ranks' totals."""

    per_rank: tuple[dict[str, tuple[float, float]], ...]
    longest_s: dict[str, float]
    mean_s: dict[str, float]


def report_load_imbalance(all_timing_dict: Timings, world_size: int) -> list[Imbalance]:
    """Return and log, for each step of any rank, two sums over iterations: of the mean, and of maximum minus mean.

    Raises:
        ParameterError: fewer dictionaries than ranks.
    """
    steps = _steps(all_timing_dict, world_size)
    rows = [_imbalance(step, by_rank) for step, by_rank in steps.items()]
    shown = [
        (row.step, f"{row.useful_s:.4f}", f"{row.waiting_s:.4f}", f"{row.ranks}/{world_size}") for row in rows
    ]
    logger.info("load imbalance\n%s", text_table(("step", "useful s", "waiting s", "ranks"), shown))
    return rows


def _imbalance(step: str, by_rank: Mapping[int, Sequence[float]]) -> Imbalance:
    iterations = max(len(times) for times in by_rank.values())
    useful_s = waiting_s = 0.0
    for iteration in range(iterations):
        # Ranks may have completed different numbers of iterations: each iteration counts the ranks that measured it.
        seconds = [times[iteration] for times in by_rank.values() if iteration < len(times)]
        mean_s = sum(seconds) / len(seconds)
        useful_s, waiting_s = useful_s + mean_s, waiting_s + max(seconds) - mean_s
    return Imbalance(step, useful_s, waiting_s, len(by_rank), iterations)


def report_time_info(all_timing_dict: Timings, world_size: int) -> TimeInfo:
    """Return and log each rank's mean and total seconds per step, and the longest and mean total over all ranks.

    Raises:
        ParameterError: fewer dictionaries than ranks.
    """
    totals = {
        step: {rank: sum(times) for rank, times in by_rank.items()}
        for step, by_rank in _steps(all_timing_dict, world_size).items()
    }
    info = TimeInfo(
        tuple(_of_rank(timings) for timings in all_timing_dict[:world_size]),
        {step: max(by_rank.values()) for step, by_rank in totals.items()},
        {step: sum(by_rank.values()) / len(by_rank) for step, by_rank in totals.items()},
    )
    logger.info("seconds\n%s", text_table(("rank", "step", "mean s", "total s"), _lines(info), left=2))
    return info


def _of_rank(timings: Mapping[str, Sequence[float] | float]) -> dict[str, tuple[float, float]]:
    listed = {step: _listed(times) for step, times in timings.items()}
    return {step: (sum(times) / max(len(times), 1), sum(times)) for step, times in listed.items()}


def _lines(info: TimeInfo) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = [
        (str(rank), step, f"{mean_s:.4f}", f"{total_s:.4f}")
        for rank, steps in enumerate(info.per_rank)
        for step, (mean_s, total_s) in steps.items()
    ]
    lines += [("longest", step, "", f"{seconds:.4f}") for step, seconds in info.longest_s.items()]
    return lines + [("mean", step, "", f"{seconds:.4f}") for step, seconds in info.mean_s.items()]


def _steps(timings: Timings, world_size: int) -> dict[str, dict[int, list[float]]]:
    """Return step → rank → seconds, for all steps in the order of first appearance, without empty lists."""
    if len(timings) < world_size:
        raise ParameterError(
            f"{len(timings)} dictionaries for world_size={world_size}: give one for each rank"
        )
    steps: dict[str, dict[int, list[float]]] = {}
    for rank, of_rank in enumerate(timings[:world_size]):
        for step, times in of_rank.items():
            if listed := _listed(times):
                steps.setdefault(step, {})[rank] = listed
    return steps


def _listed(times: Sequence[float] | float) -> list[float]:
    return [float(times)] if isinstance(times, (int, float)) else [float(each) for each in times]
