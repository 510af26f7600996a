"""torch.distributed on virtual ranks: process groups, stores and the launch environment for unmodified programs.

Loaded when a program imports torch.distributed on ranks that threads carry. All data travels as messages and
collectives of the simulator, with the platform's algorithms, costs and NICs.
"""

MASTER = "127.0.0.1", 29500  # torchrun's store: never opened
CUDA = "torch.cuda"  # attachment of a rank: its GPUs in name, with --cuda-as-cpu
