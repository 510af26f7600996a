"""Programs that declare operations on windows, and `comm.check(name, linearizable=…)`: planted bugs, correct twins."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from programs.operations.ticket import Ticket

import spawnsim
from spawnsim.cli import serve
from spawnsim.comm import SUM
from spawnsim.errors import CheckFailed, ParameterError
from spawnsim.fuzzing.campaign import Target, attempt, campaign, portion
from spawnsim.fuzzing.cases import Case, Space
from spawnsim.fuzzing.exploring import Exhaustion

PROGRAMS = Path(__file__).parent.parent / "programs" / "operations"
PLANTED = {  # the object, and the space of cases in which the bug is found
    "counter": ("counter", Space(ranks=(13, 5, 2), faults="delay; slow", parameters={"iterations": 3})),
    "replicas": ("value", Space(ranks=(12, 4), faults="delay; pause")),
    "ticket": ("ticket", Space(ranks=(3, 2), faults="delay")),  # only all schedules show it
}


@pytest.mark.parametrize("name", ["counter", "replicas"])
def test_a_planted_bug_is_found_made_small_and_replayed(name, capsys):
    """Under the object's name, with the fewest ranks that show it."""
    what, space = PLANTED[name]
    target = Target(PROGRAMS / f"{name}.py")
    found = campaign(target, space, range(4))
    assert {key for key, _ in found.failures} == {what}
    small = min(found.small.values(), key=lambda each: each.case.ranks)
    assert small.case.ranks == min(space.ranks)
    assert small.place.startswith(f"{name}.py:")
    assert serve("fuzz", [*shlex.split(small.case.command(str(target.program)))[2:], "--json"]) == 1
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["failures"][0]["message"] == small.message


def test_operations_are_counted_as_states():
    """By their object and method, before and after a death."""
    space = Space(ranks=(5,), faults="crash", parameters={"fixed": True})
    found = portion(Target(PROGRAMS / "counter.py"), space, range(3))
    assert {"counter.add", "counter.read"} <= {state for state, _ in found.states}


def test_a_ticket_that_two_ranks_draw_is_found_among_all_schedules():
    """Though no delay makes them meet; one choice is left."""
    target = Target(PROGRAMS / "ticket.py")
    found = Exhaustion(target).run([Case(seed=0, ranks=3, choices="", world={"deadline_s": math.inf})])
    (small,) = found.small.values()
    assert (small.what, small.case.choices.count("=")) == ("ticket", 1)
    assert attempt(target, small.case)[0].is_same(small)
    assert campaign(target, PLANTED["ticket"][1], range(20)).failures == {}


@pytest.mark.parametrize("name", PLANTED)
def test_the_correct_program_is_linearizable(name):
    """In the space in which the bug is found, and in all schedules with one deviation."""
    target, space = Target(PROGRAMS / f"{name}.py"), PLANTED[name][1]
    space = replace(space, parameters={**space.parameters, "fixed": True})
    assert portion(target, space, range(100, 115)).failures == {}
    case = Case(seed=0, ranks=3, choices="", world={"deadline_s": math.inf}, parameters=space.parameters)
    assert Exhaustion(target, deviations=1).run([case]).failures == {}


def draws(comm, die=0, begin=0):
    """Each rank draws a ticket when its turn comes; rank 1 dies with its ticket, or before it has one."""
    comm.check("ticket", linearizable=Ticket)
    window = comm.Win.Allocate(8, 8, comm=comm)
    window.tomemory()[:] = np.int64(begin).tobytes()
    comm.Barrier()
    comm.clock.sleep(1.0 + comm.rank)
    number = np.zeros(1, np.int64)
    with comm.record.operation("ticket", "take") as call:
        if comm.rank == 1 and die == 1:
            comm.clock.sleep(99.0)
        window.Lock(0)
        window.Fetch_and_op(np.ones(1, np.int64), number, 0, 0, SUM)
        window.Unlock(0)
        if comm.rank == 1 and die == 2:
            comm.clock.sleep(99.0)
        call.result = number[0]


@pytest.mark.parametrize("die", [1, 2])
def test_the_operation_of_a_rank_that_dies_may_have_taken_effect_or_not(die):
    """The ticket of rank 1 is drawn or not, and rank 2 gets the next one."""
    run = spawnsim.run(draws, ranks=12, faults="crash:1@20s", parameters={"die": die})
    found = [event for event in run.events if event["kind"] == "operation"]
    assert sorted(event["result"] for event in found if event["rank"] != 1) == [0, *range(die, 10 + die)]
    assert [(event["result"], event["end_s"]) for event in found if event["rank"] == 1] == [(None, None)]


def test_the_first_state_counts():
    """A window that begins with 5 differs from a counter that begins with 0, as the first ticket shows."""
    with pytest.raises(CheckFailed, match=r"take\(\) → 5 of rank 0 .*; Ticket allows only 0\n") as caught:
        spawnsim.run(draws, ranks=12, parameters={"begin": 5})
    assert caught.value.what == "ticket"


def test_a_specification_without_the_method_is_refused():
    """At the end, with the line of the operation; operations on other objects need no specification."""

    def main(comm, method="go"):
        comm.check("box", linearizable=Ticket)
        with comm.record.operation("other", "go"), comm.record.operation("box", method) as call:
            call.result = 0

    with pytest.raises(
        ParameterError, match=r"no method 'go', which rank 0 recorded \(test_operations\.py:\d+\)"
    ):
        spawnsim.run(main, ranks=1)
    assert not spawnsim.run(main, ranks=1, parameters={"method": "take"}).what.get("warnings")


def test_a_property_without_operations_is_a_warning():
    """A wrong name would go unnoticed; but a case of a campaign may end before the first operation."""

    def main(comm):
        comm.check("tickets", linearizable=Ticket)
        with comm.record.operation("ticket", "take") as call:
            call.result = 7

    (text,) = spawnsim.run(main, ranks=1).what["warnings"]
    assert text == "comm.check('tickets', linearizable=…) judges nothing: the run has recorded no operation"


def test_a_resumed_run_judges_no_history_without_its_beginning(tmp_path):
    """The specification begins in its first state, and the object does not."""
    program = tmp_path / "draws.py"
    program.write_text(
        "class Ticket:\n"
        "    def __init__(self): self.next = 0\n"
        "    def take(self): self.next += 1; return self.next - 1\n"
        "def main(comm, iterations=6):\n"
        "    comm.check('ticket', linearizable=Ticket)\n"
        "    saved = comm.restore()\n"
        "    for iteration in range(saved.iteration if saved else 0, iterations):\n"
        "        with comm.record.operation('ticket', 'take') as call:\n"
        "            call.result = iteration\n"
        "        comm.checkpoint(iteration=iteration + 1)\n"
    )
    spawnsim.run(program, ranks=1, out=tmp_path / "run", parameters={"iterations": 3})
    run = spawnsim.run(program, ranks=1, out=tmp_path / "run", resume=True, parameters={"iterations": 6})
    assert "judges nothing: the operations before the checkpoint are unknown" in str(run.what["warnings"])
