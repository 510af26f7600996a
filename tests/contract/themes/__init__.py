"""The contract: what a communicator with mpi4py's names must do.

Each module is a theme, each public function a test `(MPI, comm)` that all ranks run together: `MPI` is the namespace
(`mpi4py.MPI` or its like), `comm` a fresh communicator. A test says in one sentence what it claims. It holds on any
number of ranks unless it is marked with `needs`, and uses nothing of spawnsim's own beyond its words for claims.
"""
