"""Averaging by the clock while ranks die, stop, slow down, and links fail: it goes on, at the pace of the living."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim.errors import RankFailed, Revoked, Timeout
from spawnsim.policies.asynchronous import AsyncModelAveragePolicy
from spawnsim.policies.averaging.gossip import Pace
from spawnsim.policies.averaging.tree import Leadership, Roster, epoch_of, first_of

MODES = ("all", "ring", "shift_one", "random")
FAILED = (RankFailed, Revoked, Timeout)


class Model(torch.nn.Module):
    """Four dtypes; `width` numbers of float32, above the eager threshold by default."""

    def __init__(self, value: float, width: int = 30_000) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), value))
        self.short = torch.nn.Parameter(torch.full((7,), value, dtype=torch.bfloat16))
        self.log_z = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
        self.register_buffer("seen", torch.full((3,), int(value)))

    def numbers(self) -> np.ndarray:
        """Return one number of each tensor."""
        return np.array([float(each.double().reshape(-1)[-1]) for each in self.state_dict().values()])


class Lived:
    """What the ranks of a run did: when each averaged, its numbers at the end, and how long it took to leave."""

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = {}
        self.ends: dict[int, np.ndarray] = {}
        self.leaving_s: dict[int, float] = {}
        self.stats: dict[int, dict[str, float]] = {}

    def rate(self, begin_s: float, end_s: float) -> dict[int, float]:
        """Return averagings a second between two times, of those that lived to the end."""
        return {
            rank: sum(begin_s <= time_s < end_s for time_s in self.times[rank]) / (end_s - begin_s)
            for rank in sorted(self.ends)
        }


def live(
    mode: str = "all", ranks: int = 8, faults: str | None = None, *, until_s: float = 1.8, width: int = 40
) -> Lived:
    """Let ranks train and average each 50 ms until a time, in steps of 10 ms."""
    lived = Lived()

    def main(comm: Any) -> None:
        rank, iteration = comm.rank, 0
        times = lived.times[rank] = []
        model = Model(float(rank), width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        by_clock = AsyncModelAveragePolicy(mode, 50, patience_s=0.3)
        while comm.clock.now() < until_s:
            with by_clock.weights(), comm.compute(0.01):
                pass
            by_clock(iteration, model, optimizer, group=comm)
            iteration += 1
            times += [comm.clock.now()] * (by_clock.num_averagings - len(times))
        began_s, lived.stats[rank] = comm.clock.now(), by_clock.stats
        by_clock.shutdown()
        lived.leaving_s[rank], lived.ends[rank] = comm.clock.now() - began_s, model.numbers()

    spawnsim.run(main, ranks=ranks, faults=faults, seed=3)
    return lived


@cache
def undisturbed(mode: str, ranks: int) -> float:
    """Return averagings a second of each rank where nothing happens."""
    return min(live(mode, ranks).rate(0.8, 1.8).values())


# ------------------------------------------------------------------------------------------------------- deaths
@pytest.mark.parametrize(
    ("ranks", "faults"),
    [
        *((8, f"crash:{victim}@{0.4 + 0.007 * victim}s") for victim in (0, 1, 4, 7)),
        (8, "crash:0@0.4s; crash:1@0.402s; crash:2@0.6s"),
        (16, "; ".join(f"crash:{rank}@{0.2 + 0.03 * rank}s" for rank in range(12))),
        (3, "crash:0@0.4s; crash:1@0.6s"),
    ],
)
def test_who_dies_slows_nobody(ranks: int, faults: str) -> None:
    """Not the coordinator (rank 0) either, nor one between it and others, nor several: the others keep their pace."""
    after = live("all", ranks, faults)
    alive = ranks - faults.count("crash")
    assert len(after.ends) == alive
    if alive > 1:
        assert min(after.rate(0.8, 1.8).values()) >= 0.9 * undisturbed("all", ranks), after.rate(0.8, 1.8)
        assert np.ptp(np.stack(list(after.ends.values())), axis=0).max() < 0.1
    assert max(after.leaving_s.values()) < 0.2


@pytest.mark.parametrize("at_ms", range(400, 480, 13))
def test_the_coordinator_dies_in_any_phase_of_a_round(at_ms: int) -> None:
    """Opening, means rising, the mean coming down, between two rounds; at most two rounds are lost."""
    after = live("all", 8, f"crash:0@{at_ms}ms", until_s=1.0, width=30_000)
    gaps = [np.diff([time_s for time_s in after.times[rank] if time_s > 0.3]).max() for rank in after.ends]
    assert max(gaps) < 0.25, gaps
    assert all(((numbers >= 0) & (numbers <= 7)).all() for numbers in after.ends.values())


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("faults", ["crash:3@0.4s; crash:4@0.4s", "crash:0@0.4s; crash:7@0.5s; crash:1@0.4s"])
def test_pairs_are_made_among_the_living(mode: str, faults: str) -> None:
    """A ring closes over dead neighbours; the others find partners as often as before, and agree."""
    after = live(mode, 8, faults)
    rate = after.rate(0.8, 1.8)
    assert np.mean(list(rate.values())) >= 0.8 * undisturbed(mode, 8)
    assert min(rate.values()) > 5
    assert np.ptp(np.stack(list(after.ends.values()))[:, 2]) < 0.3
    assert max(after.leaving_s.values()) < 0.4


# ------------------------------------------------------------------------------------- those who are only slow
@pytest.mark.parametrize(
    ("mode", "rank", "for_s"),
    [("all", 0, 0.1), ("all", 0, 0.6), ("all", 3, 0.6), *((mode, 3, 0.6) for mode in MODES[1:])],
)
def test_a_pause_ends(mode: str, rank: int, for_s: float) -> None:
    """Shorter or longer than the others are patient: afterwards all average with each other, as often as before."""
    after = live(mode, 6, f"pause:{rank}@0.3s+{for_s}s", until_s=2.2)
    assert len(after.ends) == 6
    assert min(after.rate(1.4, 2.2).values()) >= 0.7 * undisturbed(mode, 6), after.rate(1.4, 2.2)
    assert np.ptp(np.stack(list(after.ends.values()))[:, 2]) < 0.3


def test_a_slow_coordinator_is_waited_for() -> None:
    """Its steps take ten times as long, but it answers in time: it stays, and nobody is left out."""
    after = live("all", 6, "slow:0@0.3s+3s,10", until_s=2.0)
    assert min(after.rate(0.5, 2.0).values()) >= 2
    silent = [
        stats.get(f"silent {what}") for stats in after.stats.values() for what in ("coordinators", "branches")
    ]
    assert not any(silent)


LINKS = (
    "partition:0@0.3s+0.6s",
    "partition:0,1,2@0.3s+0.6s",
    "drop:*>*@0.2s+0.6s,0.3",
    "down:0>*@0.3s+0.6s; down:*>0@0.3s+0.6s",
    "delay:*>*@0.2s+0.6s,20ms,60ms; duplicate:*>*@0.2s+0.6s,0.5",
)


@pytest.mark.parametrize(
    ("mode", "faults"), [*(("all", faults) for faults in LINKS), *((mode, LINKS[2]) for mode in MODES[1:])]
)
def test_when_links_work_again_all_average_with_all(mode: str, faults: str) -> None:
    """Also those who had another coordinator meanwhile."""
    after = live(mode, 6, faults, until_s=2.6)
    assert len(after.ends) == 6
    assert min(after.rate(1.8, 2.6).values()) >= 0.6 * undisturbed(mode, 6), after.rate(1.8, 2.6)
    assert np.ptp(np.stack(list(after.ends.values()))[:, 2]) < 0.3


# ----------------------------------------------------------------------------------------------------- recovery
@pytest.mark.parametrize(
    ("mode", "background", "warmup_steps"),
    [("all", False, 0), ("all", True, 25), ("all", False, 25), *((mode, True, 0) for mode in MODES)],
)
def test_averaging_goes_on_after_a_recovery(mode: str, background: bool, warmup_steps: int) -> None:
    """Over the survivors' communicator, with its background task; in warm-up all go on from one step."""
    found: dict[int, tuple[int, int, np.ndarray]] = {}

    def main(comm: Any) -> None:
        rank, group, step, before = comm.rank, comm, 0, 0
        model = Model(float(rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy = AsyncModelAveragePolicy(mode, 40, warmup_steps, background=background, patience_s=0.3)
        while step < 70:
            try:
                with policy.weights(), comm.compute(0.01):
                    for parameter in model.parameters():
                        parameter.grad = torch.full_like(parameter, float(rank))
                with policy.weights():
                    optimizer.step()
                policy(step, model, optimizer, group=group)
                step += 1
                if step % 5 == 0:
                    group.Barrier()
            except FAILED:
                recovery = group.recover(step)
                group, step, before = recovery.comm, recovery.step, policy.num_averagings
        policy.shutdown()
        found[rank] = group.size, policy.num_averagings - before, model.numbers()

    spawnsim.run(main, ranks=5, faults="crash:0@0.183s; crash:3@0.4s", seed=1)
    assert sorted(found) == [1, 2, 4]
    assert {size for size, _, _ in found.values()} == {3}
    assert min(after for _, after, _ in found.values()) >= 4, found
    assert np.ptp(np.stack([numbers for _, _, numbers in found.values()])[:, 2]) < 0.2


def test_a_rank_that_joins_in_warm_up_warms_up_with_the_others() -> None:
    """It has begun again, and calls the policy for the first time on the communicator of the recovery."""
    found: dict[int, tuple[int, np.ndarray]] = {}

    def main(comm: Any) -> None:
        group, step, model = comm, 0, Model(float(comm.rank))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        policy = AsyncModelAveragePolicy("all", 40, 20)
        while step < 60:
            try:
                group.Barrier()
                with comm.compute(0.01):
                    pass
                policy(step, model, optimizer, group=group)
                step += 1
            except FAILED:
                recovery = group.recover(step)
                group, step = recovery.comm, recovery.step
        policy.shutdown()
        found[comm.rank] = group.size, model.numbers()

    spawnsim.run(main, ranks=11, faults="crash:1@0.055s; restart:1@0.1s", seed=1)
    assert [size for size, _ in found.values()] == [11] * 11
    assert np.ptp(np.stack([numbers for _, numbers in found.values()])[:, 2]) < 0.2


@pytest.mark.parametrize("background", [False, True])
def test_info_tells_of_averagings_since_the_last_call(background: bool) -> None:
    """Those of the background are told of by the next call."""
    reported: dict[int, tuple[int, int]] = {}

    def main(comm: Any) -> None:
        policy, model, times = AsyncModelAveragePolicy("ring", 30, background=background), Model(1.0, 3), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(60):
            with comm.compute(0.01):
                pass
            times += policy(step, model, optimizer, group=comm)[2]["averaged_this_iteration"]
        reported[comm.rank] = times, policy.num_averagings
        policy.shutdown()

    spawnsim.run(main, ranks=4)
    assert all(averagings / 2 <= times <= averagings for times, averagings in reported.values()), reported


@pytest.mark.parametrize("background", [False, True])
def test_calls_on_a_communicator_that_has_ended_end(background: bool) -> None:
    """`abort`, `resume` and `shutdown` raise nothing, wait for nobody, and say that nothing ended in time."""
    found: dict[int, tuple[bool, float]] = {}

    def main(comm: Any) -> None:
        policy, model = AsyncModelAveragePolicy("all", 40, background=background), Model(1.0, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(20):
            with comm.compute(0.01):
                pass
            policy(step, model, optimizer, group=comm)
        comm.Barrier()
        comm.Revoke()
        began_s = comm.clock.now()
        ended = policy.abort()
        policy.resume()
        policy.shutdown()
        found[comm.rank] = ended, comm.clock.now() - began_s

    spawnsim.run(main, ranks=3)
    assert {ended for ended, _ in found.values()} == {False}
    assert max(wait_s for _, wait_s in found.values()) < 0.1


# ---------------------------------------------------------------------------------------------------- leadership
def test_an_epoch_has_one_coordinator() -> None:
    """Ranks that skip the dead come to the same one; later epochs have higher numbers of rounds."""
    one, other = Leadership(2, 5, Pace(0.1, 1.0)), Leadership(4, 5, Pace(0.1, 1.0))
    for each in (one, other):
        each.away.update({0, 1, 2})
        each.epoch = 5
    assert one.next_epoch() == 7  # never skips itself
    assert other.next_epoch() == 8
    assert other.epoch_led_by(4) == 9
    assert epoch_of(first_of(8) + 4_000_000_000) == 8
    assert first_of(9) > first_of(8) + 4_000_000_000


def test_silence_is_asked_about_before_it_is_held_against_anybody() -> None:
    """Asked for again and again until patience is over; any sign of life ends the doubt."""
    leadership = Leadership(1, 3, Pace(0.1, 1.2))
    leadership.note_alive(0.0)
    assert (leadership.ask_s, leadership.answer_s) == (0.6, math.inf)
    leadership.asked(0.6)
    assert (leadership.ask_s, leadership.answer_s) == pytest.approx((1.0, 1.8))
    leadership.asked(1.0)
    assert (leadership.ask_s, leadership.answer_s) == pytest.approx((1.4, 1.8))
    leadership.note_alive(1.79)
    assert leadership.answer_s == math.inf


def test_the_missing_are_reminded_less_and_less_often() -> None:
    """They may be dead without anybody knowing it; who was struck off is reminded soon."""
    roster = Roster(0, Pace(0.1, 1.0))
    roster.note(0, 1, 0.0)
    roster.note(2, 0, 0.0)
    assert roster.missing(4, {3}) == [1]
    times, now_s = [], 0.0
    for _ in range(8):
        now_s = roster.remind_s
        times.append(now_s)
        roster.reminded(now_s)
    assert np.diff(times).tolist() == [1, 2, 4, 8, 16, 32, 32]
    roster.note(1, 1, now_s)
    roster.drop({1}, now_s)
    assert roster.remind_s == now_s + 1.0
    assert roster.missing(4, set()) == [1, 3]
