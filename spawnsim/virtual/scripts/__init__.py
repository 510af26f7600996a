"""Unmodified programs on virtual ranks: each rank behaves like a separate process."""

from spawnsim.virtual.accounting import Cost
from spawnsim.virtual.scripts.main_program import processes_as_ranks, run_main
from spawnsim.virtual.scripts.script import Script, run_program

__all__ = ["Cost", "Script", "processes_as_ranks", "run_main", "run_program"]
