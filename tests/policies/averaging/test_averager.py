"""Averagers on virtual ranks: hivemind's checks at larger worlds, and what its interface promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

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

QUICK = {"min_matchmaking_time": 0.5, "request_timeout": 0.3}
Values = dict[int, np.ndarray]


def tensors(comm: Any) -> list[torch.Tensor]:
    """Return this rank's own normal values, in several shapes."""
    generator = torch.Generator().manual_seed(comm.rng.seed("values"))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((16,), (5, 2), ())]


def flat(parts: list[torch.Tensor]) -> np.ndarray:
    """Return all values as one array."""
    return np.concatenate([part.reshape(-1).numpy() for part in parts]).copy()


def world(
    main: Callable[[Any], Any], ranks: int, **circumstances: Any
) -> tuple[dict[int, Any], spawnsim.Run]:
    """Run a program; return what it returned on each rank."""
    returned: dict[int, Any] = {}

    def kept(comm: Any) -> None:
        returned[comm.Get_rank()] = main(comm)

    run = spawnsim.run(kept, ranks=ranks, platform="ethernet-10g", seed=7, **circumstances)
    return returned, run


def rows(returned: dict[int, Any], index: int) -> np.ndarray:
    """Return one of the things that ranks returned, stacked by rank."""
    return np.stack([returned[rank][index] for rank in sorted(returned)])


@pytest.mark.parametrize("clients", range(4))
@pytest.mark.parametrize("auxiliaries", range(5))
def test_one_average(clients: int, auxiliaries: int) -> None:
    """Twelve peers, up to three clients and four auxiliaries: the mean to 1e-6; auxiliaries only help."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray, Any]:
        client, auxiliary = comm.rank < clients, clients <= comm.rank < clients + auxiliaries
        values = tensors(comm)
        before = flat(values)
        averager = DecentralizedAverager(
            values,
            comm,
            start=False,
            prefix="t",
            **QUICK,
            part_size_bytes=64,
            client_mode=client,
            auxiliary=auxiliary,
        )
        gathered = averager.step(gather={"rank": comm.rank})
        averager.serve(0.1)
        averager.shutdown()
        return before, flat(values), gathered

    returned, _ = world(main, 12)
    before, after = rows(returned, 0), rows(returned, 1)
    helps = np.array([clients <= rank < clients + auxiliaries for rank in range(12)])
    assert np.abs(after[~helps] - before[~helps].mean(axis=0)).max() < 1e-6
    assert (after[helps] == before[helps]).all()
    assert all(
        gathered == {rank: {"rank": rank} for rank in gathered} for _, _, gathered in returned.values()
    )
    assert len(returned[11][2]) == 12


def test_auxiliaries_alone_change_nothing() -> None:
    """Nobody sends: the step ends at once, and values stay."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray]:
        values = tensors(comm)
        before = flat(values)
        averager = DecentralizedAverager(values, comm, start=False, prefix="t", **QUICK, auxiliary=True)
        assert averager.step() is not None
        return before, flat(values)

    returned, run = world(main, 4)
    assert (rows(returned, 0) == rows(returned, 1)).all()
    assert run.totals["virtual_seconds"] < 1.0


