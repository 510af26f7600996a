"""A generative flow network per rank: trajectory balance on a HyperGrid, the environment on which they are compared.

The environment is that of Bengio et al. (2021), arXiv:2106.04399, section 4.1; the loss that of Malkin et al. (2022),
arXiv:2201.13259, equation 14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from spawnsim.errors import ParameterError
from spawnsim.random import WORLD, Streams
from spawnsim.workloads.mlp import MLP

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


STATES_PER_CALL = 256  # a call on a few states takes as long as this many more would


class Flow(nn.Module):
    """Forward and backward policies over one network, and the logarithm of the total flow, `logZ` (0-dim)."""

    def __init__(
        self, grid: HyperGrid, hidden: int, learned_backward: bool, generator: torch.Generator
    ) -> None:
        super().__init__()
        outputs = grid.dimensions + 1 + (grid.dimensions if learned_backward else 0)
        self.grid, self.learned_backward = grid, learned_backward
        self.net = MLP((grid.dimensions * grid.height, hidden, hidden, outputs), generator)
        self.logZ = nn.Parameter(torch.zeros(()))

    def _scores(self, states: Tensor) -> Tensor:  # (n, dimensions) -> (n, outputs)
        scores: Tensor = self.net(one_hot(states, self.grid.height).flatten(1).float())
        return scores

    def log_forward(self, states: Tensor) -> Tensor:
        """Return log P(action | state), (n, dimensions + 1); the last action stops and is always allowed."""
        scores = self._scores(states)[:, : self.grid.dimensions + 1]
        # Masked by minus infinity before the softmax: a small number instead would leave forbidden actions a chance.
        full = pad(states == self.grid.height - 1, (0, 1), value=False)
        return scores.masked_fill(full, -torch.inf).log_softmax(1)

    def log_backward(self, states: Tensor) -> Tensor:
        """Return log P(coordinate stepped back | state), (n, dimensions); the origin has no way back (NaN)."""
        scores = torch.zeros(states.shape)
        if self.learned_backward:
            scores = self._scores(states)[:, self.grid.dimensions + 1 :]
        return scores.masked_fill(states == 0, -torch.inf).log_softmax(1)


@dataclass(frozen=True)
class Trajectories:
    """A batch of trajectories, as the flat list of their transitions in the order of time."""

    final: Tensor  # (batch, dimensions) int64: where each stopped
    owner: Tensor  # (transitions,) int64: the trajectory of each
    states: Tensor  # (transitions, dimensions) int64: before the action
    actions: Tensor  # (transitions,) int64: a coordinate, or `dimensions` to stop


class GFlowNet:
    """One rank's flow network: sampling, training step, and the modes that it has found.

    Args:
        rng: the rank's streams; draws from the purposes "gflownet.trajectories" and "gflownet.init".
        grid: the environment.
        batch: trajectories per step.
        hidden: width of the two hidden layers.
        lr, lr_logZ: Adam's learning rates for the network and for `logZ`.
        epsilon: chance of an action being drawn evenly from those allowed, in [0, 1].
        learned_backward: learn the backward policy; otherwise all parents of a state are equally likely.
        same_start: whether all ranks begin from the same weights.

    Attributes:
        found: numbers of the modes in which a trajectory of this rank has ended so far.
        fresh: those among them that the last step was the first to find.
    """

    def __init__(
        self,
        rng: Streams,
        grid: HyperGrid | None = None,
        *,
        batch: int = 16,
        hidden: int = 32,
        lr: float = 1e-2,
        lr_logZ: float = 1e-1,
        epsilon: float = 0.0,
        learned_backward: bool = False,
        same_start: bool = True,
    ) -> None:
        if batch < 1 or not 0 <= epsilon <= 1:
            raise ParameterError(f"batch={batch}, epsilon={epsilon}: give batch >= 1 and epsilon in [0, 1]")
        self.grid = grid if grid is not None else HyperGrid()
        self.batch, self.hidden, self.epsilon = batch, hidden, epsilon
        self.lr, self.lr_logZ, self.learned_backward = lr, lr_logZ, learned_backward
        self.found: set[int] = set()
        self.fresh: set[int] = set()
        self._draws = rng("gflownet.trajectories")
        self._starts = (Streams(rng.key[0], WORLD) if same_start else rng)("gflownet.init")

    @property
    def modes_found(self) -> int:
        """Number of distinct modes found so far."""
        return len(self.found)

    def build(self) -> tuple[Flow, torch.optim.Adam]:
        """Return a fresh model and its optimizer; asking again gives new initial weights."""
        generator = torch.Generator().manual_seed(int(self._starts.integers(2**63)))
        model = Flow(self.grid, self.hidden, self.learned_backward, generator)
        groups = [
            {"params": model.net.parameters(), "lr": self.lr},
            {"params": model.logZ, "lr": self.lr_logZ},
        ]
        return model, torch.optim.Adam(groups, fused=True)

    def step(self, model: Flow, optimizer: torch.optim.Optimizer) -> float:
        """Sample a batch, train on it, note its modes; return the loss before the update."""
        paths = self.sample(model)
        optimizer.zero_grad()
        loss = balance(model, paths)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ends = self.grid.number(paths.final[self.grid.is_mode(paths.final)])
        self.fresh = set(ends.tolist()) - self.found
        self.found |= self.fresh
        return loss.item()

    @torch.no_grad()
    def sample(self, model: Flow) -> Trajectories:
        """Follow the forward policy from the origin until each trajectory stops."""
        chances, stop = self._policy(model), self.grid.dimensions
        strides = np.append(self.grid.strides.numpy(), 0)
        at, alive, taken = np.zeros(self.batch, np.int64), np.arange(self.batch), []
        # Numbers of states instead of states, in numpy: arrays this small are cheaper there than in torch.
        for luck in self._draws.random((self.grid.longest, self.batch), np.float32):
            # The sum of float32 chances may fall short of 1: the last action, to stop, takes what is left.
            action = np.minimum((chances(at[alive]).cumsum(1) <= luck[alive, None]).sum(1), stop)
            taken.append((alive, at[alive], action))
            at[alive] += strides[action]
            alive = alive[action < stop]
            if not alive.size:
                break
        owner, states, actions = (
            torch.from_numpy(np.concatenate(parts)) for parts in zip(*taken, strict=True)
        )
        return Trajectories(self.grid.state(torch.from_numpy(at)), owner, self.grid.state(states), actions)

    def _policy(self, model: Flow) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
        """Return the map from numbers of states, (n,), to the chances of their actions, (n, dimensions + 1)."""
        if (
            self.grid.count <= STATES_PER_CALL * self.grid.longest
        ):  # one pass over the grid, or one per action
            return self._chances(model, self.grid.states()).__getitem__
        return lambda numbers: self._chances(model, self.grid.state(torch.from_numpy(numbers)))

    def _chances(self, model: Flow, states: Tensor) -> NDArray[np.float32]:
        chances = model.log_forward(states).exp_()
        if self.epsilon:
            allowed = (chances > 0).float()
            chances = chances.lerp(allowed / allowed.sum(1, keepdim=True), self.epsilon)
        return chances.numpy()


def balance(model: Flow, paths: Trajectories) -> Tensor:
    """Return the mean of (logZ + Σ log P_F − log R − Σ log P_B)² over trajectories, 0-dim."""
    forward = model.log_forward(paths.states).gather(1, paths.actions.unsqueeze(1)).squeeze(1)
    # Stopping is no move: it has no parent to step back to.
    moves = paths.actions < model.grid.dimensions
    way = paths.actions[moves].unsqueeze(1)
    children = paths.states[moves].scatter_add(1, way, torch.ones_like(way))
    backward = model.log_backward(children).gather(1, way).squeeze(1)
    gap = model.logZ - model.grid.reward(paths.final).log()
    # Summed by trajectory over a flat list: padding all to the longest would compute on empty places mostly.
    gap = gap.index_add(0, paths.owner, forward).index_add(0, paths.owner[moves], backward, alpha=-1)
    return gap.square().mean()


@torch.no_grad()
def distribution(model: Flow) -> Tensor:
    """Return the exact distribution over final states, (height^dimensions,) float64, by passing flow level by level."""
    grid, states = model.grid, model.grid.states()
    chances = model.log_forward(states).double().exp()
    visits = torch.zeros(len(states), dtype=torch.float64)
    visits[0] = 1.0
    depth = states.sum(1)
    # Level by level: each state has got all of its flow before any of it passes on.
    for level in range(grid.longest - 1):
        for axis, stride in enumerate(grid.strides.tolist()):
            leaving = torch.nonzero((depth == level) & (states[:, axis] < grid.height - 1)).squeeze(1)
            visits[leaving + stride] += visits[leaving] * chances[leaving, axis]
    return visits * chances[:, -1]


def l1_distance(model: Flow) -> float:
    """Return Σ |learned − target| over all states, in [0, 2]."""
    return (distribution(model) - model.grid.target()).abs().sum().item()
