"""Fault plans: what a kernel may ask, the two notations, random plans, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spawnsim.errors import ParameterError
from spawnsim.models.faults import (
    KINDS,
    Corrupt,
    Crash,
    Delay,
    Drop,
    Duplicate,
    Failures,
    FaultPlan,
    LinkDown,
    Partition,
    Pause,
    Restart,
    SlowDown,
    Swarm,
    Verdict,
)

TEXT = (
    "crash:17@3.5s; restart:17@9s; pause:3@1s+6s; slow:4@1s+10s,3; down:0>1@2s+1s; drop:*>3@0s+5s,0.1; "
    "delay:2>*@1s+2s,0.005s,0.001s; duplicate:0>1@0s,0.5; corrupt:0>1@0s,0.01; partition:0,1,2,3,8@5s+2s; "
    "clog:3,4@1s+2s; reorder:*>3@0s+5s,0.02s,0.5; skew:2@1s,0.5s,0.001; corrupt:1>0@0s,0.01,nan"
)


def test_a_crash_is_known_by_rank_and_time() -> None:
    """The first at or after the time asked for; inf when there is none."""
    plan = FaultPlan((Crash(1, 2.0), Restart(1, 3.0), Crash(1, 7.0)))
    assert [plan.death_s(1), plan.death_s(1, after_s=3.0), plan.death_s(0)] == [2.0, 7.0, math.inf]
    assert plan.restart_s(1) == 3.0


def test_work_stands_still_in_a_pause() -> None:
    """Two seconds of work around a pause of six end six seconds later; without disturbance nothing is rounded."""
    plan = FaultPlan((Pause(3, 1.0, 6.0),))
    assert plan.stretch(3, 0.5, 2.0) == 8.5
    assert plan.stretch(3, 2.0, 1.0) == 8.0
    assert plan.stretch(3, 0.1, 0.2) == 0.1 + 0.2
    assert plan.stretch(2, 0.5, 2.0) == 2.5
    assert plan.stretch(3, 100.0, 0.25) == 100.25


def test_slow_downs_multiply_and_end() -> None:
    """Three times slower for the first three seconds, six times while both last."""
    plan = FaultPlan((SlowDown(0, 0.0, 6.0, 3.0), SlowDown(0, 3.0, 3.0, 2.0)))
    assert plan.stretch(0, 0.0, 1.0) == pytest.approx(3.0)
    assert plan.stretch(0, 3.0, 0.5) == pytest.approx(6.0)
    assert plan.stretch(0, 0.0, 2.5) == pytest.approx(7.0)


@given(st.floats(0, 20), st.floats(0, 5), st.floats(0.001, 5))
def test_stretching_in_portions_is_stretching_at_once(
    start_s: float, first_s: float, second_s: float
) -> None:
    """A timeline, not a factor: where the block is cut does not matter."""
    plan = FaultPlan((Pause(0, 2.0, 3.0), SlowDown(0, 4.0, 9.0, 2.5), SlowDown(0, 6.0, 1.0, 4.0)))
    once = plan.stretch(0, start_s, first_s + second_s)
    assert plan.stretch(0, plan.stretch(0, start_s, first_s), second_s) == pytest.approx(once, abs=1e-9)
    assert once >= start_s + first_s + second_s - 1e-9


def test_a_pause_without_end_never_ends() -> None:
    """Neither does the work in it."""
    plan = FaultPlan((Pause(0, 1.0, math.inf), Pause(1, 1.0, 2.0), Pause(1, 2.0, 4.0)))
    assert plan.stretch(0, 0.5, 1.0) == math.inf
    assert plan.awake_s(0, 2.0) == math.inf
    assert [plan.awake_s(1, t) for t in (0.5, 1.0, 5.9, 6.0)] == [0.5, 6.0, 6.0, 6.0]
    assert plan.disturbed == {0, 1}


def test_messages_wait_for_a_link_or_are_lost_with_it() -> None:
    """A link that comes back delivers then; one that stays down never."""
    plan = FaultPlan((LinkDown(0, 1, 2.0, 1.0), LinkDown(5, None, 0.0, math.inf)))
    assert plan.message(0, 1, 2.25, 0) == Verdict(delay_s=0.75)
    assert plan.message(0, 1, 3.0, 0) == plan.message(1, 0, 2.25, 0) == Verdict()
    assert plan.message(5, 9, 1.0, 4).lost


def test_a_partition_cuts_both_ways_and_only_between() -> None:
    """Members go on talking among themselves."""
    plan = FaultPlan((Partition((0, 1), 1.0, 2.0),))
    assert plan.message(0, 2, 1.5, 0).delay_s == plan.message(2, 0, 1.5, 0).delay_s == 1.5
    assert plan.message(0, 1, 1.5, 0) == plan.message(2, 3, 1.5, 0) == Verdict()


def test_chances_are_functions_of_the_message() -> None:
    """Frequencies come out, the order of asking does not matter, and another seed chooses others."""
    plan = FaultPlan((Drop(None, None, 0.0, math.inf, 0.1),), seed=1)
    lost = [plan.message(0, 1, 0.0, number).lost for number in range(20_000)]
    assert sum(lost) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert [plan.message(0, 1, 0.0, number).lost for number in reversed(range(20_000))] == lost[::-1]
    other = FaultPlan(plan.faults, seed=2)
    assert [other.message(0, 1, 0.0, number).lost for number in range(200)] != lost[:200]


def test_verdicts_add_up() -> None:
    """Several faults on one link all act."""
    faults = (
        Delay(0, 1, 0.0, 9.0, 0.25),
        Delay(0, 1, 0.0, 9.0, 0.5),
        Duplicate(0, 1, 0.0, 9.0),
        Corrupt(0, 1, 0.0, 9.0),
    )
    assert FaultPlan(faults).message(0, 1, 1.0, 0) == Verdict(False, 0.75, 2, True)
    spread = [FaultPlan((Delay(0, 1, 0.0, 9.0, 1.0, 2.0),)).message(0, 1, 0.0, n).delay_s for n in range(99)]
    assert 1.0 <= min(spread) < 1.2 < 2.8 < max(spread) < 3.0


def test_text_and_json_round_trip() -> None:
    """Every kind survives both notations, the seed survives JSON."""
    plan = FaultPlan.parse(TEXT, seed=5)
    assert {fault.kind for fault in plan.faults} == set(KINDS)
    assert FaultPlan.parse(str(plan), seed=5) == plan
    assert FaultPlan.parse(plan.to_json()) == plan


def test_a_plan_is_read_from_a_file(tmp_path: Path) -> None:
    """A path that ends in .json."""
    path = tmp_path / "plan.json"
    path.write_text('[{"kind": "pause", "rank": 3, "at_s": 1, "for_s": null}]', encoding="utf-8")
    assert FaultPlan.parse(str(path)).faults == (Pause(3, 1.0, math.inf),)


def test_short_hands_expand() -> None:
    """Lists of ranks and links both ways are several faults; nothing is a plan without faults."""
    assert FaultPlan.parse("crash:1,3-4@2s").faults == (Crash(1, 2.0), Crash(3, 2.0), Crash(4, 2.0))
    assert FaultPlan.parse("down:0<>*@500ms+1s").faults == (
        LinkDown(0, None, 0.5, 1.0),
        LinkDown(None, 0, 0.5, 1.0),
    )
    assert not FaultPlan.parse(None)
    assert not FaultPlan.parse(" ; ")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("crash", "KIND:WHERE@START"),
        ("crash:1", "KIND:WHERE@START"),
        ("crash:x@1s", "'x' is not a rank"),
        ("crash:-1@1s", "'-1' is not a rank: write 3, 0-3,8"),
        ("crash:5-2@1s", "'5-2' is not a rank"),
        ("crash:3@1s; restart:3@2s; crash:3@2s", "rank 3 begins again at 2 s: let it crash later"),
        ("crash:1@1parsec", "not a duration"),
        ("crash:1@-1s", "at least 0"),
        ("delay:0>1@0s+1s,1e300s,1e300s", "'1e300s' is too long"),
        ("crash:1@1s+2s", "no length"),
        ("pause:1@1s+0s", "above 0 s"),
        ("slow:1@1s+2s", "a slow takes factor; 0 given"),
        ("slow:1@1s+2s,0", "factor"),
        ("explode:1@1s", "kinds: crash, restart"),
        ("crsh:1@1s", r"did you mean crash\?"),
        ("drop:1@1s", "needs a link"),
        ("drop:0>1@1s+1s,1.5", "probability"),
        ("delay:0>1@1s+1s,-1s", "delay_s"),
        ("crash:1@1s; crash:1@2s", "dead at 2 s"),
        ("restart:1@1s", "alive at 1 s"),
        ("partition:@1s", "KIND"),
        ('[{"kind": "crash"}]', "give rank, at_s"),
        ('[{"kind": "crash", "rank": "1", "at_s": 1}]', "fault 0.*rank='1'.*rank must be a whole number"),
        ('[{"kind": "nosuch"}]', "one of crash"),
        ('{"faults": 3}', "write"),
        ('{"faults": [], "sed": 1}', "write"),
        ("[", "not valid JSON"),
        ("nosuch.json", "cannot read nosuch.json: No such file"),
        ("slow:3@0s+1s,x", "factor: 'x' is not a number"),
        ("slow:3@0s+1s,1e-320", "factor must be"),
        ("drop:0>1@1s,10%", "probability: '10%' is not a number: write 0.1"),
        ("delay:0>1@1s,5,x", "spread_s: 'x' is not a duration"),
        ("skew:3@1s,1s,fast", "drift: 'fast' is not a number"),
        ("mtbf:0@0s+1s,5s,1s,1.5", "'1.5' is not a whole number"),
        ("mtbf:0@0s+1s,5s,1s,1000000000", "from 0 to 1,000,000 spares"),
        ("down:0>1>2@1s", "'0>1>2': a down needs a link"),
        ("down:0<1@1s", "needs a link"),
        ("down:0>@1s", "needs a link"),
        ("down:0-3>1@1s", "needs a link"),
        ("slow:0-3,2@0s+1s,2", "names rank 2 more than once"),
        (f'[{{"kind": "crash", "rank": 1, "at_s": 1{400 * "0"}}}]', "fault 0.*a finite time"),
        ('[{"kind": "slow", "rank": 1, "at_s": 1, "for_s": 1, "factor": null}]', "factor must be a number"),
        ('[{"kind": "slow", "rank": null, "at_s": 1, "for_s": 1, "factor": 2}]', "rank must be a whole"),
        ('[{"kind": "slow", "where": "", "at_s": 1, "for_s": 1, "factor": 2}]', "fault 0.*is not a rank"),
        ('[{"kind": "drop", "where": "0>x", "at_s": 1, "for_s": 1}]', "fault 0.*needs a link"),
        ('[{"kind": "crash", "rank": 1, "where": "1", "at_s": 1}]', "where may take the place"),
    ],
)
def test_bad_plans_are_one_clear_error(text: str, match: str) -> None:
    """The part that is wrong, and what to write."""
    with pytest.raises(ParameterError, match=match):
        FaultPlan.parse(text)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Crash("3", 1.0), "rank must be a whole number"),  # type: ignore[arg-type]
        (lambda: Crash(1, "1s"), "at_s must be a number"),  # type: ignore[arg-type]
        (lambda: Crash(True, 1.0), "rank must be a whole number"),
        (lambda: Pause(3, 1.0, None), "for_s must be a number"),  # type: ignore[arg-type]
        (lambda: Delay(0, 1, 0.0, 1.0, "5ms"), "delay_s must be a number"),  # type: ignore[arg-type]
        (lambda: Partition("0-3", 0.0, 1.0), "members must be ranks"),  # type: ignore[arg-type]
        (lambda: Failures(0.0, 1.0, 1.0, 1.0, 1.5), "spares must be a whole"),  # type: ignore[arg-type]
        (lambda: FaultPlan("crash:3@1s"), "FaultPlan.parse of a text"),  # type: ignore[arg-type]
        (lambda: FaultPlan(Crash(3, 1.0)), "a fault plan of Crash"),  # type: ignore[arg-type]
        (lambda: FaultPlan((3,)), "a fault plan with 3"),  # type: ignore[arg-type]
        (lambda: FaultPlan((), seed=-1), "seed -1: give an integer"),
        (lambda: FaultPlan.parse([Crash(3, 1.0)]), "give a text, a file's name"),  # type: ignore[arg-type]
    ],
)
def test_bad_objects_are_one_clear_error(build: Callable[[], object], match: str) -> None:
    """As bad texts are: what is wrong, and what to write."""
    with pytest.raises(ParameterError, match=match):
        build()


def test_numbers_of_any_type_make_the_same_plan() -> None:
    """Those of numpy are kept as Python's, which JSON holds; seeds may be longer than a machine's word."""
    plan = FaultPlan((Crash(np.int64(3), np.float32(1)), Partition(np.arange(2), 0, 1)), seed=2**70)  # type: ignore[arg-type]
    assert (
        FaultPlan.parse(plan.to_json())
        == plan
        == FaultPlan((Crash(3, 1.0), Partition((0, 1), 0.0, 1.0)), 2**70)
    )
    assert 0.0 <= plan.chance(1, 2) < 1.0


def test_a_plan_is_checked_against_the_run() -> None:
    """A fault of a rank that the run has not would silently never happen."""
    FaultPlan.parse("drop:*>3@0s").check(4)
    with pytest.raises(ParameterError, match=r"ranks 0 to 3, and no rank 17"):
        FaultPlan.parse("crash:17@3.5s").check(4)


def test_a_swarm_is_keyed_by_its_seed_and_leaves_a_survivor() -> None:
    """The same seed draws the same plan, all plans are valid, all kinds occur, and somebody lives."""
    swarm = Swarm(ranks=3, horizon_s=10.0, kinds=tuple(KINDS))
    plans = [swarm.plan(seed) for seed in range(300)]
    assert plans == [swarm.plan(seed) for seed in range(300)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(swarm.kinds)
    for plan in plans:
        plan.check(3)
        assert any(math.isinf(plan.death_s(rank)) for rank in range(3))
        assert FaultPlan.parse(plan.to_json()) == plan
    assert all(fault.at_s < 10.1 for plan in plans for fault in plan.faults)
    assert any(plan.restart_s(0) - plan.death_s(0) < 0.01 for plan in plans), (
        "before others know of the death"
    )


def test_a_swarm_refuses_what_it_cannot_draw() -> None:
    """Unknown kinds and empty worlds."""
    with pytest.raises(ParameterError, match="choose from crash"):
        Swarm(4, 1.0, kinds=("meteor",))
    with pytest.raises(ParameterError, match="above 0"):
        Swarm(0, 1.0)
