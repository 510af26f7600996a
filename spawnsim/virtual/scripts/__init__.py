"""Unmodified programs on virtual ranks: each rank behaves like a separate process."""

from spawnsim.virtual.accounting import Cost
from spawnsim.virtual.scripts.main_program import run_main
from spawnsim.virtual.scripts.script import Script, run_program

__all__ = ["Cost", "Script", "run_main", "run_program"]
