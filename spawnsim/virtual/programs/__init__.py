"""Unmodified mpi4py programs on virtual ranks: what makes each rank look like a process of its own."""

from spawnsim.virtual.programs.carrier import Script, run_program
from spawnsim.virtual.programs.tolls import Cost

__all__ = ["Cost", "Script", "run_program"]
