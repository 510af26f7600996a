"""Averagers on virtual ranks: hivemind's checks at larger worlds, and what its interface promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from policies.averaging.averagers import averager_of, flat, play, rows

import spawnsim
from spawnsim.errors import ParameterError, Timeout, UsageError
from spawnsim.policies.averaging import (
    AveragingFailed,
    Cancelled,
    DecentralizedAverager,
    Exponential,
    Grid,
    RandomGroups,
    Stage,
)
from spawnsim.policies.averaging.interface import FIRST_TAG, LAST_TAG, Settings


def tensors(comm: Any) -> list[torch.Tensor]:
    """Return this rank's own normal values, in several shapes."""
    generator = torch.Generator().manual_seed(comm.rng.seed("values"))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((16,), (5, 2), ())]


def values_of(averager: DecentralizedAverager) -> list[float]:
    """Return the different values of the first tensor."""
    return torch.unique(averager.vector.tensors[0]).tolist()


# ------------------------------------------------------------------------------------------------------ averages
@pytest.mark.parametrize(
    ("clients", "auxiliaries"), [(0, 0), (3, 0), (0, 4), (1, 1), (2, 1), (1, 3), (3, 4), (0, 12)]
)
@pytest.mark.parametrize("background", [False, True])
def test_one_average(clients: int, auxiliaries: int, background: bool) -> None:
    """Twelve peers, some clients, some auxiliaries, with weights: the mean to 1e-6; auxiliaries only help."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray, float, Any]:
        client, auxiliary = comm.rank < clients, clients <= comm.rank < clients + auxiliaries
        values, weight = tensors(comm), float(comm.rng("weight").uniform(0.1, 9))
        before = flat(values)
        averager = averager_of(
            comm, values, start=background, part_size_bytes=64, client_mode=client, auxiliary=auxiliary
        )
        gathered = averager.step(gather={"rank": comm.rank}, weight=weight)
        averager.serve(0.1)
        averager.shutdown()
        return before, flat(values), weight, gathered

    returned = play(main, 12)
    before, after = rows(returned, 0), rows(returned, 1)
    helps = np.array([clients <= rank < clients + auxiliaries for rank in range(12)])
    if not helps.all():
        mean = np.average(before[~helps], axis=0, weights=rows(returned, 2)[~helps])
        assert np.abs(after[~helps] - mean).max() < 1e-6
        assert returned[11][3] == {rank: {"rank": rank} for rank in range(12)}
    assert (after[helps] == before[helps]).all()


def rounds_of(count: int, **parameters: Any) -> Callable[[Any], list[np.ndarray]]:
    """Return a program that averages once a virtual second."""

    def main(comm: Any) -> list[np.ndarray]:
        values = tensors(comm)
        own = {name: value(comm) if callable(value) else value for name, value in parameters.items()}
        averager = averager_of(comm, values, **own)
        history = [flat(values)]
        for round_ in range(count):
            averager.serve(max(round_ - comm.clock.now(), 0.0))
            averager.step()
            history.append(flat(values))
        averager.serve(0.6)
        averager.shutdown()
        return history

    return main


def test_keys_lead_to_the_exact_average() -> None:
    """Eight peers in pairs, two bits: the mean stays, spread never grows, and is gone after log_2 8 rounds."""
    main = rounds_of(5, target_group_size=2, initial_group_bits=lambda comm: format(comm.rank // 2, "02b"))
    returned = play(main, 8)
    history = np.stack([rows(returned, round_) for round_ in range(6)])
    assert np.abs(history.mean(axis=1) - history[0].mean(axis=0)).max() < 1e-12
    spread = history.std(axis=1).max(axis=1)
    assert (np.diff(spread) <= 1e-12).all()
    assert spread[2] > 1e-3
    assert spread[3:].max() < 1e-12


@pytest.mark.parametrize(
    ("rule", "ranks"), [(Exponential(), 16), (RandomGroups(4), 16), (Grid(), 16), (Grid(), 10)]
)
def test_static_groups_average(rule: Any, ranks: int) -> None:
    """Values after three rounds are those of plain averaging in the rule's groups."""
    returned = play(rounds_of(3, matchmaking=rule), ranks)
    expected = rows(returned, 0)
    for round_ in range(3):
        groups = [list(rule.members(rank, ranks, round_)) for rank in range(ranks)]
        expected = np.stack([expected[group].mean(axis=0) for group in groups])
    np.testing.assert_allclose(rows(returned, 3), expected, atol=1e-12)


def test_static_groups_wait_for_stragglers() -> None:
    """A rank that comes late finds its group waiting, and its request waits for a late leader; leaders log groups."""

    def main(comm: Any) -> None:
        comm.clock.sleep(0.02 * comm.rank)
        history[comm.rank] = rounds_of(2, matchmaking=Grid())(comm)

    history: dict[int, list[np.ndarray]] = {}
    run = spawnsim.run(main, ranks=9, platform="ethernet-10g")
    assert np.abs(rows(history, 2) - rows(history, 0).mean(axis=0)).max() < 1e-12
    assert [event["size"] for event in run.events if event["kind"] == "group"] == [3] * 6


