"""Run a program on virtual ranks, or as one rank of a real job, and return its records.

`import spawnsim` loads this package (so that `spawnsim.run` is the function, although a package has the same name).
Nothing here therefore imports numpy, torch or MPI before a run begins.
"""

from spawnsim.run.program import Program, load, program
from spawnsim.run.result import Run
from spawnsim.run.virtual import run

__all__ = ["Program", "Run", "load", "program", "run"]
