"""The outer level of training: the global weights of a model, the difference from them, and the outer step.

A rank trains θ; Θ are the weights that its group last agreed on. An outer optimizer uses the pseudo-gradient
Δ = Θ − θ, averaged over the group, as a gradient of Θ. Vectors are in main memory, half precision as float32, one flat
row per dtype; models on the meta device have no vectors. Must not know communicators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from spawnsim.errors import ParameterError
from spawnsim.policies.state.arithmetic import CPU, META, all_finite, new_buffer, sum_dtype
from spawnsim.policies.state.layout import Entry, Layout, Tensors
from spawnsim.policies.state.snapshot import device_of, laid_out, lay_out

_Rows = Sequence[torch.Tensor]


class FlatFloats:
    """Vectors with the shapes of some tensors, initially 0: `rows` to compute with, `memory` to send.

    Args:
        layout: names, shapes and dtypes (float32 or float64) of the tensors.
        device: device of the model's tensors; vectors have no data for the meta device, else main memory.
    """

    def __init__(self, layout: Layout, device: torch.device = CPU) -> None:
        self.layout, self.device = layout, device
        self.memory = new_buffer(layout.nbytes, torch.uint8, META if device == META else CPU).zero_()
        self.rows: list[torch.Tensor] = list(layout.flat(self.memory).values())

    @classmethod
    def of(cls, live: Tensors) -> FlatFloats:
        """Return a copy of floating-point tensors."""
        entries = [Entry(name, sum_dtype(each.dtype), tuple(each.shape)) for name, each in live.items()]
        found = cls(Layout(entries), device_of(live))
        found.read(live)
        return found

    def over(self, memory: torch.Tensor) -> FlatFloats:
        """Return vectors of the same shapes over other uint8 memory, such as memory received from another rank."""
        found = FlatFloats.__new__(FlatFloats)
        found.layout, found.device, found.memory = self.layout, self.device, memory
        found.rows = list(self.layout.flat(memory).values())
        return found

    def zeros(self) -> FlatFloats:
        return FlatFloats(self.layout, self.device)

    def read(self, live: Tensors) -> None:
        lay_out(self.layout, self.memory, live, self.device)

    def tensors(self) -> Tensors:
        """Return the values by name, on the device of the model's tensors; in main memory as views."""
        return laid_out(self.layout, self.memory, self.device)

    def copies(self) -> Tensors:
        return {name: each.clone() for name, each in self.tensors().items()}

    def set_difference(self, weights: FlatFloats) -> int:
        """Replace each value v by `weights` − v, or 0 if that is not finite; return the number of such zeros."""
        found = 0
        for row, other in zip(self.rows, weights.rows, strict=True):
            torch.sub(other, row, out=row)
            if not all_finite(row):
                found += int((~torch.isfinite(row)).sum())
                row.nan_to_num_(0.0, 0.0, 0.0)
        return found

    def norm(self) -> float:
        """Return the Euclidean norm of all values, summed in float64; 0 on the meta device."""
        if self.device == META:
            return 0.0
        return math.sqrt(sum(float(row.double().square().sum()) for row in self.rows))


@dataclass(frozen=True, slots=True)
class OuterSGD:
    """The outer optimizer: torch.optim.SGD's rule on pseudo-gradients, or on their sign.

    buf ← momentum·buf + Δ/γ, then Θ ← Θ − lr·γ·d, with d = buf (heavy ball) or Δ/γ + momentum·buf (Nesterov); γ is 1
    unless the caller passes another `scale` (SlowMo's inner learning rate).

    Args:
        lr: the outer learning rate, at least 0.
        momentum: the momentum, from 0 to below 1.
        nesterov: whether to use Nesterov momentum.
        sign: whether to use only the sign of d for each weight.
        clip: bound of the magnitude of each number of buf, above 0.

    Raises:
        ParameterError: an argument is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    sign: bool = False
    clip: float = math.inf

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and 0 <= self.momentum < 1 and self.clip > 0):
            raise ParameterError(
                f"outer lr={self.lr!r}, momentum={self.momentum!r}, clip={self.clip!r}: "
                "give lr >= 0, 0 <= momentum < 1, clip > 0"
            )

    def step(self, weights: _Rows, buffers: _Rows, deltas: _Rows, scale: float = 1.0) -> None:
        """Move the weights; momentum buffers, of the same shapes, begin as 0. `scale` is γ. Overwrites the deltas."""
        for weight, buffer, delta in zip(weights, buffers, deltas, strict=True):
            if scale != 1:
                delta.div_(scale)
            buffer.mul_(self.momentum).add_(delta)
            if self.clip < math.inf:
                buffer.clamp_(-self.clip, self.clip)
            towards = delta.add_(buffer, alpha=self.momentum) if self.nesterov else buffer
            weight.add_(towards.sign() if self.sign else towards, alpha=-self.lr * scale)


class Fragment:
    """Global weights and outer momentum of some of a model's tensors, and a work vector.

    Args:
        live: the tensors, floating-point; their values are the first global weights.
    """

    def __init__(self, live: Tensors) -> None:
        self.names = tuple(live)
        self.weights = FlatFloats.of(live)
        self.momentum, self.delta = self.weights.zeros(), self.weights.zeros()

    @property
    def nbytes(self) -> int:
        return self.weights.layout.nbytes

    def copy(self) -> Fragment:
        return Fragment.from_state(self.state())

    def state(self) -> dict[str, Tensors]:
        return {"weights": self.weights.copies(), "momentum": self.momentum.copies()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensors]) -> Fragment:
        """Return a fragment with this state."""
        found = cls(state["weights"])
        found.momentum.read(state["momentum"])
        return found

    def read_difference(self, live: Tensors) -> int:
        """Set `delta` to Θ − θ, with 0 for non-finite numbers; return how many there were."""
        self.delta.read({name: live[name] for name in self.names})
        return self.delta.set_difference(self.weights)

    def step(self, rule: OuterSGD, scale: float = 1.0) -> None:
        """Move the weights by `delta`, which is overwritten; for `scale` see `OuterSGD.step`."""
        rule.step(self.weights.rows, self.momentum.rows, self.delta.rows, scale)


def radial_directional_mean(
    parts: Sequence[FlatFloats], weights: Sequence[float], plain: Callable[[str], bool] = lambda _: False
) -> FlatFloats:
    """Return the mean of vectors, tensor by tensor: the weighted mean of norms, in the weighted mean direction.

    (Σ w‖Δ‖/Σw) · φ(Σ w φ(Δ)), with φ(x) = x/‖x‖: the plain mean of M orthogonal directions is shorter by √M, this mean
    is not. Where directions cancel out, the mean is 0. Source: Decoupled DiLoCo (arXiv 2604.21428).

    Args:
        parts: vectors of the same shapes, all finite.
        weights: weight of each part, at least 0, not all 0.
        plain: function that selects, by name, the tensors that use the plain weighted mean.
    """
    found = parts[0].zeros()
    if found.device == META:
        return found
    total = float(sum(weights))
    views = [part.layout.views(part.memory) for part in parts]
    for name, mean in found.layout.views(found.memory).items():
        norms = [float(view[name].double().norm()) for view in views]
        for view, weight, norm in zip(views, weights, norms, strict=True):
            scale = weight / total if plain(name) else weight / norm if norm else 0.0
            mean.add_(view[name], alpha=scale)
        if plain(name):
            continue
        length = float(mean.double().norm())
        if length <= 8 * torch.finfo(mean.dtype).eps * total:  # a remainder of rounding has no direction
            mean.zero_()
        else:
            radius = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / total
            mean.mul_(radius / length)
    return found
