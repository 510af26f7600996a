"""The real building: a call blocks the process (mpi4py, torch.distributed).

Nothing is imported here, so that `import spawnsim.real` loads neither MPI nor torch: `real.mpi` and
`real.torch` are the doors, `real.launch` starts ranks, `real.doctor` says what this machine can do.
"""
