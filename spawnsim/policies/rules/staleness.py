"""How a server applies changes of weights that arrive late: their weights, and when momentum acts.

A change Δ is a pseudo-gradient: a worker's initial weights minus its current weights. Its staleness s is the number of
changes that the server has applied since the worker began. Rules apply to arrays, tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spawnsim.errors import ParameterError

StalenessWeight = Callable[[int], float]


def constant(staleness: int) -> float:
    """Give all changes equal weight."""
    return 1.0


@dataclass(frozen=True, slots=True)
class Polynomial:
    """(1 + s)^-power, as in FedAsync, and with a power of 1/2 as in FedBuff.

    Args:
        power: the exponent, at least 0.

    Raises:
        ParameterError: `power` is negative.

    >>> [round(Polynomial()(staleness), 3) for staleness in (0, 1, 3)]
    [1.0, 0.707, 0.5]
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        if not self.power >= 0:
            raise ParameterError(f"power={self.power!r}: give a number of at least 0")

    def __call__(self, staleness: int) -> float:
        return float((1 + staleness) ** -self.power)


@dataclass(frozen=True, slots=True)
class ServerRule:
    """How a server steps: Θ ← Θ − lr·(…), at every arrival or at every `size`-th.

    With `delayed`, the rule is delayed Nesterov (Liu et al. 2024, arXiv 2401.09135): every arrival moves Θ by its Δ/N
    at once. Momentum, which is harmful on stale changes, is updated at every N-th arrival only, and applied there,
    except for a share c at each other arrival:
    m ← μm + mean Δ and Θ ← Θ − lr((1 − cN + c)μm + Δ/N) there, else Θ ← Θ − lr(cμm + Δ/N).
    Without `delayed`, the mean of N arrivals is a gradient for torch's SGD: buf ← μ·buf + mean and
    Θ ← Θ − lr(mean + μ·buf) with `nesterov`, else Θ ← Θ − lr·buf. N = 1 is the plain asynchronous server; N > 1 is
    FedBuff (Nguyen et al. 2022).

    Args:
        lr: outer learning rate, above 0.
        momentum: μ, from 0 to below 1.
        size: N, arrivals per momentum step, at least 1.
        delayed: whether to use delayed Nesterov.
        activation: c, the share of momentum between its updates, from 0 to 1/N; only with `delayed`.
        nesterov: whether to use Nesterov momentum; only without `delayed`.

    Raises:
        ParameterError: an argument is out of range.
    """

    lr: float = 0.7
    momentum: float = 0.9
    size: int = 1
    delayed: bool = False
    activation: float = 0.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1 and self.size >= 1):
            raise ParameterError(
                f"lr={self.lr!r}, momentum={self.momentum!r}, size={self.size!r}: give lr > 0, "
                "momentum from 0 to below 1, size >= 1"
            )
        if self.activation and not (self.delayed and 0 <= self.activation <= 1 / self.size):
            raise ParameterError(
                f"activation={self.activation!r}: give a number from 0 to 1/size, with delayed=True"
            )


class ServerOptimizer:
    """A server's weights Θ and the state of its rule.

    Args:
        rule: the update rule.
        weights: Θ, arrays or tensors of any shapes; they are not changed in place.
    """

    def __init__(self, rule: ServerRule, weights: Sequence[Any]) -> None:
        self.rule, self.weights = rule, list(weights)
        self.momenta: list[Any] = []
        self.sums: list[Any] = []
        self.arrivals = 0

    def take(self, changes: Sequence[Any], weight: float = 1.0) -> None:
        """Apply one arrival.

        Args:
            changes: Δ, with the shapes of the weights.
            weight: weight of this arrival.
        """
        # Zeros from the changes, which are finite; weights may be infinite, such as an attention mask.
        if not self.arrivals:
            self.momenta, self.sums = ([0 * each for each in changes] for _ in range(2))
        self.arrivals += 1
        fires = self.arrivals % self.rule.size == 0
        for place, change in enumerate(changes):
            self._take(place, change if weight == 1 else weight * change, fires)

    def _take(self, place: int, change: Any, fires: bool) -> None:
        rule, step = self.rule, 0
        # Skip operations without effect: each intermediate result allocates memory of a model's size.
        mean = change
        if rule.size > 1:
            total = self.sums[place] + change
            mean, self.sums[place] = (total / rule.size, 0 * total) if fires else (0, total)
        if fires:
            step = self._with_momentum(place, mean)
        if rule.delayed:
            share = 1 - rule.activation * (rule.size - 1) if fires else rule.activation
            step = share * rule.momentum * self.momenta[place] + change / rule.size
        self.weights[place] = self.weights[place] - rule.lr * step

    def _with_momentum(self, place: int, mean: Any) -> Any:
        beta = self.rule.momentum
        if not beta:
            return mean
        self.momenta[place] = beta * self.momenta[place] + mean
        return mean + beta * self.momenta[place] if self.rule.nesterov else self.momenta[place]


def local_steps(steps: int, speed: float, fastest: float, *, least: int = 5) -> int:
    """Return the number of local steps of a worker with which all workers arrive equally often (DyLU).

    Args:
        steps: steps of the fastest worker.
        speed: speed of this worker, in steps per second; 0 if still unknown.
        fastest: speed of the fastest worker.
        least: minimum number of steps.

    Returns:
        max(⌊steps·speed/fastest⌋, least), at most `steps`; `steps` while a speed is unknown.

    >>> [local_steps(20, 1 / seconds, 1 / 0.58) for seconds in (0.58, 0.75, 1.51, 3.33)]
    [20, 15, 7, 5]
    """
    if not (speed > 0 and fastest > 0):
        return steps
    return min(max(int(steps * speed / fastest + 1e-9), least), steps)
