"""A communicator over torch.distributed, for systems without MPI: `world()` under torchrun, `wrap(group)`.

gloo offers neither probes nor wildcard matching by tag, its `irecv` never reports completion, and a dropped `isend`
loses its message. So this package has its own wire (`runtime.GlooWire`), on which one thread per rank receives all
messages. `real.base` derives messages and windows from it; collectives are torch's where torch has them. `comm` is the
public interface.
"""

from spawnsim.real.torch.comm import Options, TorchComm, close, guarded, namespace, world, wrap

__all__ = ["Options", "TorchComm", "close", "guarded", "namespace", "world", "wrap"]
