"""Mistakes in the use of policies that would change a result silently are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.policy_ranks import line

import spawnsim
from spawnsim.errors import ParameterError, RankError
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    OneSidedSelectiveAveragingPolicy,
    ServerOptions,
    ServerRule,
    SpawnPolicy,
    WAGMAPolicy,
)


def warnings(make: Any, *, rebind: str = "both", ends: bool = True, steps: int = 20) -> list[str]:
    """Return the warnings of a run whose program rebinds "both" results of each call, the "model", or "none"."""

    def main(comm: Any) -> None:
        model, optimizer = line(float(comm.rank))
        policy = make(comm)
        for iteration in range(steps):
            with comm.compute(0.01):
                pass
            new = policy(iteration, model, optimizer, local_metric=float(comm.rank), group=comm)
            model = model if rebind == "none" else new[0]
            optimizer = optimizer if rebind != "both" else new[1]
        if ends:
            policy.shutdown()

    return list(spawnsim.run(main, ranks=4).what.get("warnings", ()))


def selective(builder: Any = lambda: line(0.0)) -> AsyncSelectiveAveragingPolicy:
    """Return a policy that replaces one of four ranks every second iteration, by a new model if there is a builder."""
    return AsyncSelectiveAveragingPolicy(builder, 2, 0.25, cooldown=0)


def test_a_result_that_is_not_taken_is_reported_with_the_line() -> None:
    """The old model, or the old optimizer alone; once for all calls and ranks."""
    (both,) = warnings(lambda _: selective(), rebind="none")
    assert "passes the model and the optimizer that an earlier call has replaced" in both
    assert "test_misuse.py:" in both
    (one,) = warnings(lambda _: selective(), rebind="model")
    assert "passes the optimizer that" in one


def test_results_that_are_taken_or_not_new_are_not_reported() -> None:
    """Without a builder a replaced rank keeps its objects."""
    assert warnings(lambda _: selective()) == []
    assert warnings(lambda _: selective(None), rebind="none") == []


@pytest.mark.parametrize(
    "make",
    [
        lambda _: selective(),
        lambda comm: OneSidedSelectiveAveragingPolicy(None, line(0.0)[0], 5, group=comm),
        lambda _: AsyncModelAveragePolicy(sync_interval_ms=20.0),
        lambda _: DecentralizedAveragingPolicy(5),
        lambda _: AsyncServerPolicy(ServerOptions(ServerRule(1.0, 0.0)), steps=2),
        lambda _: WAGMAPolicy(2),
    ],
)  # fmt: skip
def test_a_forgotten_shutdown_is_reported(make: Any) -> None:
    """By each policy that has something to end."""
    assert any("shutdown() was not called" in each for each in warnings(make, ends=False))
    assert not any("shutdown() was not called" in each for each in warnings(make))


@pytest.mark.parametrize("ends", [True, False])
def test_a_policy_that_drops_nothing_reports_only_that_it_was_never_due(ends: bool) -> None:
    """Synchronous averaging needs no shutdown."""
    assert warnings(lambda _: AverageAllPolicy(5), ends=ends) == []
    (never,) = warnings(lambda _: AverageAllPolicy(50), ends=ends)
    assert "then in 50, and the last iteration was 19" in never


def test_a_program_that_fails_gets_no_warning_of_its_shutdown() -> None:
    """Its error is what counts."""

    def main(comm: Any) -> None:
        selective()(0, *line(0.0), local_metric=0.0, group=comm)
        raise KeyError("mine")

    with pytest.raises(RankError) as caught:
        spawnsim.run(main, ranks=2)
    assert not any("shutdown" in note for note in getattr(caught.value, "__notes__", ()))


def test_a_shutdown_of_ones_own_counts_as_called() -> None:
    """Also if it does not call that of the base class."""

    class Own(SpawnPolicy):
        def act(self, iteration: int, model: Any, optimizer: Any, metric: Any, comm: Any, info: Any) -> Any:
            return model, optimizer

        def shutdown(self) -> None:
            pass

    assert warnings(lambda _: Own()) == []


@pytest.mark.parametrize("text", ["0.5", b"0.5"])
def test_a_metric_given_as_text_is_refused(text: Any) -> None:
    """`float` would take it."""
    with pytest.raises(ParameterError, match=r"local_metric is a \w+, b?'0.5': give one number"):
        warnings(lambda _: _Texting(text))


class _Texting(AverageAllPolicy):
    """Gives the metric as text."""

    def __init__(self, text: Any) -> None:
        super().__init__(5)
        self.text = text

    def __call__(self, *call: Any, **named: Any) -> Any:
        return super().__call__(*call, **named | {"local_metric": self.text})


def test_fewer_iterations_than_none_are_refused() -> None:
    """A loop over range() would run nothing, and the run end well."""

    def main(comm: Any, iterations: int = 3) -> None:
        comm.record(done=torch.zeros(iterations).numel())

    spawnsim.run(main, ranks=1, parameters={"iterations": 0})
    with pytest.raises(ParameterError, match="iterations=-5: give 0 or more"):
        spawnsim.run(main, ranks=1, parameters={"iterations": -5})
