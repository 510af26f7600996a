"""The contract: what a communicator with mpi4py's names must do.

Each module is a theme, and each function with the arguments `(MPI, comm, ...)` a test that all ranks run together:
`MPI` is the namespace (`mpi4py.MPI`, for example), `comm` a fresh communicator. A test may ask for more by name:
`rank`, `size`, `left` and `right` (neighbours on a ring); `own(handle)`, which returns the handle and frees it when all
ranks are through with the test; and `call(comm, "Bcast", ...)`, which makes the test run three times: with blocking,
nonblocking and persistent calls. A helper differs from a test by its annotated result.

A test says in one sentence what it claims. It holds on any number of ranks unless it is marked with `needs`, and uses
nothing of spawnsim's own beyond its words for claims.
"""
