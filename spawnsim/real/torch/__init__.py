"""A communicator over torch.distributed, for where there is no MPI: `world()` under torchrun, `wrap(group)`.

gloo has neither probes nor wildcard matching by tag, its `irecv` never says that it is complete, and a dropped `isend`
loses its message. So there is a wire of our own framing (`runtime`), with one thread per rank that receives all, from
which `real.base` derives messages and windows; collectives are torch's where it has them. `comm` is the face.
"""

from spawnsim.real.torch.comm import Options, TorchComm, close, guarded, namespace, world, wrap

__all__ = ["Options", "TorchComm", "close", "guarded", "namespace", "world", "wrap"]
