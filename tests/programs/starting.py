"""A program of the toolkit that nobody but a launcher has started: mpiexec, torchrun, `spawnsim run`, or variables."""

import sys

import pytest
import torch
import torch.distributed as dist

from spawnsim.comm.backends import virtual_world
from spawnsim.errors import UnsupportedError
from spawnsim.torchgfn import distributed as toolkit

size = int(sys.argv[1])
assert not dist.is_initialized()
for _ in range(2):
    place = toolkit.initialize_distributed_compute("gloo", 0, 1)
    assert (place.world_size, dist.get_world_size(), dist.get_rank()) == (size, size, place.my_rank)
    model = torch.nn.Linear(200, 200)
    model.weight.data.fill_(float(place.my_rank))
    ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=place.get_train_group("torch"))
    assert ddp.module.weight[0, 0].item() == 0.0  # as rank 0 had it
    model.weight.data.fill_(float(place.my_rank))
    toolkit.average_models(model, place.train_global_group)
    assert model.weight[0, 0].item() == (size - 1) / 2
    place.cleanup()
    assert not dist.is_initialized()
for backend in ("ccl", "nccl") if virtual_world() is None else ():  # virtual ranks take any
    with pytest.raises(UnsupportedError, match=f"no backend '{backend}' here"):
        toolkit.initialize_distributed_compute(backend, 0, 1)
print("done", flush=True)
