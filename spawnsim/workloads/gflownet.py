"""A generative flow network per rank: trajectory balance on HyperGrid, the common benchmark environment.

The environment is defined in Bengio et al. (2021), arXiv:2106.04399, section 4.1; the loss in Malkin et al. (2022),
arXiv:2201.13259, equation 14.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from spawnsim.errors import ParameterError
from spawnsim.random import WORLD, Streams
from spawnsim.training import TrainingStep
from spawnsim.workloads.mlp import MLP

ENUMERABLE = 2**20  # states; exact distributions of larger grids would not fit in memory


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
        return int(self.height**self.dimensions)

    def states(self) -> Tensor:
        """Return all states in the order of their numbers, (height^dimensions, dimensions) int64."""
        if self.count > ENUMERABLE:
            raise ParameterError(f"{self} has {self.count} states: enumerate at most {ENUMERABLE}")
        return self.state(torch.arange(self.count))

    def target(self) -> Tensor:
        """Return the target distribution, R/ΣR over all states, (height^dimensions,) float64."""
        rewards = self.reward(self.states()).double()
        return rewards / rewards.sum()


STATES_PER_CALL = 256  # a call on few states takes as long as one on this many


def one_hot(numbers: Tensor, count: int) -> Tensor:
    """Return one-hot vectors, (..., count) float32; unlike torch's own function, without reading the values."""
    return (numbers.unsqueeze(-1) == torch.arange(count)).float()


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
        scores: Tensor = self.net(one_hot(states, self.grid.height).flatten(1))
        return scores

    def log_forward(self, states: Tensor) -> Tensor:
        """Return log P(action | state), (n, dimensions + 1); the last action stops and is always allowed."""
        scores = self._scores(states)[:, : self.grid.dimensions + 1]
        # Masked by minus infinity before the softmax: a small number would give forbidden actions a positive
        # probability.
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
    """A batch of trajectories, each padded to the longest length: entries after a trajectory's stop do not count.

    Shapes do not depend on the model, so that trajectories of many ranks can be batched.
    """

    final: Tensor  # (batch, dimensions) int64: final state of each
    states: Tensor  # (longest, batch, dimensions) int64: before the action
    actions: Tensor  # (longest, batch) int64: a coordinate, or `dimensions` to stop
    alive: Tensor  # (longest, batch) bool: whether it is still moving before the action


def sample(model: Flow, luck: Tensor, epsilon: float = 0.0) -> Trajectories:
    """Follow the forward policy from the origin until each trajectory stops.

    Args:
        model: the policies.
        luck: uniform numbers in [0, 1) that determine the actions, (longest, batch) float32.
        epsilon: probability of drawing an action uniformly from the allowed ones.
    """
    grid = model.grid
    with torch.no_grad():
        chances = _policy(model, epsilon)
        at, alive = torch.zeros_like(luck[0], dtype=torch.int64), luck[0] >= 0
        strides = torch.cat([grid.strides, grid.strides.new_zeros(1)])
        taken = []
        for each in luck.unbind():
            # The sum of float32 probabilities may be less than 1: the last action, to stop, takes the remainder.
            action = (chances(at).cumsum(-1) <= each.unsqueeze(-1)).sum(-1).clamp(max=grid.dimensions)
            taken.append((at, action, alive))
            at = at + strides[action] * alive
            alive = alive & (action < grid.dimensions)
        numbers, actions, lives = (torch.stack(parts) for parts in zip(*taken, strict=True))
        return Trajectories(grid.state(at), grid.state(numbers), actions, lives)


def _policy(model: Flow, epsilon: float) -> Callable[[Tensor], Tensor]:
    """Return the map from numbers of states, (n,), to the probabilities of their actions, (n, dimensions + 1)."""
    # One pass over the grid, or one for each action.
    if model.grid.count <= STATES_PER_CALL * model.grid.longest:
        table = _chances(model, model.grid.states(), epsilon)
        return lambda numbers: table[numbers]
    return lambda numbers: _chances(model, model.grid.state(numbers), epsilon)


def _chances(model: Flow, states: Tensor, epsilon: float) -> Tensor:
    chances = model.log_forward(states).exp()
    if epsilon:
        allowed = (chances > 0).float()
        chances = chances.lerp(allowed / allowed.sum(1, keepdim=True), epsilon)
    return chances


