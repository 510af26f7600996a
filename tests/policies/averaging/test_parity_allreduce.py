"""What hivemind's test-suite checks of an all-reduce, by the same numbers: cutting, reducing, and the whole protocol.

Properties and parameters are those of its `test_allreduce.py`; the programs are ours, without any communicator.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from spawnsim.policies.averaging.butterfly import Butterfly, Group, Limits, Member, PartReducer, Role
from spawnsim.policies.averaging.vector import Part, Vector, whole_shares
from spawnsim.policies.state.codecs import NAMED, pack

SHAPES = [
    (3000, 128), (128,), (1, 1, 1, 1, 1, 1, 8), (1, 0), (0,), (), (65536,), (512, 204), (102, 1024), (1020,), (4096,),
]  # fmt: skip
FRACTIONS = [(1, 1), (0.333, 0.1667, 0.5003), (1.0, 0.0), (0.0, 0.4, 0.6, 0.0)]
EDGES = [(0.33, 0.44, 0.23), (0.5, 0.5), (0.1, 0.0, 0.9), (1.0,), (0.1,) * 9]


def drawn(count: int, seed: int) -> list[torch.Tensor]:
    """Return tensors of random shapes of the list, with random values."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPES[index], generator=generator) for index in rng.integers(0, len(SHAPES), count)]


def apply_part_by_part(vector: Vector, fractions: Sequence[float], part_size_bytes: int) -> None:
    """Send each reducer its parts as bytes, take the sine there, and add what it makes of each part."""
    deltas, values = vector.zeros(), vector.read()
    counts = (
        whole_shares(vector.count, np.asarray(fractions, float)) if vector.count else [0] * len(fractions)
    )
    assert sum(counts) == vector.count
    for count, parts in zip(counts, vector.cut(counts, part_size_bytes), strict=True):
        assert sum(part.stop - part.start for part in parts) == count
        for part in parts:
            raw, body = pack(NAMED["none"], values[part.segment][part.start : part.stop])
            assert body.nbytes <= max(part_size_bytes, 8)
            came = vector.unpacked(part, raw, body)
            deltas[part.segment][part.start : part.stop] = np.sin(came) - came
    vector.add(deltas)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("part_size_bytes", [31337, 2**20, 10**10])
@pytest.mark.parametrize("fractions", FRACTIONS)
def test_partitioning(count: int, part_size_bytes: int, fractions: Sequence[float]) -> None:
    """Each element is in one part of one reducer, and comes back to its place."""
    tensors = drawn(count, seed=count)
    expected = [tensor.sin() for tensor in tensors]
    apply_part_by_part(Vector(tensors), fractions, part_size_bytes)
    for tensor, wanted in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fractions", EDGES)
@pytest.mark.parametrize("sizes", [(0,), (0, 0, 1), (0, 999, 0, 0)])
def test_partitioning_edge_cases(sizes: Sequence[int], fractions: Sequence[float]) -> None:
    """Tensors without elements, reducers without share."""
    tensors = [torch.ones(size) for size in sizes]
    apply_part_by_part(Vector(tensors), fractions, 16)
    assert [tuple(tensor.shape) for tensor in tensors] == [(size,) for size in sizes]
    assert all(torch.allclose(tensor, torch.ones(1).sin()) for tensor in tensors)