def test_events_name_ranks_of_the_world() -> None:
    """As all other events do: ranks of a group mean nothing outside of it, and change with each recovery."""

    def main(comm: Any) -> None:
        rounds_of(1, matchmaking=Grid())(comm.Split(comm.rank % 2, -comm.rank))

    run = spawnsim.run(main, ranks=18, platform="ethernet-10g")
    groups = [event["members"] for event in run.events if event["kind"] == "group"]
    assert sorted(rank for group in groups for rank in group) == [*range(18)]


def test_alpha_goes_part_of_the_way() -> None:
    """Variance shrinks by (1 − α)², the mean stays."""
    returned = play(rounds_of(1, averaging_alpha=0.25), 8)
    before, after = rows(returned, 0), rows(returned, 1)
    np.testing.assert_allclose(after.var(axis=0), before.var(axis=0) * 0.75**2)
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0))


def test_averagers_of_several_prefixes_do_not_mix() -> None:
    """Three at the same time, over the same communicator, while the ranks sleep."""

    def main(comm: Any) -> Any:
        averagers = [
            averager_of(comm, comm.rank + 10.0 * index, 50_000 + 20_000 * index, prefix=prefix, start=True)
            for index, prefix in enumerate(("gradients", "parameters", "statistics"))
        ]
        controls = [averager.step(wait=False) for averager in averagers]
        comm.clock.sleep(2.0)
        assert all(control.done() and control.result().complete for control in controls)
        for averager in averagers:
            assert averager.shutdown()
            assert averager.shutdown()
            with pytest.raises(UsageError, match="after shutdown"):
                averager.step()
        return [values_of(averager) for averager in averagers]

    assert list(play(main, 4).values()) == [[[1.5], [11.5], [21.5]]] * 4


# --------------------------------------------------------------------------------------------------- step control
def test_triggers() -> None:
    """Those who wait for a trigger hold up the all-reduce, and nobody else's stage; `timeout` bounds searches."""

    def main(comm: Any) -> list[Stage]:
        averager = averager_of(comm, tensors(comm))
        control = averager.step(wait=False, timeout=0.6, require_trigger=comm.rank in (1, 2))
        stages = [control.stage]
        averager.serve(1.0)
        stages.append(control.stage)
        assert not control.done()
        control.weight = 2.0
        control.allow_allreduce()
        control.allow_allreduce()
        averager.serve(0.4)
        stages.append(control.stage)
        assert len(control.result()) == 4
        with pytest.warns(UserWarning, match="too late"):
            control.weight = 3.0
        return stages

    with pytest.warns(UserWarning, match="too late"):  # those who wait for no trigger have begun
        returned = play(main, 4)
    waits = [Stage.LOOKING_FOR_GROUP, Stage.AWAITING_TRIGGER, Stage.FINISHED]
    runs = [Stage.LOOKING_FOR_GROUP, Stage.RUNNING_ALLREDUCE, Stage.FINISHED]
    assert returned == {0: runs, 1: waits, 2: waits, 3: runs}


@pytest.mark.parametrize(("size", "client"), [(None, False), (2, False), (None, True)])
def test_cancelling(size: int | None, client: bool) -> None:
    """Two of four cancel while looking, perhaps a client; the others find each other."""

    def main(comm: Any) -> int:
        averager = averager_of(
            comm, tensors(comm), target_group_size=size, client_mode=client and comm.rank % 2 == 0
        )
        if comm.rank >= 2:
            control = averager.step(wait=False, scheduled_time=comm.clock.now() + 0.5)
            assert control.cancel()
            assert control.cancelled()
            assert not control.cancel()
            with pytest.raises(Cancelled):
                control.result()
            averager.serve(1.0)
            return 0
        averager.serve(0.1)
        return len(averager.step(timeout=2.0))

    assert play(main, 4) == {0: 2, 1: 2, 2: 0, 3: 0}


def test_steps_queue() -> None:
    """Steps asked for at once are carried out one after the other; one that is cancelled in the queue is not."""

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


def test_too_few_peers() -> None:
    """Alone, a step ends at its deadline, not later: None, or an error from the control; unless one is enough."""

    def main(comm: Any) -> tuple[float, float]:
        averager = averager_of(comm, tensors(comm))
        assert averager.step(timeout=2.0) is None
        retried_s = comm.clock.now()
        control = averager.step(timeout=2.0, allow_retries=False, wait=False)
        with pytest.raises(Timeout):
            control.result(timeout=0.1)
        with pytest.raises(AveragingFailed, match="too few peers"):
            control.result()
        once_s = comm.clock.now() - retried_s
        alone = averager_of(comm, 3.0, prefix="u", min_group_size=1)
        result = alone.step(gather="x", timeout=2.0)
        assert (dict(result), result.complete, values_of(alone)) == ({0: "x"}, True, [3.0])
        return retried_s, once_s

    assert play(main, 1)[0] == (pytest.approx(2.0, abs=1e-3), pytest.approx(0.5, abs=1e-3))


