"""States on their way: cast or encoded, marked, and read again by anybody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.policy_ranks import Line, Steps, line, walk

from spawnsim.errors import ParameterError, UsageError
from spawnsim.policies import AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy, Windows, replay
from spawnsim.policies.exchange.messages import decode
from spawnsim.policies.exchange.replacement import Packer
from spawnsim.policies.state.codecs import Blockwise8Bit, Codec, Float16, NoCompression
from spawnsim.policies.state.layout import Tensors
from spawnsim.policies.state.snapshot import MARK, Compression

BF16_STEP = 2**-8
every_transport = pytest.mark.parametrize("transport", ["messages", "flat", "per_parameter"])


def there_and_back(how: str | Codec | None, live: Tensors, reader: str | Codec | None = None) -> Tensors:
    """Return tensors after a trip as messages, read by a rank with a setting of its own."""
    messages = Packer(2**20, checksum=True, compression=Compression(how)).pack(live, 1, 2)
    return Packer(2**20, compression=Compression(reader)).unpack([decode(message) for message in messages])


def state() -> Tensors:
    """Return all that a state may hold."""
    draw = torch.Generator().manual_seed(1)
    return {
        "parameter/w": torch.randn(7, 5, generator=draw),
        "parameter/wide": torch.randn(300, generator=draw, dtype=torch.float64),
        "parameter/half": torch.randn(5, generator=draw).half(),
        "parameter/short": torch.randn(5, generator=draw).bfloat16(),
        "parameter/logZ": torch.tensor(3.1),
        "parameter/none": torch.empty(0, 3),
        "parameter/complex": torch.randn(4, generator=draw, dtype=torch.complex64),
        "parameter/turned": torch.randn(6, 4, generator=draw).t(),
        "buffer/count": torch.tensor(12345678901),
        "buffer/mask": torch.tensor([True, False]),
        "optimizer/w/exp_avg_sq": torch.full((7, 5), 1e-12),
    }


@pytest.mark.parametrize("how", [None, "float16", "bfloat16", "uniform8", "blockwise8", Blockwise8Bit(16)])
def test_every_tensor_comes_back_in_its_own_name_dtype_and_shape(how: str | Codec | None) -> None:
    """Floats within the codec's error, all else to the bit."""
    live = state()
    back = there_and_back(how, live, how)
    assert back.keys() == live.keys()
    for name, tensor in live.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        if tensor.dtype in (torch.float32, torch.float64) and name.startswith("parameter/") and how:
            assert torch.allclose(back[name], tensor, atol=0.05, rtol=0.01), name
        else:
            assert torch.equal(back[name], tensor), name


def test_half_precision_is_half_as_long_and_a_single_rounding() -> None:
    """What comes back is the tensor cast once, bit for bit."""
    live = {"parameter/w": torch.randn(1000)}
    (message,) = Packer(2**20, compression=Compression("float16")).pack(live, 1, 2)
    assert decode(message).body.size == 2048  # 2,000, aligned
    assert torch.equal(there_and_back("float16", live)["parameter/w"], live["parameter/w"].half().float())


@given(st.lists(st.floats(width=32), min_size=1, max_size=9))
def test_nothing_becomes_infinite_that_was_not(values: list[float]) -> None:
    """Out of range, infinite and NaN values travel as they are, with their tensor."""
    live = {"parameter/w": torch.tensor(values)}
    for how in ("float16", "bfloat16"):
        back = there_and_back(how, live)["parameter/w"]
        assert torch.equal(torch.isfinite(back), torch.isfinite(live["parameter/w"]))
        if not all(abs(value) <= 65504 for value in values) and how == "float16":
            assert torch.equal(back.view(torch.int32), live["parameter/w"].view(torch.int32))


def test_wide_values_stay_wide_under_a_codec() -> None:
    """A codec gives float32 back: float64 values beyond it are not given to one."""
    live = {"parameter/w": torch.full((5000,), 1e300, dtype=torch.float64)}
    assert torch.equal(there_and_back("blockwise8", live)["parameter/w"], live["parameter/w"])


def test_what_would_not_become_smaller_travels_as_it_is() -> None:
    """A code book is longer than three numbers."""
    assert set(Compression("uniform8").encode({"parameter/w": torch.ones(3)}).sources) == {"parameter/w"}
    (name,) = Compression("uniform8").encode({"parameter/w": torch.ones(3000)}).sources
    assert name.split(MARK) == ["parameter/w", "float32", "3000", "uniform8"]


@pytest.mark.parametrize("how", [None, "none", NoCompression()])
def test_without_compression_the_live_tensors_are_what_is_sent(how: Any) -> None:
    """No copy, no mark."""
    live = state()
    assert Compression(how).encode(live).sources is live


def test_names() -> None:
    """A misspelt one is refused in the constructor; a codec that stands for a dtype is that dtype."""
    assert Compression(Float16()).name == "float16"
    assert Compression("float16").codec is None
    for kind in (AsyncSelectiveAveragingPolicy, OneSidedSelectiveAveragingPolicy):
        with pytest.raises(ParameterError, match="bfloat16"):
            kind(None, *((5,) if kind is AsyncSelectiveAveragingPolicy else (None, 5)), compression="zip")


@dataclass(frozen=True)
class Sevenths:
    """A codec of somebody's own: whole sevenths, in one byte."""

    nbytes_per_value: float = 1.0

    def encode(self, values: Any) -> Any:
        return np.rint(values * 7).astype(np.int8).view(np.uint8)

    def decode(self, body: Any, count: int) -> Any:
        return (body.view(np.int8)[:count] / np.float32(7)).astype(np.float32)