@pytest.mark.parametrize("senders", [1, 2, 4, 10])
@pytest.mark.parametrize("parts", [0, 1, 100])
@pytest.mark.parametrize("together", [1.0, 0.1, 0.0])
def test_reducer(senders: int, parts: int, together: float) -> None:
    """Parts of 0, 1, 2, ... elements, from senders that run ahead of each other: the mean of all, for each."""
    rng = np.random.default_rng(senders + parts)
    sent = [[rng.normal(size=size).astype(np.float32) for size in range(parts)] for _ in range(senders)]
    reducer = PartReducer(range(senders), [Part(0, 0, size) for size in range(parts)])
    got: list[dict[int, np.ndarray]] = [{} for _ in range(senders)]

    def take_averages() -> None:
        for reduced in reducer.ready():
            for sender, delta in reduced.deltas.items():
                got[sender][reduced.part] = sent[sender][reduced.part] + delta

    progress = [0] * senders
    while min(progress) < parts:
        sender = int(rng.choice([each for each in range(senders) if progress[each] < parts]))
        while progress[sender] < parts:
            assert reducer.take(sender, progress[sender], sent[sender][progress[sender]], 1.0)
            progress[sender] += 1
            if rng.random() < together:
                break
        take_averages()
    take_averages()
    assert reducer.finished
    for index in range(parts):
        mean = np.mean([each[index] for each in sent], axis=0)
        for sender in range(senders):
            np.testing.assert_allclose(got[sender][index], mean, rtol=1e-3, atol=1e-5)


NODE, CLIENT, AUX = Role.NODE, Role.CLIENT, Role.AUX


@pytest.mark.parametrize(
    ("roles", "weights", "bandwidths", "part_size_bytes"),
    [
        ((NODE, NODE, NODE, NODE), (1, 1, 1, 1), (1, 1, 1, 1), 2**20),
        ((NODE, NODE, NODE, NODE), (0.1, 0.2, 0.3, 0.4), (1, 1, 1, 1), 2**20),
        ((NODE, NODE, NODE, NODE), (1, 1, 1, 1), (1, 2, 3, 0), 2**20),
        ((NODE, NODE, NODE, CLIENT), (1, 1, 1, 1), (1, 2, 3, 0), 2**20),
        ((NODE, NODE, NODE, AUX), (1, 1, 1, 0), (1, 2, 3, 4), 2**20),
        ((NODE, NODE, NODE, NODE), (0.15, 0.0, 0.35, 0.45), (1, 1, 1, 1), 2**20),
        ((NODE, AUX, NODE, CLIENT), (0.15, 0.0, 0.35, 0.45), (150, 200, 67, 0), 2**20),
        ((NODE, AUX, NODE, CLIENT), (0.15, 0.0, 0.35, 0.45), (150, 200, 67, 0), 256),
        ((NODE, AUX, NODE, CLIENT), (0.15, 0.0, 0.35, 0.45), (150, 200, 67, 0), 19),
        ((AUX, AUX, AUX, AUX), (0.0, 0.0, 0.0, 0.0), (1, 2, 3, 4), 2**20),
    ],
)
def test_allreduce_protocol(
    roles: Sequence[Role], weights: Sequence[float], bandwidths: Sequence[float], part_size_bytes: int
) -> None:
    """Four members of all roles and weights: the weighted mean to 1e-6; auxiliaries keep their values."""
    generator = torch.Generator().manual_seed(0)
    tensors = [
        [
            torch.randn(3, 128, generator=generator),
            torch.rand(32, generator=generator),
            torch.tensor(float(rank)),
        ]
        for rank in range(4)
    ]
    before = [[tensor.clone() for tensor in each] for each in tensors]
    members = tuple(Member(rank, roles[rank], float(bandwidths[rank])) for rank in range(4))
    machines = [
        Butterfly(rank, Group(1, members), Vector(tensors[rank]), weight=weights[rank],
                  limits=Limits(part_size_bytes), now_s=0.0)
        for rank in range(4)
    ]  # fmt: skip
    while not all(machine.finished for machine in machines):
        moved = 0
        for rank, machine in enumerate(machines):
            machine.send_some(4, 0.0)
            while machine.out:
                dest, message = machine.out.popleft()
                machines[dest].handle(rank, message, 0.0)
                moved += 1
        assert moved or all(machine.finished for machine in machines)
    for machine in machines:
        machine.vector.add(machine.deltas)
    for index, rank in itertools.product(range(3), range(4)):
        mean = sum(weight * each[index] for weight, each in zip(weights, before, strict=True)) / (
            sum(weights) or 1
        )
        wanted = before[rank][index] if roles[rank] is AUX else mean
        torch.testing.assert_close(tensors[rank][index], wanted, rtol=0, atol=1e-6)
