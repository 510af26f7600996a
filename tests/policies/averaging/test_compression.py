"""Which codec for which tensor, and that it is the one that packs it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from policies.averaging.averagers import averager_of, play

from spawnsim.errors import ParameterError
from spawnsim.policies.averaging import (
    CompressionInfo,
    Everyone,
    PerTensorCompression,
    RoleAdaptiveCompression,
    SizeAdaptiveCompression,
    TensorRole,
)
from spawnsim.policies.averaging.vector import Vector
from spawnsim.policies.decentralized import DecentralizedAveragingPolicy
from spawnsim.policies.state.codecs import (
    Bytes,
    Codec,
    Float16,
    NoCompression,
    Uniform8Bit,
    codecs_for,
    infos_by_place,
)
from spawnsim.policies.state.layout import Travels

INFOS = [
    CompressionInfo("a", (10, 100), torch.float32, TensorRole.PARAMETER),
    CompressionInfo("b", (999,), torch.float32, TensorRole.GRADIENT),
    CompressionInfo("c", (), torch.float32, TensorRole.OPTIMIZER),
    CompressionInfo("d", (5000,), torch.float32),
]
HALF, BYTE, PLAIN = Float16(), Uniform8Bit(), NoCompression()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, [PLAIN] * 4),
        ("float16", [HALF] * 4),
        (BYTE, [BYTE] * 4),
        (["float16", None, BYTE, "none"], [HALF, PLAIN, BYTE, PLAIN]),
        ({"d": "float16", "a": BYTE, "b": "none", "c": None}, [BYTE, PLAIN, PLAIN, HALF]),
        (SizeAdaptiveCompression(1000, "float16", BYTE), [BYTE, HALF, HALF, BYTE]),
        (RoleAdaptiveCompression(parameter=HALF, gradient="uniform8"), [HALF, BYTE, PLAIN, PLAIN]),
        (
            RoleAdaptiveCompression(gradient=SizeAdaptiveCompression(500, "none", "uniform8"), default=HALF),
            [HALF, BYTE, HALF, HALF],
        ),
        (PerTensorCompression({info.key: "float16" for info in INFOS}), [HALF] * 4),
    ],
)
def test_choices(given: Any, wanted: list[Codec]) -> None:
    """By name, for each tensor, by key, size and role, and one within the other."""
    assert codecs_for(given, INFOS) == wanted


@pytest.mark.parametrize(
    "given",
    ["zip", ["float16"], ["float16"] * 5, {"a": "float16"}, 3, Float16, ["none", "none", "none", 4.0],
     PerTensorCompression({"z": "none"})],
)  # fmt: skip
def test_bad_choices_are_refused(given: Any) -> None:
    """Unknown names, too few or many, keys that are missing, what is no codec."""
    with pytest.raises(ParameterError, match=r"compression|codec"):
        codecs_for(given, INFOS)


def test_bad_descriptions_are_refused() -> None:
    """They must be the tensors' own, in their order; by the constructor."""
    tensors = [torch.zeros(3), torch.zeros(4)]

    def main(comm: Any) -> None:
        for infos in (infos_by_place(tensors)[:1], infos_by_place(tensors[::-1])):
            with pytest.raises(ParameterError, match="tensor_infos"):
                averager_of(comm, tensors, tensor_infos=infos)
        with pytest.raises(ParameterError, match="codecs"):
            averager_of(comm, tensors, compression=["float16"])
        with pytest.raises(ParameterError, match="compression"):
            averager_of(comm, tensors, state_compression=7)

    play(main, 1)


def test_segments_and_schemas() -> None:
    """Tensors of one codec lie together, but for codecs with a scale; whole numbers are never compressed.

    Peers with other codecs do not fit together.
    """
    tensors = [torch.zeros(3), torch.zeros(4), torch.zeros(5), torch.zeros(2, dtype=torch.int64)]
    for codecs, wanted in (
        ([HALF, BYTE, HALF, HALF], [(8, HALF), (4, BYTE), (2, PLAIN)]),
        ([BYTE] * 4, [(3, BYTE), (4, BYTE), (5, BYTE), (2, PLAIN)]),
    ):
        assert [(each.count, each.codec) for each in Vector(tensors, codecs).segments] == wanted
    schemas = {Vector(tensors, list(each)).schema for each in itertools.product([HALF, BYTE], repeat=4)}
    assert len(schemas) == 16