def test_weights() -> None:
    """The weighted mean of sixteen peers to 1e-6."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray, float]:
        values, weight = tensors(comm), float(comm.rng("weight").uniform(0.1, 9))
        before = flat(values)
        averager = DecentralizedAverager(values, comm, start=False, prefix="t", target_group_size=16, **QUICK)
        averager.step(weight=weight)
        return before, flat(values), weight

    returned, _ = world(main, 16)
    expected = np.average(rows(returned, 0), axis=0, weights=rows(returned, 2))
    assert np.abs(rows(returned, 1) - expected).max() < 1e-6


def rounds_of(count: int, **parameters: Any) -> Callable[[Any], list[np.ndarray]]:
    """Return a program that averages once a virtual second."""

    def main(comm: Any) -> list[np.ndarray]:
        values = tensors(comm)
        own = {name: value(comm) if callable(value) else value for name, value in parameters.items()}
        averager = DecentralizedAverager(values, comm, start=False, prefix="t", **(QUICK | own))
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
    returned, _ = world(main, 8)
    history = np.stack([np.stack(returned[rank]) for rank in range(8)], axis=1)
    assert np.abs(history.mean(axis=1) - history[0].mean(axis=0)).max() < 1e-12
    spread = history.std(axis=1).max(axis=1)
    assert (np.diff(spread) <= 1e-12).all()
    assert spread[2] > 1e-3
    assert spread[3:].max() < 1e-12


@pytest.mark.slow
def test_a_grid_of_256_is_exact_in_two_rounds() -> None:
    """256 = 16²: both mean and values to 1e-12."""
    returned, run = world(rounds_of(2, matchmaking=Grid()), 256)
    history = np.stack([np.stack(returned[rank]) for rank in range(256)], axis=1)
    assert np.abs(history[2] - history[0].mean(axis=0)).max() < 1e-12
    assert np.abs(history[1] - history[0].mean(axis=0)).max() > 0.01
    sizes = [event["size"] for event in run.events if event["kind"] == "group"]
    assert sizes == [16] * 32


@pytest.mark.parametrize("rule", [Exponential(), RandomGroups(4), Grid()])
def test_static_groups_average(rule: Any) -> None:
    """Values after three rounds are those of plain averaging in the rule's groups."""
    returned, _ = world(rounds_of(3, matchmaking=rule), 16)
    expected = np.stack([returned[rank][0] for rank in range(16)])
    for round_ in range(3):
        expected = np.stack(
            [expected[list(rule.members(rank, 16, round_))].mean(axis=0) for rank in range(16)]
        )
    np.testing.assert_allclose(np.stack([returned[rank][3] for rank in range(16)]), expected, atol=1e-12)


def test_static_groups_wait_for_stragglers() -> None:
    """A rank that comes late finds its group waiting, and its request waits for a late leader."""

    def main(comm: Any) -> list[np.ndarray]:
        comm.clock.sleep(0.02 * comm.rank)
        return rounds_of(2, matchmaking=Grid())(comm)

    returned, _ = world(main, 9)
    last = np.stack([returned[rank][2] for rank in range(9)])
    assert np.abs(last - np.mean([returned[rank][0] for rank in range(9)], axis=0)).max() < 1e-12


def test_alpha_goes_part_of_the_way() -> None:
    """Variance shrinks by (1 − α)², the mean stays."""
    returned, _ = world(rounds_of(1, averaging_alpha=0.25), 8)
    before, after = rows(returned, 0), rows(returned, 1)
    np.testing.assert_allclose(after.var(axis=0), before.var(axis=0) * 0.75**2)
    np.testing.assert_allclose(after.mean(axis=0), before.mean(axis=0))


# --------------------------------------------------------------------------------------------------- step control
def test_triggers() -> None:
    """Groups form at once; those who wait for a trigger hold up the all-reduce, and nobody else's stage."""

    def main(comm: Any) -> list[Stage]:
        averager = DecentralizedAverager(tensors(comm), comm, start=False, prefix="t", **QUICK)
        control = averager.step(wait=False, require_trigger=comm.rank in (1, 2))
        stages = [control.stage]
        averager.serve(0.6)
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
        returned, _ = world(main, 4)
    waits = [Stage.LOOKING_FOR_GROUP, Stage.AWAITING_TRIGGER, Stage.FINISHED]
    runs = [Stage.LOOKING_FOR_GROUP, Stage.RUNNING_ALLREDUCE, Stage.FINISHED]
    assert returned == {0: runs, 1: waits, 2: waits, 3: runs}


