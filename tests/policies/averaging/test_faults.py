"""Six faults in the middle of an all-reduce, each at an exact moment of virtual time, with exact consequences.

A run without faults says when the victim sends its parts and its deltas; the faults then strike between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import spawnsim
from spawnsim.policies.averaging import Cancelled, DecentralizedAverager, Everyone, steps
from spawnsim.policies.exchange.messages import Kind, Message

RANKS, VICTIM, LENGTH = 5, 2, 4000
SENDER_S, REDUCER_S = 1.0, 3.0
results: dict[int, Any] = {}  # what the steps of the last play came to


@pytest.fixture(autouse=True)
def _few_parts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "BURST", 2)


class Faulty(DecentralizedAverager):
    """Logs when it sends what, and calls `strike` before the n-th message of a kind, which is lost if that says so."""

    def tamper(self, kind: Kind | None, number: int, strike: Callable[[], Any]) -> list[tuple[float, Kind]]:
        log: list[tuple[float, Kind]] = []
        send = self.endpoint.send

        def logged(rank: int, message: Message) -> None:
            due = message.kind is kind and sum(each is kind for _, each in log) == number
            lost = due and strike() == "lose it"
            log.append((self.comm.clock.now(), message.kind))
            if not lost:
                send(rank, message)

        self.endpoint.send = logged  # type: ignore[method-assign]
        return log


def play(
    kind: Kind | None = None, number: int = 0, strike: Callable[[Any, Any], None] | None = None, **world: Any
) -> Any:
    """Average once among five ranks; return values before and after, when each ended, and the victim's log."""
    before, after, ended, logs = {}, {}, {}, {}
    results.clear()

    def main(comm: Any) -> None:
        generator = torch.Generator().manual_seed(comm.rng.seed("values"))
        values = torch.randn(LENGTH, generator=generator, dtype=torch.float64)
        averager = Faulty(
            [values], comm, start=False, prefix="t", matchmaking=Everyone(), part_size_bytes=400,
            sender_timeout=SENDER_S, reducer_timeout=REDUCER_S, step_timeout=20.0,
        )  # fmt: skip
        before[comm.rank] = values.numpy().copy()
        control = None
        if comm.rank == VICTIM:
            logs[0] = averager.tamper(kind, number, lambda: strike and strike(comm, control))
        control = averager.step(wait=False)
        while not control.done():
            averager.engine.drive(control.done, 0.5)
        ended[comm.rank] = comm.clock.now()
        after[comm.rank] = values.numpy().copy()
        results[comm.rank] = control.averaged
        if comm.rank == VICTIM and control.cancelled():
            with pytest.raises(Cancelled):
                control.result()
        averager.serve(8.0)

    spawnsim.run(main, ranks=RANKS, platform="ethernet-10g", seed=3, **world)
    return before, after, ended, logs[0]


@cache
def undisturbed() -> Any:
    """Return the run without faults."""
    return play()


def moments(kind: Kind) -> list[float]:
    """Return when the victim sends messages of a kind if nothing goes wrong."""
    return [time_s for time_s, each in undisturbed()[3] if each is kind]


def check(before: Any, after: Any, *, alive: list[int]) -> tuple[float, float]:
    """Hold each value of a survivor to the mean of all, that without the victim, or its own; return the shares."""
    everyone = np.mean([before[rank] for rank in range(RANKS)], axis=0)
    without = np.mean([before[rank] for rank in range(RANKS) if rank != VICTIM], axis=0)
    whole, partial = [], []
    for rank in alive:
        of_all, of_rest, own = (
            np.abs(after[rank] - each) < 1e-12 for each in (everyone, without, before[rank])
        )
        assert (of_all | of_rest | own).all()
        assert (of_all | of_rest).mean() > 0.5
        whole.append(of_all.mean())
        partial.append(of_rest.mean())
    return float(np.mean(whole)), float(np.mean(partial))


def survivors() -> list[int]:
    """Return all but the victim."""
    return [rank for rank in range(RANKS) if rank != VICTIM]


def test_without_faults_all_have_the_mean() -> None:
    """The reference: everything is the mean of all, within a millisecond of virtual time or two."""
    before, after, ended, _ = undisturbed()
    assert check(before, after, alive=list(range(RANKS))) == (1.0, 0.0)
    assert max(ended.values()) < 0.02


def test_fail_before() -> None:
    """It dies after the group has formed and before it sends: its range stays local, the rest is the others' mean."""
    crash_s = moments(Kind.PART)[0] - 1e-9
    before, after, ended, _ = play(faults=f"crash:{VICTIM}@{crash_s!r}s")
    assert check(before, after, alive=survivors()) == (0.0, 0.8)
    assert all(results[rank].missing == {VICTIM: 1.0} for rank in survivors())
    assert all(sorted(results[rank]) == survivors() for rank in survivors())  # it was not averaged
    for rank in survivors():  # known after the detector's 10 ms, long before any time-out
        assert crash_s + 0.01 <= ended[rank] < crash_s + 0.05