def balance(model: Flow, paths: Trajectories) -> Tensor:
    """Return the mean of (logZ + Σ log P_F − log R − Σ log P_B)² over trajectories, 0-dim."""
    grid = model.grid
    length, batch = paths.actions.shape
    # Stopping is not a move: it has no parent to step back to. Entries that do not count are computed at the far
    # corner, whose parents exist, and multiplied by zero.
    moves = paths.alive & (paths.actions < grid.dimensions)
    step = one_hot(paths.actions, grid.dimensions).long()
    children = torch.where(moves.unsqueeze(-1), paths.states + step, grid.height - 1).flatten(0, 1)
    way = torch.where(moves, paths.actions, 0).view(-1, 1)
    # After its stop, a trajectory keeps its state and stops again: always allowed.
    taken = torch.where(paths.alive, paths.actions, grid.dimensions).view(-1, 1)
    forward = model.log_forward(paths.states.flatten(0, 1)).gather(1, taken).view(length, batch)
    backward = model.log_backward(children).gather(1, way).view(length, batch)
    gap = model.logZ - grid.reward(paths.final).log()
    gap = gap + (forward * paths.alive).sum(0) - (backward * moves).sum(0)
    return gap.square().mean()


def loss_of(epsilon: float, model: Flow, luck: Tensor) -> tuple[Tensor, Tensor]:
    """Sample trajectories; return their loss, 0-dim, and their final states, (batch, dimensions)."""
    paths = sample(model, luck, epsilon)
    return balance(model, paths), paths.final


class GFlowNet:
    """One rank's flow network: sampling, training step, and the modes that it has found.

    Args:
        rng: the rank's streams; draws from the purposes "gflownet.trajectories" and "gflownet.init".
        grid: the environment.
        batch: trajectories per step.
        hidden: width of the two hidden layers.
        lr, lr_logZ: Adam's learning rates for the network and for `logZ`.
        epsilon: probability of drawing an action uniformly from the allowed ones, in [0, 1].
        learned_backward: learn the backward policy; otherwise all parents of a state are equally likely.
        same_start: whether all ranks start from the same weights.
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
        self._found: set[int] = set()
        self._fresh: set[int] = set()
        self._train = TrainingStep(partial(loss_of, epsilon))
        self._draws = rng("gflownet.trajectories")
        self._starts = (Streams(rng.key[0], WORLD) if same_start else rng)("gflownet.init")

    @property
    def found(self) -> set[int]:
        return self._found

    @property
    def fresh(self) -> set[int]:
        return self._fresh

    @property
    def modes_found(self) -> int:
        return len(self.found)

    def build(self) -> tuple[Flow, torch.optim.Adam]:
        """Return a fresh model and its optimizer; each call draws new initial weights."""
        generator = torch.Generator().manual_seed(int(self._starts.integers(2**63)))
        model = Flow(self.grid, self.hidden, self.learned_backward, generator)
        groups = [
            {"params": model.net.parameters(), "lr": self.lr},
            {"params": model.logZ, "lr": self.lr_logZ},
        ]
        return model, torch.optim.Adam(groups, fused=True)

    def luck(self) -> Tensor:
        """Draw the random numbers of the next trajectories, (longest, batch) float32 in [0, 1)."""
        return torch.from_numpy(self._draws.random((self.grid.longest, self.batch), np.float32))

    def step(self, model: Flow, optimizer: torch.optim.Optimizer) -> Tensor:
        """Sample a batch, train on it, record its modes; return the loss before the update, 0-dim."""
        loss, final = self._train(model, optimizer, self.luck())
        ends = self.grid.number(final[self.grid.is_mode(final)])
        self._fresh = set(ends.tolist()) - self._found
        self._found |= self._fresh
        return loss


@torch.no_grad()
def distribution(model: Flow) -> Tensor:
    """Return the exact distribution over final states, (height^dimensions,) float64, computed level by level."""
    grid, states = model.grid, model.grid.states()
    chances = model.log_forward(states).double().exp()
    visits = torch.zeros(len(states), dtype=torch.float64)
    visits[0] = 1.0
    depth = states.sum(1)
    # Level by level: each state has received all of its flow before it passes any on.
    for level in range(grid.longest - 1):
        for axis, stride in enumerate(grid.strides.tolist()):
            leaving = torch.nonzero((depth == level) & (states[:, axis] < grid.height - 1)).squeeze(1)
            visits[leaving + stride] += visits[leaving] * chances[leaving, axis]
    return visits * chances[:, -1]


def l1_distance(model: Flow) -> float:
    """Return Σ |learned − target| over all states, in [0, 2]."""
    return (distribution(model) - model.grid.target()).abs().sum().item()
