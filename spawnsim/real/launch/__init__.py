"""Starting a job, supervising it until it ends, and reporting the capabilities of a machine.

This package imports nothing: a launcher is not a rank, and must load neither numpy nor MPI nor torch.
"""
