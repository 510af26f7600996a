"""The records of a run: rows, events, a manifest, in memory and in a run folder.

Recorders are observers. Communicators receive them as a `Sink` (two methods), and no layer below imports this one.
Recording changes no clock and draws no random number.
"""

from spawnsim.record.folder import read_events, read_manifest, read_table, write
from spawnsim.record.journal import Journal, merge
from spawnsim.record.recorder import Event, Recorder, Sink, Thinned, ranks_named
from spawnsim.record.table import Table

__all__ = [
    "Event", "Journal", "Recorder", "Sink", "Table", "Thinned", "merge", "ranks_named", "read_events", "read_manifest",
    "read_table", "write",
]  # fmt: skip
