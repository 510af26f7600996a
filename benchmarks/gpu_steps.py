"""Training steps that others measured on GPUs, and the times that `--compute counted` gives them.

    python benchmarks/gpu_steps.py

Each case is a published measurement whose model, sequence and batch are published too: tables of torchtitan
(docs/performance.md; benchmarks/llama3_h100_202412_torchtitan.md) and issue 110 of nanoGPT. Forward and backward run on
meta tensors, shapes without data, and `Counting` adds up each operation's time on one GPU. So communication counts as
hidden, the optimizer as free, and no operations are fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spawnsim.virtual.accounting import DEVICES, CallMeter
from spawnsim.virtual.counting import Counting


@dataclass(frozen=True)
class Shape:
    """A transformer: width, layers, heads, heads of keys and values, hidden width, vocabulary; gated or GPT-2's."""

    width: int
    layers: int
    heads: int
    shared: int
    hidden: int
    vocabulary: int
    gated: bool = True
    tied: bool = False


@dataclass(frozen=True)
class Case:
    """A measured step: tokens per second and GPU, or seconds."""

    name: str
    shape: Shape
    device: str
    tokens: int
    batch: int
    seconds: float
    micro_steps: int = 1
    recomputes: bool = False


LLAMA3_8B = Shape(4096, 32, 32, 8, 14336, 128_256)
LLAMA2_13B = Shape(5120, 40, 40, 40, 13824, 32_000)
GPT2 = Shape(768, 12, 12, 12, 3072, 50_304, gated=False, tied=True)


def titan(
    name: str, shape: Shape, device: str, *, tokens: int, batch: int, rate: float, ac: bool = True
) -> Case:
    """Return a case of torchtitan's tables, which state tokens per second and GPU."""
    return Case(name, shape, device, tokens, batch, tokens * batch / rate, recomputes=ac)


CASES = (
    titan("13B, 64 A100, no recomputation", LLAMA2_13B, "a100", tokens=4096, batch=2, rate=2162, ac=False),
    titan("13B, 64 A100", LLAMA2_13B, "a100", tokens=4096, batch=2, rate=1904),
    titan("8B, 64 A100", LLAMA3_8B, "a100", tokens=8192, batch=1, rate=2973),
    titan("8B, 8 H100, eager", LLAMA3_8B, "h100", tokens=8192, batch=2, rate=5762),
    titan("8B, 8 H100, compiled", LLAMA3_8B, "h100", tokens=8192, batch=2, rate=6667),
    titan("8B, 128 H100, eager", LLAMA3_8B, "h100", tokens=8192, batch=2, rate=5605),
    titan("8B, 128 H100, compiled", LLAMA3_8B, "h100", tokens=8192, batch=2, rate=6514),
    Case("GPT-2, 8 A100, compiled", GPT2, "a100", 1024, 12, 0.562, micro_steps=5),
)


class Block(torch.nn.Module):
    """Attention and a perceptron, both with a norm before them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        linear = partial(torch.nn.Linear, bias=False)
        norm = torch.nn.RMSNorm if shape.gated else torch.nn.LayerNorm
        self.norms = torch.nn.ModuleList([norm(shape.width), norm(shape.width)])
        narrow = shape.width // shape.heads * shape.shared
        self.qkv = torch.nn.ModuleList(linear(shape.width, out) for out in (shape.width, narrow, narrow))
        self.out = linear(shape.width, shape.width)
        self.up, self.down = linear(shape.width, shape.hidden), linear(shape.hidden, shape.width)
        self.gate = linear(shape.width, shape.hidden) if shape.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = self.norms[0](x)
        heads = [part(inside).unflatten(2, (-1, self.shape.width // self.shape.heads)) for part in self.qkv]
        heads = [
            each.repeat_interleave(self.shape.heads // each.shape[2], 2).transpose(1, 2) for each in heads
        ]
        x = x + self.out(attention(*heads).transpose(1, 2).flatten(2))
        inside = self.norms[1](x)
        up = self.up(inside)
        up = functional.silu(self.gate(inside)) * up if self.gate is not None else functional.gelu(up)
        return x + self.down(up)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention by the fused operation: meta tensors would get the one that stores all scores."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]


class Model(torch.nn.Module):
    """Embedding, blocks, and the loss."""

    def __init__(self, shape: Shape, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.embedding = torch.nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=False, context_fn=selective)
                if self.recomputes
                else block(x)
            )
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def selective() -> Any:
    """Return torchtitan's "selective op": attention and every second product are kept, the rest is recomputed."""
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        name = op.overloadpacket.__name__
        if name == "mm":
            seen[context.is_recompute] += 1
            kept = seen[context.is_recompute] % 2 == 1
        else:
            kept = "flash_attention" in name
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def counted_s(case: Case, rates: tuple[float, float]) -> float:
    """Return the time that the counted model gives a step."""
    meter = CallMeter()
    with torch.device("meta"):
        model = Model(case.shape, recomputes=case.recomputes).bfloat16()
        words = torch.zeros(case.batch, case.tokens, dtype=torch.long)
        with Counting(meter, rates):
            model(words).backward()
    return case.micro_steps * meter.counted_s


def main(cases: Sequence[Case] = CASES) -> None:
    """Print the table."""
    print(f"{'case':34} {'measured':>9} {'products':>9} {'all':>9} {'error':>7} {'share':>6}")
    for case in cases:
        operations, memory = DEVICES[case.device]
        products_s, all_s = counted_s(case, (operations, 1e30)), counted_s(case, (operations, memory))
        print(
            f"{case.name:34} {case.seconds:8.3f}s {products_s:8.3f}s {all_s:8.3f}s {all_s / case.seconds - 1:+7.0%} "
            f"{all_s / case.seconds:6.2f}"
        )


if __name__ == "__main__":
    main()
