"""torchft's own LocalSGD, DiLoCo and DistributedDataParallel on virtual replicas that die and return."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from spawnsim.errors import RankError, Timeout, UnsupportedError

HEAD = """
import os, sys, time
from datetime import timedelta
import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD
from torchft.coordination import LighthouseServer
from torchft.manager import WorldSizeMode
R, N = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICA_GROUPS"])
AGAIN = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""
TRAINING = """
torch.manual_seed(R + 1000 * AGAIN)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
inner = torch.optim.SGD(model.parameters(), lr=0.05)
outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
def save():
    return {"model": model.state_dict(), "inner": inner.state_dict()}
def load(state):
    model.load_state_dict(state["model"])
    inner.load_state_dict(state["inner"])
manager = Manager(
    pg=ProcessGroupGloo(), load_state_dict=load, state_dict=save, min_replica_size=2, replica_id=f"train_{R}",
    use_async_quorum=sys.argv[1] == "ddp", max_retries=20,
)
time.sleep(0.01)  # until all are known
data = torch.Generator().manual_seed(R)
def loss(model):
    x = torch.randn(8, 4, generator=data)
    time.sleep(0.1 * (1 + 0.1 * (R % 3)))
    return (model(x)[:, 0] - x @ torch.tensor([1.0, -2.0, 3.0, 0.5])).square().mean()
if sys.argv[1] == "ddp":
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while manager.current_step() < int(sys.argv[2]):
        optimizer.zero_grad()
        loss(wrapped).backward()
        optimizer.step()
else:
    how = {"diloco": lambda: DiLoCo(manager, [model], inner, outer, sync_every=3),
           "streaming": lambda: DiLoCo(manager, [model[0], model[2]], inner, [torch.optim.SGD(part.parameters(), lr=0.7)
                for part in (model[0], model[2])], sync_every=4, use_bucketization=True, fragment_sync_delay=1),
           "local": lambda: LocalSGD(manager, model, inner, sync_every=3)}
    with how[sys.argv[1]]() as wrap:
        while manager.current_step() < int(sys.argv[2]):
            inner.zero_grad()
            loss(model).backward()
            inner.step()
manager.shutdown()
weights = list(model.parameters())
if sys.argv[1] == "streaming":  # between two turns of a fragment each replica trains its own
    weights = [each for fragment in wrap._fragments for each in fragment.original_parameters.values()]
print("end", manager.current_step(), sum(each.double().abs().sum().item() for each in weights))
"""


@pytest.fixture
def program(torch_program: Any) -> Any:
    """Run a text behind HEAD; return the run and its lines, sorted."""
    return partial(torch_program, HEAD)


FAULTS = (
    "crash:7@0.75s; restart:7@3s; crash:0@1.05s; restart:0@8s; crash:3,10@1.3s; crash:9@7s; restart:9@7.2s"
)


@pytest.mark.parametrize(
    ("way", "replicas", "steps"),
    [("diloco", 64, 6), ("local", 64, 6), ("streaming", 12, 14), ("ddp", 12, 20)],
)
def test_replicas_train_while_some_die_and_return(way: str, replicas: int, steps: int, program: Any) -> None:
    """All who live to the end have the same weights; the dead are given up after their last heartbeats."""
    found, lines = program(TRAINING, replicas, way, str(steps), faults=FAULTS)
    assert len(lines) == replicas - 2
    assert len(set(lines)) == 1
    quorums = [event for event in found.events if event["kind"] == "quorum"]
    sizes = [event["replicas"] for event in quorums]
    assert (sizes[0], sizes[-1]) == (replicas, replicas - 2)
    assert min(sizes) < replicas - 2
    assert (
        5.6 < quorums[1]["time_s"] < 6.5
    )  # heartbeats of 100 ms, the first dead one's last at 0.7 s, and 5 s
    healed = {event["rank"] for event in found.events if event["kind"] == "heal" and event["step"]}
    assert {0, 7, 9} <= healed


