"""torch.distributed on virtual ranks: process groups, stores and the launch that an unmodified program finds.

Loaded when a program imports torch.distributed on ranks that are carried by threads. Everything travels as messages and
collectives of the simulator do, with the platform's algorithms, costs and NICs.
"""

MASTER = "127.0.0.1", 29500  # torchrun's store: never opened
