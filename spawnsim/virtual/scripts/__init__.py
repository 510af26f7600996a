"""Unmodified mpi4py programs on virtual ranks: what makes each rank look like a process of its own."""

from spawnsim.virtual.accounting import Cost
from spawnsim.virtual.scripts.script import Script, run_program

__all__ = ["Cost", "Script", "run_program"]
