"""Starting a job, supervising it until it ends, and telling what a machine can run.

Nothing is imported here: a launcher is not a rank, and must load neither numpy nor MPI nor torch.
"""
