"""HyperGrid: the environment on which generative flow networks are usually compared.

Knows states, rewards and modes; must not know models, trajectories or ranks. After Bengio et al. (2021),
arXiv:2106.04399, section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spawnsim.errors import ParameterError

ENUMERABLE = 2**20  # states; beyond that, exact distributions would not fit


@dataclass(frozen=True)
class HyperGrid:
    """Points of {0..height-1}^dimensions. An action adds 1 to one coordinate, or stops and earns R(x).

    R(x) = r0 + r1·Π 1[0.25 < a] + r2·Π 1[0.3 < a < 0.4], a = |x/(height-1) − 1/2|, products over coordinates. The
    states with the last term are the modes; 2 x 8 x 8 has four of them.
    """

    dimensions: int = 2
    height: int = 8
    r0: float = 0.1
    r1: float = 0.5
    r2: float = 2.0

    def __post_init__(self) -> None:
        if self.dimensions < 1 or self.height < 2:
            raise ParameterError(f"{self}: give dimensions >= 1 and height >= 2")
        if self.r0 <= 0 or self.r1 < 0 or self.r2 < 0:
            raise ParameterError(f"{self}: give r0 > 0 (its logarithm is taken), r1 >= 0 and r2 >= 0")

    @property
    def longest(self) -> int:
        """Actions of the longest trajectory, the final stop included."""
        return self.dimensions * (self.height - 1) + 1

    def _twice_off_centre(self, states: Tensor) -> Tensor:
        # a = this / (2·(height-1)): integers keep 0.3 and 0.4 exact, and the grid symmetric.
        return (2 * states - (self.height - 1)).abs()

    def is_mode(self, states: Tensor) -> Tensor:
        """Return whether states (..., dimensions) int64 earn the r2 term, (...) bool."""
        off, side = self._twice_off_centre(states), self.height - 1
        return ((10 * off > 6 * side) & (10 * off < 8 * side)).all(-1)

    def reward(self, states: Tensor) -> Tensor:
        """Return R of states (..., dimensions) int64, (...) float32."""
        rim = (2 * self._twice_off_centre(states) > self.height - 1).all(-1)
        return self.r0 + self.r1 * rim.float() + self.r2 * self.is_mode(states).float()

    @cached_property
    def strides(self) -> Tensor:
        """Weights of the coordinates in a state's number, (dimensions,) int64."""
        return self.height ** torch.arange(self.dimensions - 1, -1, -1)

    def number(self, states: Tensor) -> Tensor:
        """Return the number of states (..., dimensions), in row-major order, (...) int64."""
        return (states * self.strides).sum(-1)

    def state(self, numbers: Tensor) -> Tensor:
        """Return the states of numbers (...) int64, (..., dimensions) int64."""
        return numbers.unsqueeze(-1) // self.strides % self.height

    @property
    def count(self) -> int:
        """Number of states."""
        return int(self.height**self.dimensions)

    def states(self) -> Tensor:
        """Return all states in the order of their numbers, (height^dimensions, dimensions) int64."""
        if self.count > ENUMERABLE:
            raise ParameterError(f"{self} has {self.count} states: enumerate at most {ENUMERABLE}")
        return self.state(torch.arange(self.count))

    def target(self) -> Tensor:
        """Return the distribution to be learned, R/ΣR over all states, (height^dimensions,) float64."""
        rewards = self.reward(self.states()).double()
        return rewards / rewards.sum()
