"""Properties of whole runs, `comm.check(name, always=…, eventually=…, leads_to=…)`: judged in virtual time."""

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import spawnsim
from spawnsim.cli import serve
from spawnsim.errors import CheckFailed, Deadlock, ParameterError, RankError, UsageError
from spawnsim.fuzzing.campaign import Target, campaign, portion
from spawnsim.fuzzing.cases import Space
from spawnsim.fuzzing.exploring import Exhaustion, crash_points

PROGRAMS = Path(__file__).parent.parent / "programs" / "properties"
PLANTED = {  # the property, and the space of cases in which the bug is found
    "two_leaders": ("one leader", Space(ranks=(12, 5, 2), faults="delay; pause", survive=True)),
    "overwritten": ("applied", Space(ranks=(13, 3), faults="slow; delay")),
    "lost_task": ("all tasks done", Space(ranks=(14, 4), faults="crash", survive=True)),
}


def planted(name, *, fixed):
    """Return a program with a planted bug, or without it, and the space of its cases."""
    return Target(PROGRAMS / f"{name}.py"), replace(PLANTED[name][1], parameters={"fixed": fixed})


@pytest.mark.parametrize("name", PLANTED)
def test_a_violated_property_is_found_made_small_and_replayed(name, capsys):
    """Under the property's name, with the fewest ranks that show it."""
    target, space = planted(name, fixed=False)
    found = campaign(target, space, range(40))
    assert {what for what, _ in found.failures} == {PLANTED[name][0]}
    (small,) = found.small.values()
    assert small.case.ranks == min(space.ranks)
    assert len(small.case.plan.faults) <= 1
    assert small.place.startswith(f"{name}.py:")
    assert serve("fuzz", [*shlex.split(small.case.command(str(target.program)))[2:], "--json"]) == 1
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["failures"][0]["message"] == small.message


@pytest.mark.parametrize("name", PLANTED)
def test_the_correct_program_keeps_its_properties(name):
    """In the space in which the bug is found."""
    target, space = planted(name, fixed=True)
    found = portion(target, space, range(100, 140))
    assert (found.failures, found.ended) == ({}, 0)
    assert sum(found.fired.values()) > 10


def test_every_crash_anywhere_is_explored():
    """The correct farm of tasks survives each; the other one loses a task."""
    for fixed in (False, True):
        target, space = planted("lost_task", fixed=fixed)
        space = replace(space, ranks=[3], ties=["fifo"], stragglers=[None])
        found = Exhaustion(target, deviations=0).run(list(space.every(partial(crash_points, target))))
        assert [what for what, _ in found.failures] == ["all tasks done"] * (not fixed)


def test_rows_are_judged_in_the_order_of_virtual_time():
    """Rank 0 records at 1 s, before the other ranks run at all: their rows of earlier times come first."""
    seen = []

    def main(comm):
        comm.check("order", always=lambda row: seen.append((row.time_s, row.rank, row["x"])) or True)
        for _ in range(3):
            with comm.compute(1.0 / (comm.rank + 1)):
                pass
            comm.record(x=comm.rank)

    spawnsim.run(main, ranks=12)
    assert len(seen) == 36
    assert [time_s for time_s, *_ in seen] == sorted(time_s for time_s, *_ in seen)
    assert seen[0][1:] == (11, 11)


def test_the_state_is_that_of_living_ranks():
    """A dead rank's values are gone, also after its restart; a rank whose program has ended keeps them."""
    seen = []

    def main(comm):
        comm.check("look", always=lambda row: seen.append((row.latest("x"), row.alive, row["y"])) or True)
        if comm.rank < 2:
            comm.record(x=comm.rank)
        else:
            comm.clock.sleep(2.0)
            comm.record(y=7)
        if comm.rank == 1:
            comm.clock.sleep(9.0)

    spawnsim.run(main, ranks=3, faults="crash:1@1s")
    assert seen[-1] == ({0: 0}, (0, 2), 7)


def test_a_restarted_rank_begins_without_values():
    """Its previous values are those of a dead rank."""
    seen = []

    def main(comm):
        comm.check(
            "look", always=lambda row: seen.append((row.time_s, {**row.latest("x")}, row.alive)) or True
        )
        if comm.rank == 1:
            if comm.clock.now() > 0:
                comm.clock.sleep(1.0)
            comm.record(x=comm.clock.now())
            comm.clock.sleep(5.0)
        for _ in range(4 * (comm.rank == 0)):
            comm.clock.sleep(1.0)
            comm.record(x=0)

    spawnsim.run(main, ranks=2, faults="crash:1@1.5s; restart:1@2.5s")
    assert seen == [
        (0.0, {1: 0.0}, (0, 1)),
        (1.0, {0: 0, 1: 0.0}, (0, 1)),
        (2.0, {0: 0}, (0,)),
        (3.0, {0: 0}, (0, 1)),
        (3.5, {0: 0, 1: 3.5}, (0, 1)),
        (4.0, {0: 0, 1: 3.5}, (0, 1)),
    ]


