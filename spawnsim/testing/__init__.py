"""Contract suites: hold any communicator with mpi4py's names to what MPI promises.

`python -m spawnsim.testing --backend virtual -n 4` runs all cases; `run_together(MPI, comm, find_cases(n))` runs them
inside a program of yours, on a communicator of yours.
"""

from spawnsim.testing.cases import Case, Outcome, every_case, find_cases, run_together
from spawnsim.testing.runners import BACKENDS, run_contract, run_real, run_virtual

__all__ = [
    "BACKENDS",
    "Case",
    "Outcome",
    "every_case",
    "find_cases",
    "run_contract",
    "run_real",
    "run_together",
    "run_virtual",
]