def test_a_codec_of_ones_own_is_read_by_those_who_have_it() -> None:
    """Others get an error that names it."""
    live = {"parameter/w": torch.arange(6.0)}
    assert torch.equal(there_and_back(Sevenths(), live, Sevenths())["parameter/w"], live["parameter/w"])
    with pytest.raises(UsageError, match="Sevenths"):
        there_and_back(Sevenths(), live, "float16")


# ---------------------------------------------------------------------------------------------- policies
def policy(comm: Any, transport: str, compression: Any, **how: Any) -> Any:
    """Return a policy that replaces one of four ranks."""
    if transport == "messages":
        return AsyncSelectiveAveragingPolicy(None, 3, 0.25, cooldown=0, compression=compression, **how)
    return OneSidedSelectiveAveragingPolicy(
        None, None, 3, 0.0, 0.25, replacement_mode="worst_ratio", cooldown=0, donors=3, compression=compression,
        windows=Windows(transport), **how,
    )  # fmt: skip


def thirds(rank: int) -> tuple[Line, torch.optim.Optimizer]:
    """Return a model of numbers that half precision has to round."""
    return line(rank / 3 + 0.01, width=5000)


def replaced(found: Steps) -> list[int]:
    """Return who was replaced, by time."""
    return [event["replaced"] for event in found.events("replacement")]


@pytest.mark.parametrize(
    ("transport", "compression"),
    [("messages", "float16"), ("messages", "uniform8"), ("flat", "bfloat16"), ("per_parameter", "float16")],
)
def test_a_policy_sends_less_and_means_stay_wide(transport: str, compression: str) -> None:
    """The mean of three donors is that of their rounded values, summed in float32: not rounded once more."""
    plain = walk(lambda comm: policy(comm, transport, None, momentum=0.25), steps=9, start=thirds)
    found = walk(lambda comm: policy(comm, transport, compression, momentum=0.25), steps=9, start=thirds)
    assert replaced(found)[0] == replaced(plain)[0] == 0
    taken = [next(event["bytes"] for event in each.events("replacement")) for each in (found, plain)]
    assert taken[0] < 0.6 * taken[1]
    small = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(compression, torch.float32)
    donors = [torch.tensor(rank / 3 + 0.01).to(small).float().item() for rank in (1, 2, 3)]
    value = 0.01
    for _ in range(replaced(found).count(0)):
        value = 0.25 * value + 0.75 * sum(donors) / 3
    assert found.models[0].weight[0].item() == pytest.approx(value, abs=1e-6)
    assert found.models[0].weight.dtype == torch.float32


@every_transport
def test_ranks_with_different_settings_read_each_other(transport: str) -> None:
    """A snapshot says how it is to be read."""
    settings = [None, "float16", "bfloat16", "blockwise8"]
    found = walk(lambda comm: policy(comm, transport, settings[comm.Get_rank()]), steps=9, start=thirds)
    assert found.events("replacement")[0]["donors"] == [1, 2, 3]
    assert found.models[0].weight[0].item() == pytest.approx(2 / 3 + 0.01, abs=2 * BF16_STEP)


@pytest.mark.parametrize(
    ("transport", "compression"),
    [("messages", "float16"), ("messages", Sevenths()), ("flat", "quantile8"), ("per_parameter", Sevenths())],
)
def test_a_replay_rounds_as_the_run_did(transport: str, compression: Any) -> None:
    """Same decisions, same bits; ranks 0 and 1 do not compress."""

    def chosen(comm: Any) -> Any:
        return policy(comm, transport, compression if comm.Get_rank() > 1 else None)

    metric = lambda rank, iteration: float((rank + iteration // 3) % 4)  # noqa: E731
    if transport == "messages" and isinstance(compression, Sevenths):
        metric = lambda rank, _: float(-rank)  # noqa: E731  ranks 0 and 1 cannot read it
    elif isinstance(compression, Sevenths):
        chosen = lambda comm: policy(comm, transport, compression)  # noqa: E731
    found = walk(chosen, steps=16, start=thirds, metric=metric)
    own = compression if isinstance(compression, Sevenths) else None
    again = walk(lambda _: replay(found.run.events, compression=own), steps=16, start=thirds, seed=3)
    assert replaced(found) != []
    for rank in range(4):
        assert torch.equal(found.models[rank].weight, again.models[rank].weight)
        assert torch.equal(found.models[rank].logZ, again.models[rank].logZ)


@every_transport
def test_a_rank_that_cannot_read_a_codec_says_so(transport: str) -> None:
    """Not silence, not garbage: which codec, and what to do."""
    chosen = lambda comm: policy(comm, transport, Sevenths() if comm.Get_rank() else None)  # noqa: E731
    with pytest.raises(UsageError, match="give all ranks of the group the same compression"):
        walk(chosen, steps=9, start=thirds)


@pytest.mark.parametrize("transport", ["flat", "per_parameter"])
def test_windows_have_room_for_values_that_leave_the_range(transport: str) -> None:
    """A model that fits half precision at first and not later is offered all the same."""
    half = lambda comm: policy(comm, transport, "float16")  # noqa: E731
    found = walk(half, steps=12, start=lambda rank: line(9e4 * rank, width=300))
    assert found.policies[1].stats.get("too large", 0) == 0
    assert found.models[0].weight[0].item() == pytest.approx(1.8e5)


def test_only_compressed_runs_say_how_they_travel() -> None:
    """Events of the default setting are as they were."""
    assert walk(lambda comm: policy(comm, "flat", None), steps=3).events("transport") == []
    reported = walk(lambda comm: policy(comm, "messages", "bfloat16"), steps=3).events("transport")
    assert {event["rank"]: event["compression"] for event in reported} == dict.fromkeys(range(4), "bfloat16")
