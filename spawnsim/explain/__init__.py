"""Explain a hang of real ranks from their dumps, in the form of the report on a deadlock of virtual ranks.

`reading` reads the files, `recorder` compares the calls of flight recorders, `stacks` finds calls in stacks, `report`
prints the waits, as a cycle or a table.
"""

from spawnsim.explain.report import explain

__all__ = ["explain"]