def test_an_answer_has_a_key_and_a_time():
    """0 is a key; None and False are none. The answer of the same row counts."""

    def main(comm, late_s=0.0, key=0):
        comm.check("same row", leads_to=(lambda row: row["ask"], lambda row: row["ask"]))
        comm.check(
            "in time",
            leads_to=(lambda row: row["ask"], lambda row: None if row.rank == 0 else row["answer"], 1.0),
        )
        comm.check("no key", leads_to=(lambda row: row["ask"] == 99, lambda row: row["never"]))
        if comm.rank == 0:
            comm.record(ask=0)
            comm.record(answer=0)
        else:
            comm.clock.sleep(0.5 + late_s)
            comm.record(answer=key)

    spawnsim.run(main, ranks=2)
    with pytest.raises(
        CheckFailed, match=r"in time: ask=0 of rank 0 at 0 s, .*py:\d+, is not answered within 1 s: on"
    ):
        spawnsim.run(main, ranks=2, parameters={"late_s": 0.6})
    with pytest.raises(CheckFailed, match=r"no answer follows until the end of the run at 0\.5 s"):
        spawnsim.run(main, ranks=2, parameters={"key": 1})


def test_a_dead_rank_needs_no_answer():
    """Its request has nobody left to receive one."""

    def main(comm):
        comm.check("answered", leads_to=(lambda row: row["ask"], lambda row: row["answer"]))
        comm.record(ask=comm.rank)
        comm.clock.sleep(2.0)
        if comm.rank != 3:
            comm.record(answer=comm.rank)

    spawnsim.run(main, ranks=12, faults="crash:3@1s")
    with pytest.raises(CheckFailed, match="ask=3 of rank 3"):
        spawnsim.run(main, ranks=12)


def test_an_error_of_the_run_comes_before_the_properties_of_its_end():
    """A deadlock explains why nothing was done eventually; a violated `always` ends the run before."""

    def main(comm, leader=False):
        comm.check("done", eventually=lambda row: row["done"])
        comm.check("none", always=lambda row: not row["leader"])
        comm.record(leader=leader)
        comm.recv(source=(comm.rank + 1) % comm.size)

    with pytest.raises(Deadlock):
        spawnsim.run(main, ranks=3)
    with pytest.raises(CheckFailed, match="none: does not hold for leader=True of rank 0"):
        spawnsim.run(main, ranks=3, parameters={"leader": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, None),
        ({"always": None}, "one of always"),
        ({"always": bool, "eventually": bool}, "one of always, eventually, leads_to, linearizable"),
        ({"leads_to": bool}, "leads_to takes"),
        ({"leads_to": (bool, bool, bool, bool)}, "leads_to takes"),
        ({"leads_to": (bool, bool, -1)}, "at least 0"),
        ({"always": True}, "always takes a class or function, not True"),
        ({"linearizable": 3}, "linearizable takes a class or function, not 3"),
        ({"always": bool, "message": "text"}, "no message"),
    ],
)
def test_bad_properties_are_refused(given, message):
    """Each with one sentence."""

    def main(comm):
        comm.check("name", **given)

    if message is None:
        spawnsim.run(main, ranks=1)
        return
    with pytest.raises((ParameterError, RankError), match=message):
        spawnsim.run(main, ranks=1)


def test_two_properties_need_two_names():
    """Otherwise one of them would not be judged."""

    def main(comm):
        if comm.rank:
            comm.check("p", always=lambda row: row["x"])
        else:
            comm.check("p", always=lambda row: not row["x"])

    with pytest.raises((ParameterError, RankError), match=r"states another property of this name"):
        spawnsim.run(main, ranks=2)


def test_a_function_that_raises_is_an_error_of_the_program():
    """At the line of the function, both in a row and at the end."""

    def main(comm, record=True):
        comm.check("p", eventually=lambda row: row["x"] < 1)
        if record:
            comm.record(y=1)

    with pytest.raises(RankError, match=r"rank 0 raised TypeError: .* at 0 s \(test_properties\.py:\d+\)"):
        spawnsim.run(main, ranks=1)
    with pytest.raises(UsageError, match=r"comm\.check\('p'\), test_properties\.py:\d+: TypeError"):
        spawnsim.run(main, ranks=1, parameters={"record": False})


def test_an_answer_that_is_no_key_is_refused():
    """It would be looked up in a dictionary: the error named a line of the engine."""

    def main(comm):
        comm.check("p", leads_to=(lambda row: row["x"], lambda row: row.latest("x")))
        comm.record(x=1)

    with pytest.raises(UsageError, match=r"comm\.check\('p'\), .* return keys, and a dict is none: \{0: 1\}"):
        spawnsim.run(main, ranks=12)


def test_properties_change_no_result():
    """A rank that records waits for its time, as `replay` lets it do."""

    def main(comm, checked=False):
        if checked:
            comm.check("p", always=lambda row: True)
        for step in range(5):
            with comm.compute(0.01):
                comm.record(step=step)
            comm.sendrecv(step, (comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)

    runs = [
        spawnsim.run(main, ranks=13, stragglers="lognormal:0.3", parameters={"checked": each})
        for each in (0, 1)
    ]
    assert runs[0].totals["digest"] == runs[1].totals["digest"]


def test_real_ranks_record_that_they_judge_no_property():
    """Once, on rank 0; a wrong statement is refused there, too."""
    from spawnsim.real.runtime.rank import RankComm

    events = []

    class Rank(RankComm):
        rank = 0

        def __init__(self):
            self.record = type(
                "Record", (), {"event": lambda self, kind, **given: events.append((kind, given))}
            )()

    Rank().check("p", always=bool)
    assert events == [("warning", {"text": "comm.check('p') is judged on virtual ranks only"})]
    with pytest.raises(ParameterError, match="one of always"):
        Rank().check("p", always=bool, eventually=bool)
