"""What a real rank is, whatever carries its messages: its five own members, requests, watchdog, and its end.

Knows neither mpi4py nor torch.distributed; `real.mpi` and `real.torch` are built on it.
"""
