"""The contract suite: what a communicator with mpi4py's names must do, and runs of it on any of them.

From a checkout, `PYTHONPATH=tests python -m contract --backend virtual -n 4` runs all cases. With
`--backend module:function` they run on your own communicator.
"""