def test_without_a_timeout_a_search_ends_at_the_deadline() -> None:
    """Of the communicator: 30 s by default, more or less where the program says so; a late peer is waited for."""

    def main(comm: Any) -> Any:
        averager, alone_s = averager_of(comm, float(comm.rank)), 4.0
        if comm.rank == 0:
            with comm.clock.deadline(4.0):
                assert averager.step() is None
            alone_s = comm.clock.now()
        else:
            comm.clock.sleep(25.0)
        return averager.step() is not None, pytest.approx(alone_s, abs=0.01), values_of(averager)

    assert list(play(main, 2).values()) == [(True, 4.0, [0.5])] * 2


def test_other_tensors_are_named() -> None:
    """A rank that would never find a group with the others learns why."""

    def main(comm: Any) -> str:
        averager = averager_of(comm, compression="float16" if comm.rank else None)
        control = averager.step(wait=False, timeout=2.0)
        with pytest.raises(AveragingFailed) as caught:
            control.result()
        averager.serve(0.5)
        return str(caught.value)

    assert any("other tensors, compression or part sizes" in text for text in play(main, 2).values())


# ------------------------------------------------------------------------------------------------- bits, background
def test_bits_and_tensors() -> None:
    """Group bits are read and set, now or by futures; lent tensors are live, and a step waits for them."""

    def main(comm: Any) -> float:
        values = tensors(comm)
        averager = averager_of(comm, values, initial_group_bits="01")
        assert averager.get_group_bits() == averager.get_group_bits(wait=False).result() == "01"
        assert averager.set_group_bits("111", wait=False).result() is None
        assert averager.set_group_bits("110") is None
        assert averager.get_group_bits() == "110"
        with pytest.raises(ParameterError):
            averager.set_group_bits("abc")
        control = averager.step(wait=False)
        with averager.get_tensors() as lent:
            averager.serve(0.7)
            lent[0][:] = float(comm.rank)
            assert not control.done()
        control.result()
        return float(values[0][0])

    assert list(play(main, 4).values()) == [1.5] * 4


def test_run_in_background() -> None:
    """It waits until others are answered; not at all if that is wished; and not for ever."""

    def main(comm: Any) -> None:
        ready = averager_of(comm)
        assert ready.run_in_background(await_ready=True, timeout=1.0) is None
        assert ready.engine._ready
        ready.run_in_background(await_ready=False)
        late = averager_of(comm, prefix="u")
        late.engine._loop = lambda: comm.clock.sleep(3.0)  # type: ignore[method-assign]
        with pytest.raises(Timeout, match="not ready"):
            late.run_in_background(timeout=0.5)
        ready.shutdown()

    play(main, 1)


# -------------------------------------------------------------------------------------------------- what is refused
def test_one_prefix_has_one_averager_at_a_time() -> None:
    """A second one is refused until the first was shut down; not on another communicator, nor if the first failed."""

    def main(comm: Any) -> None:
        with pytest.raises(ParameterError):
            averager_of(comm, initial_group_bits="2")
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


def test_tags_by_prefix() -> None:
    """In the range that every MPI has, and the same everywhere."""
    tags = [Settings(f"prefix {n}").tag_or_default for n in range(200)]
    assert all(FIRST_TAG <= tag <= LAST_TAG for tag in tags)
    assert len(set(tags)) > 190
    assert Settings("policy").tag_or_default == Settings("policy").tag_or_default


def test_steps_that_cannot_be_are_refused_at_once() -> None:
    """A step that waits for a trigger nobody can give; one that is scheduled after its search has ended."""

    def main(comm: Any) -> None:
        averager = averager_of(comm)
        with pytest.raises(UsageError, match="wait=False"):
            averager.step(require_trigger=True)
        with pytest.raises(ParameterError, match="scheduled_time"):
            averager.step(scheduled_time=comm.clock.now() + 5.0, timeout=2.0)
        assert comm.clock.now() < 0.1

    play(main, 1)


def test_clients_share_nothing() -> None:
    """And cannot; `client_mode=None`, as where it is copied from elsewhere, is no client."""

    def main(comm: Any) -> None:
        client = averager_of(comm, client_mode=True)
        assert not client.allow_state_sharing
        with pytest.raises(ParameterError):
            client.allow_state_sharing = True
        assert averager_of(comm, prefix="u", client_mode=None).allow_state_sharing
        assert not averager_of(comm, prefix="v", auxiliary=True).allow_state_sharing

    play(main, 1)


@pytest.mark.parametrize(
    "bad",
    [
        {"request_timeout": 5.0}, {"min_group_size": 3, "target_group_size": 2}, {"averaging_alpha": 0.0},
        {"sender_timeout": 2.0, "reducer_timeout": 1.0}, {"client_mode": True, "auxiliary": True},
        {"bandwidth": -1.0}, {"part_size_bytes": 0}, {"compression": "zip"}, {"initial_group_bits": "2"},
        {"allreduce_timeout": math.nan},
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(bad: dict[str, Any]) -> None:
    """By the constructor."""
    with pytest.raises(ParameterError):
        Settings("t", **bad)
