"""Running a main on virtual ranks in tests, with rows in a list."""

from spawnsim.models.network import Hockney, Switch
from spawnsim.models.platform import Platform
from spawnsim.scenario import Scenario
from spawnsim.virtual import simulate

LATENCY, BANDWIDTH, OVERHEAD = 1e-3, 1e6, 1e-6


def platform(eager_bytes=1 << 30, progress="poll", contention="serial"):
    """Return a single switch with α = 1 ms and 1 MB/s, so that times are easy to read."""
    network = Switch(
        Hockney(LATENCY, BANDWIDTH), call_overhead_s=OVERHEAD, eager_bytes=eager_bytes, contention=contention
    )
    return Platform("test", network, progress=progress)


class Notes:
    """A recorder that keeps rows in a list."""

    def __init__(self):
        self.rows, self.events = [], []

    def row(self, rank, time_s, values):
        self.rows.append((rank, time_s, values))

    def event(self, rank, time_s, kind, fields):
        self.events.append((rank, time_s, kind, fields))

    def column(self, name):
        return {
            rank: values[name]
            for rank, _, values in sorted(self.rows, key=lambda row: row[0])
            if name in values
        }


def run(main, ranks, **how):
    """Run and return (totals, notes)."""
    notes = Notes()
    hooks = {
        name: how.pop(name) for name in ("progress", "on_error", "on_note", "trace", "carrier") if name in how
    }
    scenario = Scenario(ranks, **{"platform": platform()} | how)
    return simulate(main, scenario, recorder=notes, **hooks), notes