def test_the_mean_is_that_of_the_quorum(program: Any) -> None:
    """LocalSGD averages the replicas that are there: with all, without one, and with spares that bring zeros."""
    text = """
model = nn.Linear(1, 1, bias=False)
model.weight.data.fill_(R + 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
state = lambda: {"model": model.state_dict()}
mode = WorldSizeMode.FIXED_WITH_SPARES if sys.argv[1] == "fixed" else WorldSizeMode.DYNAMIC
manager = Manager(ProcessGroupGloo(), lambda found: model.load_state_dict(found["model"]), state, 2,
                  use_async_quorum=False, init_sync=False, world_size_mode=mode)
time.sleep(0.01)  # until all are known
with LocalSGD(manager, model, optimizer, sync_every=1):
    for step in range(2):
        model.weight.grad = torch.zeros(1, 1)
        if R or not step:
            optimizer.step()
            print(step, model.weight.item(), manager.num_participants())
            model.weight.data.fill_(R + 1.0)
"""
    assert program(text, 12, "dynamic")[1] == ["0 6.5 12"] * 12 + ["1 7.0 11"] * 11
    assert program(text, 4, "fixed")[1] == ["0 1.5 2"] * 4 + ["1 2.5 2"] * 3


def test_rules_of_the_lighthouse(program: Any) -> None:
    """A replica that is slow is waited for, for the time that it is given; then the others go on without it."""
    text = """
if R == 0:
    LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=2000)
model = nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
manager = Manager(ProcessGroupGloo(), model.load_state_dict, model.state_dict, 2, use_async_quorum=False)
time.sleep(0.01)
manager.start_quorum()
print(R, f"{time.time():.1f}", manager.num_participants(), manager.should_commit())
time.sleep(20 if R == 2 else 1)
if R == 2:
    sys.exit()
manager.start_quorum()
print(R, f"{time.time():.1f}", manager.num_participants(), manager.current_step(), manager.should_commit())
"""
    _, lines = program(text, 5)
    assert [each for each in lines if " 0.0 " in each] == [f"{rank} 0.0 5 True" for rank in range(5)]
    late = [each for each in lines if " 0.0 " not in each]
    assert late == [f"{rank} 3.1 4 1 True" for rank in (0, 1, 3, 4)]  # asked at 1.01 s; it looks each 100 ms


def test_a_quorum_may_only_shrink(program: Any) -> None:
    """Who comes late asks on while the members of the last quorum want no others, and is taken in afterwards."""
    text = """
if R == 0:
    LighthouseServer(min_replicas=2, join_timeout_ms=60000)
model = nn.Linear(1, 1)
time.sleep(2 if R == 3 else 0)
manager = Manager(ProcessGroupGloo(), model.load_state_dict, model.state_dict, 2, use_async_quorum=False)
time.sleep(0.01)
counts = []
for step in range(1 if R == 3 else 3):
    manager.start_quorum(shrink_only=step == 1)
    counts.append(manager.num_participants())
    assert manager.should_commit()
    time.sleep(3)
print(R, counts)
"""
    assert program(text, 4)[1] == [*(f"{rank} [3, 3, 4]" for rank in range(3)), "3 [4]"]


def test_a_group_that_does_not_come_together(program: Any) -> None:
    """One clear error each."""
    late = "manager = Manager(None, print, dict, 2, quorum_timeout=timedelta(seconds=7))\n"
    late += "if R: time.sleep(50)\nelse: time.sleep(0.01); manager.start_quorum(); manager.wait_quorum()"
    with pytest.raises((RankError, Timeout), match=r"no quorum: 1 of 4 replicas(.|\n)*rank 0.* waited 7 s"):
        program(late, 4)
    with pytest.raises(UnsupportedError, match="a replica of 2 ranks"):
        program("Manager(None, print, dict, 2, rank=0, world_size=2)", 2)
    alone = """
manager = Manager(None, lambda state: None, dict, 2, use_async_quorum=False, max_retries=1)
for step in range(9):
    manager.start_quorum()
    manager.should_commit()
    if R: sys.exit()
"""
    with pytest.raises(
        RankError, match="should_commit failed 2 times consecutively, exceeding max_retries=1"
    ):
        program(alone, 2)