@pytest.mark.parametrize("size", [None, 2])
def test_cancelling(size: int | None) -> None:
    """Two of four cancel while looking; the others find each other."""

    def main(comm: Any) -> int:
        averager = DecentralizedAverager(
            tensors(comm), comm, start=False, prefix="t", target_group_size=size, **QUICK
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

    returned, _ = world(main, 4)
    assert returned == {0: 2, 1: 2, 2: 0, 3: 0}


def test_too_few_peers() -> None:
    """Alone, a step ends at its deadline, not later: None, or an error from the control."""

    def main(comm: Any) -> tuple[float, float]:
        averager = DecentralizedAverager(tensors(comm), comm, start=False, prefix="t", **QUICK)
        began_s = comm.clock.now()
        assert averager.step(timeout=2.0) is None
        retried_s = comm.clock.now() - began_s
        control = averager.step(timeout=2.0, allow_retries=False, wait=False)
        with pytest.raises(Timeout):
            control.result(timeout=0.1)
        with pytest.raises(AveragingFailed, match="too few peers"):
            control.result()
        return retried_s, comm.clock.now() - began_s - retried_s

    returned, _ = world(main, 1)
    assert returned[0] == (pytest.approx(2.0, abs=1e-3), pytest.approx(0.5, abs=1e-3))


def test_bits_and_tensors() -> None:
    """Group bits are read and set; lent tensors are the live ones; a step waits while they are lent."""

    def main(comm: Any) -> float:
        values = tensors(comm)
        averager = DecentralizedAverager(
            values, comm, start=False, prefix="t", initial_group_bits="01", **QUICK
        )
        assert averager.get_group_bits() == "01"
        averager.set_group_bits("110")
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

    returned, _ = world(main, 4)
    assert list(returned.values()) == [1.5] * 4


def test_background_progress() -> None:
    """Ranks that only compute and sleep are served by their averagers in the background."""

    def main(comm: Any) -> tuple[np.ndarray, np.ndarray]:
        values = tensors(comm)
        before = flat(values)
        averager = DecentralizedAverager(values, comm, prefix="t", start=True, **QUICK)
        control = averager.step(wait=False)
        comm.clock.sleep(2.0)
        assert control.done()
        assert averager.shutdown()
        assert averager.shutdown()
        with pytest.raises(UsageError, match="after shutdown"):
            averager.step()
        return before, flat(values)

    returned, _ = world(main, 5)
    assert np.abs(rows(returned, 1) - rows(returned, 0).mean(axis=0)).max() < 1e-12


# -------------------------------------------------------------------------------------------------- state sharing
class WithState(DecentralizedAverager):
    """Shares some numbers beside its tensors."""

    def get_current_state(self) -> tuple[Any, list[torch.Tensor]]:
        return {"epoch": self.rank}, [
            torch.full((300,), float(self.rank)),
            torch.tensor(self.rank),
            torch.ones(2).bfloat16(),
        ]


def test_a_newcomer_gets_the_best_state() -> None:
    """Of the highest priority that shares; then of the next one; None if nobody does."""

    def main(comm: Any) -> Any:
        averager = WithState(tensors(comm), comm, start=False, prefix="t", part_size_bytes=256, **QUICK)
        averager.state_sharing_priority = float(comm.rank)
        averager.serve(0.1)
        loaded = []
        for wanted in (0.2, 1.2, 2.2):
            averager.serve(wanted - comm.clock.now())
            if comm.rank == 0:
                state = averager.load_state_from_peers(timeout=0.7)
                loaded.append(
                    state
                    and (
                        state[0]["epoch"],
                        state[1][0].unique().item(),
                        state[1][1].item(),
                        state[1][2].dtype,
                    )
                )
            averager.serve(wanted + 0.8 - comm.clock.now())
            if wanted > 1 or comm.rank == 3:
                averager.allow_state_sharing = False
        return loaded

    returned, _ = world(main, 4)
    assert returned[0] == [(3, 3.0, 3, torch.bfloat16), (2, 2.0, 2, torch.bfloat16), None]


def test_a_dead_donor_is_passed_over() -> None:
    """Donors that crash, or have stopped answering, cost a chunk's time-out at most."""

    def main(comm: Any) -> Any:
        averager = WithState(tensors(comm), comm, start=False, prefix="t", next_chunk_timeout=0.2, **QUICK)
        averager.state_sharing_priority = float(comm.rank)
        averager.serve(0.5 if comm.rank == 4 else 3.0 if comm.rank else 1.0)
        if comm.rank == 4:
            comm.clock.sleep(3.0)
        return averager.load_state_from_peers(timeout=2.0)[0] if comm.rank == 0 else None

    returned, _ = world(main, 6, faults="crash:5@0.5s")
    assert returned[0] == {"epoch": 3}


def test_clients_and_auxiliaries_share_nothing_by_default() -> None:
    """And a client never can."""

    def main(comm: Any) -> None:
        client = DecentralizedAverager(
            tensors(comm), comm, start=False, prefix="t", client_mode=True, **QUICK
        )
        assert not client.allow_state_sharing
        with pytest.raises(ParameterError):
            client.allow_state_sharing = True

    world(main, 1)


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

    def main(comm: Any) -> None:
        with pytest.raises(ParameterError):
            DecentralizedAverager(tensors(comm), comm, start=False, prefix="t", **bad)

    world(main, 1)