def test_fail_sending() -> None:
    """It dies half-way: what it had sent counts, what it had not does not."""
    times = moments(Kind.PART)
    crash_s = (times[len(times) // 2 - 1] + times[len(times) // 2]) / 2
    before, after, ended, _ = play(faults=f"crash:{VICTIM}@{crash_s!r}s")
    whole, partial = check(before, after, alive=survivors())
    assert 0.3 < whole < 0.6
    assert whole + partial >= 0.8
    assert max(ended[rank] for rank in survivors()) < crash_s + 0.05
    for rank in survivors():  # the steps say so: of the victim's range little, of the rest a part without it
        assert 0.8 <= results[rank].received < 0.9
        assert list(results[rank].missing) == [VICTIM]
        assert 0 < results[rank].missing[VICTIM] < 1
        assert VICTIM in results[rank]
        assert not results[rank].complete


def test_fail_reducing() -> None:
    """It has sent all and dies while it reduces: the rest of its range stays local, all else is the mean of all."""
    times = moments(Kind.DELTA)
    crash_s = (times[-2] + times[-1]) / 2 if times[-2] < times[-1] else times[-1] - 1e-9
    assert crash_s > moments(Kind.PART)[-1]
    before, after, ended, _ = play(faults=f"crash:{VICTIM}@{crash_s!r}s")
    whole, partial = check(before, after, alive=survivors())
    assert partial == 0.0
    assert 0.8 <= whole < 1.0
    assert max(ended[rank] for rank in survivors()) < crash_s + 0.05


@pytest.mark.parametrize("slow_s", [0.5, 2.0, 30.0])
def test_slow_sending(slow_s: float) -> None:
    """Slower than the time-outs: banned at the moment they say. Faster: nothing is lost."""
    number = len(moments(Kind.PART)) // 2
    before, after, ended, log = play(Kind.PART, number, lambda comm, _: comm.clock.sleep(slow_s))
    slept_s = [time_s for time_s, kind in log if kind is Kind.PART][number] - slow_s
    alive = survivors()
    whole, partial = check(before, after, alive=alive)
    if slow_s < SENDER_S:
        assert (whole, partial) == (1.0, 0.0)
        return
    assert 0.3 < whole < 0.8
    assert partial > 0.1
    reducing_s = REDUCER_S if slow_s > REDUCER_S else slow_s  # its own range comes late, or not at all
    for rank in alive:
        assert ended[rank] == pytest.approx(slept_s + reducing_s, abs=0.05)


@pytest.mark.parametrize("slow_s", [0.5, 30.0])
def test_slow_reducing(slow_s: float) -> None:
    """A reducer that returns nothing for `reducer_timeout` has failed; its range stays local from there on."""
    before, after, ended, log = play(Kind.DELTA, 10, lambda comm, _: comm.clock.sleep(slow_s))
    slept_s = [time_s for time_s, kind in log if kind is Kind.DELTA][10] - slow_s
    whole, partial = check(before, after, alive=survivors())
    assert partial == 0.0 or slow_s > SENDER_S  # it sleeps as a sender, too, if it had not sent all
    assert whole + partial >= 0.8
    if slow_s > REDUCER_S:
        assert all(ended[rank] == pytest.approx(slept_s + REDUCER_S, abs=0.05) for rank in survivors())


def test_cancelling_in_the_middle() -> None:
    """The others learn of it at once: nobody waits for any time-out, the canceller's values stay."""
    number = len(moments(Kind.PART)) // 2

    def strike(_comm: Any, control: Any) -> None:
        control.cancel_requested = True

    before, after, ended, _ = play(Kind.PART, number, strike)
    whole, partial = check(before, after, alive=survivors())
    assert whole + partial >= 0.8
    assert partial > 0.1
    assert (after[VICTIM] == before[VICTIM]).all()
    assert max(ended.values()) < 0.02


@pytest.mark.parametrize("kind", [Kind.PART, Kind.DELTA])
def test_a_lost_word_costs_its_part_and_no_time(kind: Kind) -> None:
    """What follows shows that it is lost: nobody waits for it, all else is averaged, and everybody knows."""
    number = len(moments(kind)) // 2
    before, after, ended, _ = play(kind, number, lambda _comm, _control: "lose it")
    whole, partial = check(before, after, alive=list(range(RANKS)))
    part = 50 / LENGTH
    assert max(ended.values()) < 0.02
    if kind is Kind.PART:
        assert partial == pytest.approx(part * (RANKS - 1) / RANKS)
        assert results[VICTIM].received == pytest.approx(1 - part)
        assert all(results[rank].missing == {VICTIM: pytest.approx(part)} for rank in survivors())
    else:
        assert partial == 0.0
        received = sorted(results[rank].received for rank in range(RANKS))
        assert received == pytest.approx([1 - part, 1, 1, 1, 1])
        assert not any(results[rank].missing for rank in range(RANKS))
    assert whole + partial == pytest.approx(1 - part / RANKS)
