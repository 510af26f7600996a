"""torchgfn's names: its `spawn_policy` module, and its toolkit `gfn.utils.distributed`, on every backend."""
