"""The names of torchgfn's `spawn_policy` module and of its `gfn.utils.distributed` toolkit, on every backend."""
