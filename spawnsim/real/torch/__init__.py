"""A communicator over torch.distributed, for where there is no MPI: `world()` under torchrun, `wrap(group)`.

gloo has neither probes nor wildcard matching by tag, its `irecv` never says that it is complete, and a dropped `isend`
loses its message. So point-to-point messages and windows travel over one wire of our own framing, with one thread per
rank that receives all; collectives are torch's. `comm` is the face.
"""

from spawnsim.real.torch.comm import Options, TorchComm, close, guarded, namespace, world, wrap

__all__ = ["Options", "TorchComm", "close", "guarded", "namespace", "world", "wrap"]
