"""The circumstances of a run on virtual ranks: number of ranks, platform, faults, seed.

One value is passed from the caller to the simulator. The constructor refuses values that are invalid for any
simulator; the simulator interprets texts such as a platform's name or a fault plan.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spawnsim.errors import ParameterError

DEADLINE_S = 30.0
LEAST_B = 10_000  # bytes of memory of an idle rank; docs/figures.md
MANY = 10_000  # number of ranks from which memory is checked
COLUMNAR = (
    "give fewer ranks, or time the policy with `spawnsim columnar`, which holds ranks as rows of arrays"
)


@dataclass(frozen=True)
class Scenario:
    """The circumstances of a run on virtual ranks, besides the program itself.

    Attributes:
        ranks: number of virtual ranks, at least 1.
        platform: name, TOML file or object that describes the network; None: the default platform.
        stragglers: text such as "lognormal:0.3", or an object; None: all ranks are equally fast.
        faults: a fault plan as text, file or object, or None.
        seed: seed of every random stream of the run, at least 0.
        compute: the cost of computing if the program states nothing: seconds, text such as "5 ms", a recorded run's
            folder, or an object; for an unmodified program the time between two calls, see `run_program`.
        eager: whether each `spawnsim.TrainingStep` is executed alone, in its rank's turn, not together with other
            ranks' steps.
        deadline_s: virtual seconds that one call may wait before it ends in `Timeout`; `math.inf`: without limit.
        ties: the order of ranks that act at the same time: "fifo" (by their numbers), "reverse", "random:SEED".
        sums: the order in which communicators add floats: "mpi", or "gloo", which gives the bits of the torch backend.
        check_steps: whether each `TrainingStep` and `Evaluation` is compared with the same call executed alone.
        races: whether a race of accesses to exposed memory is an error, `DataRace`, at the end of the run.

    Raises:
        ParameterError: a number out of its range, or more ranks than this machine's memory can hold.
    """

    ranks: int
    platform: Any = None
    stragglers: Any = None
    faults: Any = None
    seed: int = 0
    compute: Any = None
    deadline_s: float = DEADLINE_S
    eager: bool = False
    ties: str = "fifo"
    sums: str = "mpi"
    check_steps: bool = False
    races: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParameterError(f"{name}={value!r}: give an integer of at least {least}")
        # Checked here because the operating system would not refuse: it kills the process once memory is exhausted.
        if self.ranks >= MANY and self.ranks * LEAST_B > available_B():
            raise ParameterError(
                f"ranks={self.ranks:,}: each takes about {LEAST_B / 1e3:g} kB without its own data, "
                f"{self.ranks * LEAST_B / 1e9:,.0f} GB in all, and {available_B() / 1e9:,.1f} GB are available; "
                f"{COLUMNAR}"
            )
        if not self.deadline_s > 0:
            raise ParameterError(
                f"deadline_s={self.deadline_s!r}: give seconds above 0; math.inf means no limit"
            )

    def described(self) -> dict[str, Any]:
        """Return the fields by name, as run.json keeps them: an infinite deadline is None, as JSON has no infinity."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"deadline_s": None if math.isinf(self.deadline_s) else self.deadline_s}


def available_B() -> float:
    """Return the bytes of memory that this process may still use: in the machine, and in its control groups."""
    left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError):  # macOS has no such file
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left = int(line.split()[1]) * 1024
    return min([left, *map(_left_in_group, _control_groups())])


def _control_groups() -> list[Path]:
    """Return the folders of the control groups that may limit this process's memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers in ("", "memory"):  # version 2, and 1
            root = Path("/sys/fs/cgroup", controllers)
            found += [root, root / path.strip("/")]  # in a container the path is one outside of it
    return found


def _left_in_group(group: Path) -> float:
    """Return the bytes that a control group leaves; inf without a limit. Inactive cached files count as free."""
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        with suppress(OSError, ValueError):  # "max": no limit
            left = int((group / limit).read_text()) - int((group / used).read_text())
            stat = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
            return max(left + int(stat.get("total_inactive_file", stat.get("inactive_file", 0))), 0)
    return math.inf
