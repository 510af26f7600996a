"""Coverage of the fuzzer's cases: the calls in which faults struck, the states of policies, and pairs never reached."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spawnsim.cli import serve
from spawnsim.fuzzing.campaign import Target, attempt, campaign, portion
from spawnsim.fuzzing.cases import Case, Space
from spawnsim.fuzzing.coverage import AFTER, BEFORE, WITH_DEAD, Reached
from spawnsim.fuzzing.exploring import Exhaustion, crash_points

PROGRAMS = Path(__file__).parent.parent / "programs"


def late_peer(comm):
    """Rank 0 waits in a barrier for ranks that compute."""
    if comm.rank:
        with comm.compute(1.0):
            pass
    comm.Barrier()
    if comm.rank == 0:
        comm.Send(np.ones(2), dest=1)
    elif comm.rank == 1:
        comm.Recv(np.empty(2), source=0)


@pytest.mark.parametrize(("rank", "call"), [(0, "Barrier"), (1, "compute")])
def test_a_crash_is_counted_in_its_call(rank, call):
    """Also if the rank reaches its death by itself, in a computation that no event interrupts."""
    _, watch, _ = attempt(Target(late_peer), Case(seed=0, ranks=3, faults=f"crash:{rank}@0.5s"))
    assert watch.reached().fired == {("crash", call): 1}


def test_a_pair_that_was_not_reached_is_listed():
    """Among the kinds that were planned, and the calls that the program makes without faults."""
    space = Space(ranks=[3], faults="crash:0@0.5s; slow:1@0s+1s,2", stragglers=[None], ties=["fifo"])
    found = portion(Target(late_peer), space, range(3))
    assert found.calls >= {"compute", "Barrier", "Send", "Recv"}
    assert found.fired == {("crash", "Barrier"): 3, ("slow", "compute"): 3}
    assert found.missed() == {"crash": ["Recv", "Send", "compute"]}


def late_peer_of_a_window(comm):
    """Ranks wait in Win.Free for rank 11, which computes."""
    window = comm.Win.Allocate(8, comm=comm)
    with comm.compute(1.0 if comm.rank == 11 else 0.0):
        pass
    window.Free()


def test_a_call_of_a_window_has_one_name():
    """A crash in Win.Free was counted for "Win.Free", and "Free" was listed as never reached."""
    space = Space(ranks=[12], faults="crash:0@0.5s", stragglers=[None], ties=["fifo"])
    found = portion(Target(late_peer_of_a_window), space, range(1))
    assert found.fired == {("crash", "Free"): 1}
    assert found.missed() == {"crash": ["Allocate", "compute"]}


def test_a_fault_of_a_link_is_not_missed_in_a_computation():
    """Nor is a restart, which strikes no call."""
    reached = Reached(Counter(drop=1, restart=1), Counter(), {"compute", "Send"})
    assert reached.missed() == {"drop": ["Send"]}


def test_jobs_do_not_change_the_coverage():
    """One process, or two."""
    target, space = Target(late_peer), Space(ranks=[2, 3, 5])
    one, two = (campaign(target, space, range(40), jobs=jobs, shrink=False) for jobs in (1, 2))
    assert one.document() == two.document()
    assert one.missed()


def test_states_of_policies_are_counted_after_deaths_and_before():
    """A recovery happens after a death; an average, also before. The states not reached are listed."""
    parameters = {"policy": "average_all", "iterations": 8}
    space = Space(ranks=[4], faults="crash", survive=True, parameters=parameters)
    found = portion(Target(PROGRAMS / "fuzzed_policies.py"), space, range(8))
    assert found.states["AverageAllPolicy's average", BEFORE]
    assert found.states["AverageAllPolicy's average", AFTER]
    assert {when for state, when in found.states if state == "recovered"} == {AFTER}
    never = ["AverageAllPolicy's average with a dead member", "healed"]  # all members of an average live
    assert found.missed_states() == never
    assert f"policy states never reached: {', '.join(never)}" in found.report()


def test_a_merge_with_a_dead_member_is_a_state_of_its_own():
    """It differs from one after a death whose members all live: this policy goes on without a recovery."""
    parameters = {"policy": "decoupled", "iterations": 12}
    space = Space(ranks=[3], faults="crash:2@0.09s", survive=True, parameters=parameters, stragglers=[None])
    found = portion(Target(PROGRAMS / "fuzzed_policies.py"), space, range(2))
    assert found.states["merge", BEFORE]
    assert found.states["merge", WITH_DEAD]
    never = [f"{state} after a death" for state in ("DecoupledDiLoCoPolicy's average", "merge")]
    assert found.missed_states() == [never[0], "healed", never[1], "recovered"]
    calm = portion(Target(PROGRAMS / "fuzzed_policies.py"), replace(space, faults=""), range(2))
    assert calm.missed_states() == ["healed"]


def ahead_of_death(comm):
    """Rank 11 computes past its death, at 5 s, before rank 0 records anything."""
    if comm.rank == 11:
        with comm.compute(10.0):
            pass
    elif comm.rank == 0:
        for _ in range(2):
            comm.clock.sleep(4.0)
            comm.record.event("merge")


def test_a_state_before_a_death_is_not_after_it():
    """A rank that computes runs ahead of the other ranks, and has already been marked as dead."""
    _, watch, _ = attempt(Target(ahead_of_death), Case(seed=0, ranks=12, faults="crash:11@5s"))
    assert watch.states == {("merge", BEFORE): 1, ("merge", AFTER): 1}


def test_an_exploration_reports_its_coverage():
    """Of its schedules, whatever the number of processes."""
    space = Space(ranks=[3], faults="crash", ties=["fifo"], stragglers=[None])
    target = Target(late_peer)
    one, two = (
        Exhaustion(target, jobs=jobs).run(space.every(lambda case: crash_points(target, case)))
        for jobs in (0, 2)
    )
    assert one.reached.document() == two.reached.document()
    assert {call for _, call in one.reached.fired} >= {"Barrier", "compute"}


def test_coverage_is_printed_and_in_the_json(tmp_path, capsys):
    """With the pairs that were never reached."""
    file = tmp_path / "late.py"
    file.write_text(
        "def main(comm):\n    if comm.rank:\n        with comm.compute(1.0):\n            pass\n    comm.Barrier()\n"
        "    comm.record.event('merge')\n"
    )
    command = [str(file), "--ranks", "3", "--runs", "2", "--jobs", "0", "--faults", "crash:0@0.5s"]
    serve("fuzz", command)
    printed = capsys.readouterr().out
    assert "fault × call: crash × Barrier 2" in printed
    assert "never reached: crash × compute" in printed
    serve("fuzz", [*command, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["never"] == {"crash": ["compute"]}
