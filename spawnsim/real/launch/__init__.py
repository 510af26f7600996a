"""Starting a job, supervising it until it ends, and telling what a machine can run.

Nothing is imported here: what runs in this package is no rank yet, and must load neither numpy nor MPI nor torch.
"""
