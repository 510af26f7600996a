"""Unmodified mpi4py programs on virtual ranks: each rank behaves like a separate process."""

from spawnsim.virtual.accounting import Cost
from spawnsim.virtual.scripts.script import Script, run_program

__all__ = ["Cost", "Script", "run_program"]
