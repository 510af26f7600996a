"""Whatever a model holds arrives, on both transports and both buildings; memory is used again, but never too early."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policy_ranks import line, numbers, walk

import spawnsim
from spawnsim.policies import AsyncSelectiveAveragingPolicy, ExchangeOptions
from spawnsim.policies.exchange.endpoint import Endpoint
from spawnsim.policies.exchange.messages import checksum, decode
from spawnsim.policies.exchange.replacement import Packer
from spawnsim.policies.state.layout import Layout
from spawnsim.policies.state.snapshot import (
    Compression,
    allocator_for,
    laid_out,
    lay_out,
    model_device,
)

PROGRAM = Path(__file__).parents[2] / "programs" / "transport.py"


def test_every_kind_of_tensor_is_taken_over_on_virtual_ranks() -> None:
    """Messages and both layouts of windows, plain and compressed."""
    spawnsim.run(PROGRAM, ranks=2)


@pytest.mark.mpi
def test_every_kind_of_tensor_is_taken_over_on_real_ranks() -> None:
    """The same program, under mpiexec."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    line_ = [str(mpiexec), "-n", "2", sys.executable, str(PROGRAM)]
    done = subprocess.run(line_, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all well\n"), done.stderr


# ------------------------------------------------------------------------------------------------- memory
def live(value: float = 1.0) -> dict[str, torch.Tensor]:
    """Return a small state."""
    return {"parameter/w": torch.full((100,), value), "parameter/logZ": torch.tensor(value)}


def test_memory_of_a_snapshot_is_used_again_once_it_is_sent() -> None:
    """A busy one is not, nor one of another size."""
    packer = Packer(2**20)
    (first,) = packer.pack(live(1), 1, 1, busy=lambda memory: False)
    (again,) = packer.pack(live(2), 2, 2, busy=lambda memory: memory is not first)
    assert again is first
    (other,) = packer.pack(live(3), 3, 3, busy=lambda memory: True)
    assert other is not first
    assert packer.unpack([decode(first)])["parameter/logZ"].item() == 2
    assert packer.unpack([decode(other)])["parameter/logZ"].item() == 3
    (longer,) = packer.pack(live() | {"parameter/more": torch.zeros(99)}, 4, 4, busy=lambda memory: False)
    assert longer is not other


def test_a_donor_that_gives_often_never_overwrites_what_is_on_the_way() -> None:
    """Ranks 0 to 2 take from rank 3 all the time, over a slow network, while its numbers change in every step."""

    def policy(comm: Any) -> AsyncSelectiveAveragingPolicy:
        return AsyncSelectiveAveragingPolicy(None, 1, 0.75, "best_only", cooldown=0, rule="replace")

    torn: list[set[float]] = []

    def main(comm: Any) -> None:
        chosen = policy(comm)
        model, optimizer = line(float(comm.Get_rank()), width=20_000)
        for iteration in range(60):
            with comm.compute(0.001), torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.add_(1.0)
            model, optimizer, info = chosen(iteration, model, optimizer, float(comm.Get_rank()), comm)
            if len(numbers(model)) > 1:
                torn.append(numbers(model))
        comm.record(replaced=info["num_replacements_so_far"])
        chosen.shutdown()

    run = spawnsim.run(main, ranks=4, platform="gigabit")
    assert run.table["replaced"].sum() > 20
    assert torn == []


def test_a_donor_answers_each_who_asks_with_its_model_of_now() -> None:
    """Two are replaced in one round, and the slow one asks later: it gets a later snapshot, not a copy of the first."""
    found = walk(
        lambda _: AsyncSelectiveAveragingPolicy(None, 10, 0.5, "best_only", wiring=ExchangeOptions(deadline=2.0)),
        steps=70, pace=lambda rank: 0.05 if rank == 1 else 0.01,
    )  # fmt: skip
    first = {event["replaced"]: event for event in found.events("replacement") if event["round"] == 10}
    assert first[0]["donors"] == first[1]["donors"] == [3]
    (quick,), (slow,) = first[0]["versions"], first[1]["versions"]
    asked_s = first[1]["time_s"] - first[1]["wait_s"]
    assert slow > quick + 2
    assert 0.01 * (slow + 2) > asked_s


def test_checksums_notice_a_changed_bit_wherever_it_is() -> None:
    """In whole rows, in the rest, and in nothing at all."""
    body = np.random.default_rng(1).integers(0, 256, 3 * 4096 + 77, dtype=np.uint8)
    right = checksum(body)
    for at in (0, 4095, 4096, 3 * 4096 - 1, 3 * 4096, body.size - 1):
        body[at] ^= 1
        assert checksum(body) != right
        body[at] ^= 1
    assert checksum(body) == right
    assert checksum(body[:0]) != 0
    swapped = body.copy()
    swapped[:8], swapped[8:16] = body[8:16], body[:8]
    assert checksum(swapped) != right


# ------------------------------------------------------------------------------------------- accelerators
@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return a device that says it is a GPU and whose memory is main memory: the path, without the card."""

    class Elsewhere:
        type = "elsewhere"

    real_empty, real_to = torch.empty, torch.Tensor.to

    def empty(*size: Any, device: Any = None, **how: Any) -> torch.Tensor:
        return real_empty(*size, **how)

    def to(self: torch.Tensor, *how: Any, **more: Any) -> torch.Tensor:
        return self.clone() if how and isinstance(how[0], Elsewhere) else real_to(self, *how, **more)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "to", to)
    return Elsewhere()  # type: ignore[return-value]


def test_a_device_is_left_and_reached_in_one_copy(elsewhere: torch.device) -> None:
    """Gathered there, copied once; spread there after one copy, but 0-dim tensors stay in main memory."""
    state = live(3.0) | {"buffer/count": torch.arange(5)}
    encoded = Compression("float16").encode(state)
    there = torch.zeros(encoded.layout.nbytes, dtype=torch.uint8)
    lay_out(encoded.layout, there, encoded.sources, elsewhere)
    for name, tensor in encoded.layout.views(there).items():
        assert torch.equal(tensor, encoded.sources[name].to(dtype=tensor.dtype)), name
    layout = Layout.of(state)
    memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
    lay_out(layout, memory, state)
    found = laid_out(layout, memory, elsewhere)
    inside = range(memory.data_ptr(), memory.data_ptr() + memory.numel())
    assert {name: tensor.data_ptr() in inside for name, tensor in found.items()} == {
        "parameter/w": False, "parameter/logZ": True, "buffer/count": False
    }  # fmt: skip
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_where_a_model_lies() -> None:
    """By its first parameter; main memory if it has none."""
    assert model_device(torch.nn.Linear(1, 1)).type == "cpu"
    assert model_device(torch.nn.Linear(1, 1, device="meta")).type == "meta"
    assert model_device(torch.nn.Identity()).type == "cpu"
    assert allocator_for(torch.device("cpu"))(7).shape == (7,)


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
@pytest.mark.parametrize("compression", [None, "float16", "blockwise8"])
def test_a_model_stays_where_it_lies(device: str, compression: str | None) -> None:
    """Two virtual ranks, on one card if there is one; what is sent from it is pinned."""

    def start(rank: int) -> tuple[Any, torch.optim.Optimizer]:
        model = line(float(rank), width=5000)[0].to(device)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    found = walk(
        lambda _: AsyncSelectiveAveragingPolicy(None, 3, 0.5, cooldown=0, rule="delta", compression=compression),
        ranks=2, steps=9, start=start,
    )  # fmt: skip
    assert found.events("replacement")
    assert numbers(found.models[0]) == {1.0}
    assert {tensor.device.type for tensor in found.models[0].state_dict().values()} == {device}
    (message,) = Packer(2**30).pack({"parameter/w": torch.ones(9, device=device)}, 1, 1)
    assert torch.from_numpy(message).is_pinned() == (device == "cuda")


def test_a_queue_may_grow_while_it_is_sent():
    """Messages that are added in the middle, as by another thread, are sent too, and none twice."""

    class Growing(Endpoint):
        def __init__(self):
            self.gone = []

        def send(self, rank, message):
            self.gone.append((rank, message))
            if len(self.gone) < 4:
                queue.append((rank + 1, message))
            return True

    queue = deque([(0, "a"), (5, "b")])
    endpoint = Growing()
    endpoint.send_queue(queue)
    assert not queue and endpoint.gone == [(0, "a"), (5, "b"), (1, "a"), (6, "b"), (2, "a")]
