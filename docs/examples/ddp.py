"""A script for torchrun, as it is: `spawnsim run ddp.py --ranks 64 --platform gigabit`."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.Generator().manual_seed(dist.get_rank())
for _ in range(5):
    x, y = torch.randn(32, 64, generator=data), torch.randint(0, 10, (32,), generator=data)
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