def averaged(compression: Any) -> list[torch.Tensor]:
    """Return what two ranks end with, the first of which only sends."""

    def main(comm: Any) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(comm.rank)
        line = torch.linspace(300 * comm.rank, 500 + 300 * comm.rank, 1000) ** 0.5
        tensors = [line, torch.randn(1000, generator=generator)]
        averager = averager_of(
            comm, tensors, matchmaking=Everyone(), client_mode=comm.rank == 0, compression=compression
        )
        assert averager.step().complete
        averager.serve(0.1)
        return tensors

    return play(main, 2)[0]


def test_each_tensor_is_compressed_as_it_is_said() -> None:
    """The result of a tensor depends on its own codec alone; errors are within the bounds of each."""
    exact = averaged(None)
    results = {pair: averaged(list(pair)) for pair in itertools.product([HALF, BYTE], repeat=2)}
    for index in range(2):
        for one, other in itertools.combinations(results, 2):
            same = torch.equal(results[one][index], results[other][index])
            assert same == (one[index] == other[index])
        error = {pair: ((results[pair][index] - exact[index]) ** 2).mean() for pair in results}
        assert 0 < error[HALF, HALF] <= 1e-5 < error[BYTE, BYTE] <= 1e-2


@dataclass(frozen=True)
class Counting:
    """A codec that notes how many values it packs each time."""

    inner: Codec
    packed: list[int] = field(default_factory=list, repr=False, compare=False)

    @property
    def nbytes_per_value(self) -> float:
        return self.inner.nbytes_per_value

    def encode(self, values: np.ndarray) -> Bytes:
        self.packed.append(values.size)
        return self.inner.encode(values)

    def decode(self, body: Bytes, count: int) -> np.ndarray:
        return self.inner.decode(body, count)


def test_parts_are_cut_by_the_size_of_what_is_packed() -> None:
    """5,000 bytes are 5,000 single bytes, or 2,500 halves."""
    half, byte = Counting(Float16()), Counting(Uniform8Bit())

    def main(comm: Any) -> None:
        tensors, codecs = [torch.randn(12_000), torch.randn(12_000)], [half, byte]
        averager = averager_of(
            comm,
            tensors,
            matchmaking=Everyone(),
            part_size_bytes=5000,
            compression=codecs,
            bandwidth=float(comm.rank),
        )
        averager.step()
        averager.serve(0.1)

    play(main, 2)
    assert max(half.packed) == 2500
    assert max(byte.packed) == 5000
    assert sum(half.packed) == sum(byte.packed) == 3 * 12_000  # two send their parts, one gets deltas


def test_a_policy_leaves_the_optimizer_as_it_is() -> None:
    """Adam's moments are averaged exactly under a codec that is given for all; the weights are not."""

    def main(comm: Any) -> None:
        model = torch.nn.Linear(50, 1)
        generator = torch.Generator().manual_seed(comm.rank)
        with torch.no_grad():
            model.weight.copy_(torch.randn(1, 50, generator=generator))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model(torch.randn(4, 50, generator=generator)).sum().backward()
        optimizer.step()
        moments = optimizer.state[model.weight]["exp_avg_sq"]
        mine = [model.weight.detach().clone(), moments.clone()]
        policy = DecentralizedAveragingPolicy(
            1, matchmaking=Everyone(), compression="uniform8", travels=Travels(optimizer_state="average")
        )
        _, _, info = policy(0, model, optimizer, group=comm)
        policy.averager.serve(0.1)
        assert info["complete"]
        weights, squares = [
            np.mean(each, axis=0) for each in zip(*comm.allgather([m.numpy() for m in mine]), strict=True)
        ]
        np.testing.assert_allclose(moments.numpy(), squares, rtol=1e-6)
        assert 0 < np.abs(model.weight.detach().numpy() - weights).max() < 0.1

    play(main, 2)
