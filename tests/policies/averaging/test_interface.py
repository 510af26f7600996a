"""What the averager's parameters and calls promise, beyond one average: several at once, queues, refusals, futures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from policies.averaging.averagers import averager_of, play

from spawnsim.errors import ParameterError, Timeout, UsageError
from spawnsim.policies.averaging import AveragingFailed, DecentralizedAverager, Stage
from spawnsim.policies.averaging.interface import FIRST_TAG, LAST_TAG, Settings


def value_of(averager: DecentralizedAverager) -> list[float]:
    """Return the different values of the tensor."""
    return torch.unique(averager.vector.tensors[0]).tolist()


# ------------------------------------------------------------------------------------------------ several averagers
def test_averagers_of_two_prefixes_do_not_mix() -> None:
    """Gradients and parameters at the same time, over the same communicator, in the background."""

    def main(comm: Any) -> Any:
        averagers = [
            averager_of(comm, comm.rank + 10.0 * index, 50_000 + 20_000 * index, prefix=prefix, start=True)
            for index, prefix in enumerate(("gradients", "parameters", "statistics"))
        ]
        controls = [averager.step(wait=False) for averager in averagers]
        results = [control.result() for control in controls]
        comm.clock.sleep(0.2)
        for averager in averagers:
            averager.shutdown()
        return [value_of(averager) for averager in averagers], [result.complete for result in results]

    assert set(map(str, play(main, 4).values())) == {str(([[1.5], [11.5], [21.5]], [True] * 3))}


def test_one_prefix_has_one_averager_at_a_time() -> None:
    """A second one is refused until the first was shut down; another communicator is another matter."""

    def main(comm: Any) -> None:
        first = averager_of(comm)
        with pytest.raises(UsageError, match="already"):
            averager_of(comm)
        averager_of(comm.Dup()).shutdown()
        with pytest.raises(UsageError, match="tag"):
            averager_of(comm, prefix="u", tag=first.settings.tag_or_default)
        averager_of(comm, prefix="u", tag=7101).shutdown()
        first.shutdown()
        averager_of(comm).shutdown()

    play(main, 2)


def test_an_averager_that_could_not_be_made_leaves_the_prefix_free() -> None:
    """Bad parameters are refused before the prefix is taken."""

    def main(comm: Any) -> None:
        with pytest.raises(ParameterError):
            averager_of(comm, initial_group_bits="2")
        averager_of(comm)

    play(main, 1)


def test_tags_by_prefix() -> None:
    """In the range that every MPI has, and the same everywhere."""
    tags = [Settings(f"prefix {n}").tag_or_default for n in range(200)]
    assert all(FIRST_TAG <= tag <= LAST_TAG for tag in tags)
    assert len(set(tags)) > 190
    assert Settings("policy").tag_or_default == Settings("policy").tag_or_default


# ------------------------------------------------------------------------------------------------------------ steps
def test_steps_queue() -> None:
    """Three steps asked for at once are carried out one after the other; one that is cancelled in the queue is not."""

    def main(comm: Any) -> Any:
        averager = averager_of(comm, float(comm.rank), target_group_size=3)
        controls = [averager.step(gather=n, wait=False) for n in range(4)]
        assert [control.stage for control in controls] == [Stage.LOOKING_FOR_GROUP] + [Stage.IDLE] * 3
        assert controls[2].cancel() or controls[2].cancel_requested
        results = [sorted(controls[n].result().values()) for n in (0, 1, 3)]
        averager.serve(0.1)
        assert controls[2].cancelled()
        return results

    assert list(play(main, 3).values()) == [[[0, 0, 0], [1, 1, 1], [3, 3, 3]]] * 3


def test_alone_with_a_minimum_of_one() -> None:
    """A group of one is a group; by default it is none."""

    def main(comm: Any) -> Any:
        alone = averager_of(comm, 3.0, min_group_size=1)
        result = alone.step(gather="x", timeout=2.0)
        return dict(result), result.complete, value_of(alone), averager_of(comm, prefix="u").step(timeout=2.0)

    assert play(main, 1) == {0: ({0: "x"}, True, [3.0], None)}


def test_what_cannot_be_is_refused_at_once() -> None:
    """A step that waits for a trigger nobody can give; one that is scheduled after its search has ended."""

    def main(comm: Any) -> None:
        averager = averager_of(comm)
        with pytest.raises(UsageError, match="wait=False"):
            averager.step(require_trigger=True)
        with pytest.raises(ParameterError, match="scheduled_time"):
            averager.step(scheduled_time=comm.clock.now() + 5.0, timeout=2.0)
        assert comm.clock.now() < 0.1

    play(main, 1)


def test_without_a_timeout_a_search_ends_at_the_deadline() -> None:
    """Of the communicator: 30 s by default, more or less where the program says so; a late peer is waited for."""

    def main(comm: Any) -> Any:
        averager, began_s = averager_of(comm, float(comm.rank)), comm.clock.now()
        if comm.rank == 0:
            with comm.clock.deadline(4.0):
                assert averager.step() is None
            alone_s = comm.clock.now() - began_s
        else:
            comm.clock.sleep(25.0)
            alone_s = 4.0
        return averager.step() is not None, alone_s, value_of(averager)

    for averaged, alone_s, value in play(main, 2).values():
        assert averaged
        assert alone_s == pytest.approx(4.0, abs=0.01)
        assert value == [0.5]


def test_timeout_bounds_the_search_and_not_the_trigger() -> None:
    """A group that waits for a trigger goes on after `timeout`."""

    def main(comm: Any) -> Any:
        averager = averager_of(comm, float(comm.rank))
        control = averager.step(wait=False, timeout=2.0, require_trigger=comm.rank == 0)
        averager.serve(5.0)
        control.allow_allreduce()
        control.result()
        return control.result().complete, value_of(averager)

    assert play(main, 2) == dict.fromkeys(range(2), (True, [0.5]))


def test_other_tensors_are_named() -> None:
    """Who would never find a group with the others is told why."""

    def main(comm: Any) -> str:
        averager = averager_of(comm, compression="float16" if comm.rank else None)
        control = averager.step(wait=False, timeout=2.0)
        with pytest.raises(AveragingFailed) as caught:
            control.result()
        averager.serve(0.5)
        return str(caught.value)

    assert any("other tensors, compression or part sizes" in text for text in play(main, 2).values())


# ------------------------------------------------------------------------------------------------- bits, background
def test_group_bits_now_or_later() -> None:
    """`wait=False` returns futures."""

    def main(comm: Any) -> None:
        averager = averager_of(comm, initial_group_bits="01")
        assert averager.get_group_bits(wait=True) == "01"
        assert averager.get_group_bits(wait=False).result() == "01"
        assert averager.set_group_bits("110") is None
        assert averager.set_group_bits("111", wait=False).result() is None
        assert averager.get_group_bits() == "111"

    play(main, 1)


def test_run_in_background() -> None:
    """It waits until others are answered; not at all if that is wished; and not for ever."""

    def main(comm: Any) -> None:
        ready = averager_of(comm)
        assert ready.run_in_background(await_ready=True, timeout=1.0) is None
        assert ready.engine._ready
        ready.run_in_background(await_ready=False)
        late = averager_of(comm, prefix="u")
        late.engine._go_on = lambda: comm.clock.sleep(3.0)  # type: ignore[method-assign]
        with pytest.raises(Timeout, match="not ready"):
            late.run_in_background(timeout=0.5)
        ready.shutdown()

    play(main, 1)


def test_client_mode_may_be_left_open() -> None:
    """None, as where it is copied from elsewhere, is no client."""

    def main(comm: Any) -> bool:
        return averager_of(comm, client_mode=None).allow_state_sharing

    assert play(main, 1) == {0: True}
