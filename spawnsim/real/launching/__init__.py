"""Starting a job, attending it until it ends, and telling what a machine can run.

Nothing is imported here: what runs in these rooms is no rank yet, and must load neither MPI nor torch.
"""
