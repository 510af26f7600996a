"""`spawnsim fuzz --exhaustive`: every schedule is run once, none is impossible, failures are small and are replayed."""

import itertools
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest

from spawnsim.cli import main, serve
from spawnsim.comm import ANY_SOURCE, LOCK_EXCLUSIVE, LOCK_SHARED, SUM, Status
from spawnsim.errors import ParameterError, Timeout
from spawnsim.fuzzing.campaign import Target, attempt, campaign
from spawnsim.fuzzing.cases import Case, Space
from spawnsim.fuzzing.exploring import Exhaustion, crash_points, explore
from spawnsim.virtual.choices import parsed, written
from spawnsim.virtual.engine import diagnosis

PLANTED = Path(__file__).parent.parent / "programs" / "planted"


def explored(program, ranks, **how):
    """Return what an exploration of a function or file finds."""
    parameters = how.pop("parameters", {})
    case = Case(seed=0, ranks=ranks, choices="", parameters=parameters)
    return Exhaustion(Target(program), **how).run([case])


def count(found):
    """Return the number of schedules."""
    return sum(found.schedules.values())


def farm(comm, tasks=6, seen=None):
    """Rank 0 gives a task to each worker, and another to whoever is done."""
    status, given = Status(), 0
    if comm.rank == 0:
        order = []
        for worker in range(1, comm.size):
            comm.send(given if given < tasks else None, worker)
            given += 1
        for _ in range(tasks):
            comm.recv(source=ANY_SOURCE, status=status)
            order.append(status.source)
            comm.send(given if given < tasks else None, status.source)
            given += 1
        if seen is not None:
            seen.append(tuple(order))
    else:
        while comm.recv(source=0) is not None:
            comm.send(comm.rank, 0)


def test_a_farm_has_as_many_schedules_as_orders_of_its_results():
    """Three workers, six tasks: 3 choices for each of three results, then the three that are left in any order."""
    seen = []
    found = explored(farm, 4, parameters={"seen": seen})
    assert (count(found), found.infeasible, found.left) == (3**3 * math.factorial(3), 0, 0)
    assert len(seen) == len(set(seen)) == found.runs


def test_independent_choices_are_combined_and_not_ordered():
    """Two ranks that each receive from two others: all pairs, whatever the order of the two receives."""

    def pairs(comm):
        if comm.rank < 2:
            for _ in range(2):
                comm.recv(source=ANY_SOURCE)
        else:
            for dest in range(2):
                comm.send(comm.rank, dest)

    found = explored(pairs, 4)
    assert (count(found), found.infeasible) == (4, 0)


def test_a_message_that_another_choice_causes_is_an_alternative_of_an_earlier_receive():
    """Rank 2 sends to rank 0 only if it took rank 3's message first; rank 0's receive, earlier in time, can get it."""
    seen = set()

    def chain(comm):
        if comm.rank == 0:
            first = comm.recv(source=ANY_SOURCE)
            seen.add(first)
            comm.recv(source=ANY_SOURCE)
        elif comm.rank == 1:
            comm.send("one", 0)
            comm.send("one", 2)
        elif comm.rank == 2:
            got = [comm.recv(source=ANY_SOURCE) for _ in range(2)]
            comm.send("two" if got[0] == "three" else "usual", 0)
        else:
            with comm.compute(1.0):
                pass
            comm.send("three", 2)

    found = explored(chain, 4)
    assert seen == {"one", "usual", "two"}
    assert (count(found), found.left) == (4, 0)


def test_what_happens_after_a_receive_is_no_alternative_of_it():
    """The second message is the answer to the first."""

    def answered(comm):
        if comm.rank == 0:
            comm.recv(source=ANY_SOURCE)
            comm.send(None, 2)
            comm.recv(source=ANY_SOURCE)
        elif comm.rank == 1:
            comm.send(None, 0)
        else:
            comm.recv(source=0)
            comm.send(None, 0)

    found = explored(answered, 3)
    assert (count(found), found.runs) == (1, 1)


def test_a_posted_wildcard_takes_what_arrives_before_its_own_message():
    """Rank 2 sends when the second receive is complete: its message could be the first's in no real run."""

    def posted(comm):
        if comm.rank == 0:
            requests = [comm.irecv(source=ANY_SOURCE) for _ in range(3)]
            second = requests[1].wait()
            comm.send(None, 2)
            comm.check(requests[0].wait() != 2 and requests[2].wait() == 2 != second, "the order posted")
        else:
            if comm.rank == 2:
                comm.recv(source=0)
            comm.send(comm.rank, 0)

    found = explored(posted, 4)
    assert found.failures == {}
    assert (count(found), found.infeasible > 0) == (2, True)


def test_waitany_waitsome_and_tests_find_every_set():
    """Two messages: Waitany finds either; Waitsome either or both; a test all or nothing."""
    seen = {"any": set(), "some": set(), "test": set()}

    def program(comm, call="any"):
        if comm.rank:
            comm.Send(np.ones(1), 0)
            return
        requests = [comm.Irecv(np.zeros(1), source) for source in (1, 2)]
        kind = type(requests[0])
        if call == "any":
            seen[call].add(kind.Waitany(requests))
        elif call == "some":
            seen[call].add(tuple(sorted(kind.Waitsome(requests))))
        else:
            seen[call].add(kind.Testall(requests))
        kind.Waitall(requests)

    for call in seen:
        explored(program, 3, parameters={"call": call})
    assert seen == {"any": {0, 1}, "some": {(0,), (1,), (0, 1)}, "test": {False, True}}


def test_a_loop_of_polls_ends():
    """A poll that could find a message is put off once, not forever."""

    def polls(comm):
        if comm.rank == 0:
            while not comm.iprobe(source=1):
                pass
            comm.recv(source=1)
        else:
            comm.send(None, 0)

    found = explored(polls, 2)
    assert found.left == 0
    assert count(found) > 1


def test_locks_are_granted_in_every_order():
    """Three ranks note their turn in a window: six orders."""
    seen = set()

    def turns(comm):
        window = comm.Win.Allocate(8 * 4, comm=comm)
        np.frombuffer(window.tomemory(), np.int64)[:] = 0
        comm.Barrier()
        if comm.rank:
            window.Lock(0)
            mine = np.zeros(4, np.int64)
            window.Get(mine, 0)
            window.Flush(0)
            mine[0] += 1
            mine[mine[0]] = comm.rank
            window.Put(mine, 0)
            window.Unlock(0)
        comm.Barrier()
        if comm.rank == 0:
            seen.add(tuple(np.frombuffer(window.tomemory(), np.int64)[1:].tolist()))
        window.Free()

    found = explored(turns, 4)
    assert seen == set(itertools.permutations((1, 2, 3)))
    assert (count(found), found.infeasible) == (6, 0)


def test_an_exclusive_lock_comes_before_shared_ones_and_between_them():
    """Also if the first accesses of its rank, shared too, order nothing, or if it has to wait for a sharer."""
    seen = set()

    def adding(comm):
        window, found = comm.Win.Allocate(8, comm=comm), []
        np.frombuffer(window.tomemory(), np.int64)[:] = 0
        comm.Barrier()
        for lock in {1: [LOCK_SHARED], 2: [LOCK_SHARED, LOCK_EXCLUSIVE], 3: [LOCK_EXCLUSIVE]}.get(
            comm.rank, []
        ):
            before = np.zeros(1, np.int64)
            window.Lock(0, lock)
            window.Fetch_and_op(np.full(1, 10**comm.rank, np.int64), before, 0, 0, SUM)
            window.Unlock(0)
            found.append(int(before[0]))
        found = comm.gather(found)
        if comm.rank == 0:
            seen.add(tuple(map(tuple, found)))
        window.Free()

    assert explored(adding, 4).left == 0
    expected = set()
    for order in set(itertools.permutations((1, 2, 2, 3))):
        found = [(), [], [], []]
        for place, rank in enumerate(order):
            found[rank].append(sum(10**other for other in order[:place]))
        expected.add(tuple(map(tuple, found)))
    assert seen == expected


@pytest.mark.parametrize("call", ["recv", "irecv", "mprobe", "waitany"])
def test_a_decision_depends_on_one_that_was_asked_later(call):
    """Rank 0 asks first, and hears from the rank that is the first at rank 1; only one was ever tried."""
    seen = set()

    def arbiter(comm):
        if comm.rank == 0:
            requests = [comm.irecv(source=rank) for rank in (2, 3)] if call == "waitany" else []
            if requests:
                seen.add(type(requests[0]).waitany(requests)[1])
                comm.Barrier()
                type(requests[0]).waitall(requests)
                return
            found = comm.mprobe(source=ANY_SOURCE) if call == "mprobe" else comm
            seen.add(comm.irecv(source=ANY_SOURCE).wait() if call == "irecv" else found.recv())
            comm.Barrier()
            comm.recv()
            return
        if comm.rank == 1:
            first, second = comm.recv(), comm.recv()
            comm.send(True, first)
            comm.send(False, second)
        else:
            comm.send(comm.rank, 1)
            if comm.recv(source=1):
                comm.send(comm.rank, 0)
                comm.Barrier()
                return
        comm.Barrier()
        if comm.rank > 1:
            comm.send(comm.rank, 0)

    assert explored(arbiter, 4).left == 0
    assert seen == {2, 3}


POLLING = """
def main(comm, tries=1, seen=None):
    found = []
    if comm.rank:
        for tag in (0, 0, 0, 9):
            comm.send(None, 0, tag)
    else:
        comm.recv(source=1, tag=9)  # the others arrive before
        for _ in range(3):
            found.append(any(comm.iprobe(source=1, tag=0) for _ in range(tries)))
            comm.recv(source=1, tag=0)
        if seen is not None:
            seen.add(tuple(found))
"""


def test_polls_miss_messages_again_after_a_receive(capsys, tmp_path):
    """Each of three polls may. That polls miss a message twice in a row is not tried, and reported."""
    file, seen = tmp_path / "polling.py", set()
    file.write_text(POLLING)
    assert (explored(file, 2, parameters={"seen": seen}).untried, len(seen)) == (set(), 8)
    assert serve("fuzz", [str(file), "--exhaustive", "-n", "2", "--jobs", "0", "--set", "tries=2"]) == 0
    assert "; not tried: polls that miss a message twice in a row, or more than 3" in capsys.readouterr().out


def test_atomic_operations_interleave_in_every_order():
    """Two of each of three ranks: 6! / 2!³ orders; none that a barrier excludes."""

    def counter(comm):
        window = comm.Win.Allocate(8, comm=comm)
        np.frombuffer(window.tomemory(), np.int64)[:] = 0
        comm.Barrier()
        window.Lock_all()
        for _ in range(2):
            window.Fetch_and_op(np.ones(1, np.int64), np.zeros(1, np.int64), 0, 0, SUM)
            window.Flush(0)
        window.Unlock_all()
        comm.Barrier()
        window.Free()

    found = explored(counter, 3)
    assert (count(found), found.infeasible) == (90, 0)


def test_fewer_deviations_come_first():
    """With one deviation: each decision of virtual time's schedule, otherwise."""
    found = explored(farm, 4, deviations=1)
    assert found.schedules == {0: 1, 1: 9}
    assert found.left == 0


def test_a_limit_is_reported(capsys):
    """How many schedules were run, how many are left, and up to which bound all were."""
    file = str(PLANTED / "arrival_order.py")
    words = [
        file,
        "--exhaustive",
        "--ranks",
        "4",
        "--jobs",
        "0",
        "--set",
        "iterations=3",
        "--set",
        "fixed=True",
    ]
    assert serve("fuzz", [*words, "--runs", "20"]) == 0
    text = capsys.readouterr().out
    assert "pass, by deviations: 1 with 0" in text
    assert "more were found and not run; complete up to" in text
    assert serve("fuzz", [*words, "--deviations", "1"]) == 0
    assert "all 10 schedules with at most 1 deviation pass" in capsys.readouterr().out


def test_a_failure_is_small_and_replayed(capsys):
    """The printed command has the few choices that matter, and finds the same."""
    file = PLANTED / "arrival_order.py"
    words = [str(file), "--exhaustive", "--ranks", "4", "--jobs", "0", "--set", "iterations=2", "--json"]
    assert serve("fuzz", words) == 1
    (failure,) = json.loads(capsys.readouterr().out)["failures"]
    assert len(parsed(failure["choices"])) == 1
    again = shlex.split(failure["replay"])[2:]
    assert serve("fuzz", [*again, "--json"]) == 1
    (same,) = json.loads(capsys.readouterr().out)["failures"]
    assert same["message"] == failure["message"]


def test_the_same_record_is_the_same_run():
    """To the bit, also in a second process's place."""
    record = "recv:0.0=3,recv:0.1=3"
    runs = [attempt(Target(farm), Case(seed=0, ranks=4, choices=record))[1] for _ in range(2)]
    assert runs[0].world.digest() == runs[1].world.digest()
    leaf = runs[0].choices.leaf()
    assert leaf["recv", 0, 0] == leaf["recv", 0, 1] == (3,)
    assert parsed(written(leaf)) == leaf


def test_two_processes_explore_the_same():
    """The same schedules, each once."""
    file = PLANTED / "arrival_order.py"
    parameters = {"iterations": 2, "fixed": True}
    alone, together = (explored(file, 4, parameters=parameters, jobs=jobs) for jobs in (0, 2))
    assert count(alone) == count(together) == math.factorial(3) ** 2


def test_a_crash_at_any_point_is_a_finite_set():
    """One for each rank between any two of its events; other kinds need their times."""
    target, space = Target(farm), Space(ranks=[3], faults="crash", ties=["fifo"], stragglers=[None])
    cases = list(space.every(lambda case: crash_points(target, case)))
    assert len(cases) == len({case.faults for case in cases})
    assert {fault.rank for case in cases for fault in case.plan.faults} == {0, 1, 2}
    found = Exhaustion(target).run(cases)
    assert found.failures == {}
    assert found.ended
    with pytest.raises(ParameterError, match="pause: an exploration needs a finite set"):
        list(Space(ranks=[3], faults="pause", ties=["fifo"]).every(lambda case: ()))


def test_a_wrong_record_is_refused():
    """With what a choice looks like, or with the kinds that there are."""
    with pytest.raises(ParameterError, match="is not a choice"):
        parsed("recv:0.0")
    with pytest.raises(ParameterError, match="kinds of choices"):
        parsed("lock:0.0=1")


CHANGED = """
def main(comm):
    if comm.rank:
        comm.send(None, 0)
        return
    if comm.size == 2:
        assert comm.recv() is not None
        return
    requests = [comm.irecv(source=rank) for rank in (1, 2)]
    type(requests[0]).waitany(requests)
    type(requests[0]).waitall(requests)
"""


def test_a_record_that_no_run_can_follow_is_refused(capsys, tmp_path):
    """Such as one from before a change of the program: its deadlock, or an error of this module, was a failure."""
    file = tmp_path / "changed.py"
    file.write_text(CHANGED)
    words = [str(file), "--faults", "none", "--jobs", "0", "--choices"]
    for record, ranks in (("recv:0.0=2", "2"), ("done:0.0=7", "3")):
        assert main(["fuzz", *words, record, "--runs", "1", "-n", ranks]) == 2
        assert f"--choices {record}: no run of {file} can follow it" in capsys.readouterr().err
    assert main(["fuzz", *words, "done:0.0=7", "--runs", "6", "-n", "2-3"]) == 1
    said = capsys.readouterr().out
    assert "AssertionError at changed.py:7: 3 of 6 cases" in said
    assert said.endswith("; 3 cannot follow the record of choices, and prove nothing\n")
    assert main(["fuzz", *words, "recv:0.0=1", "--exhaustive"]) == 2
    assert "without --exhaustive" in capsys.readouterr().err


def test_a_request_that_is_over_is_not_found_complete_again():
    """A record that forces it proves nothing: shrinking must not keep it instead of the record that fails."""

    def taken_twice(comm):
        if comm.rank:
            comm.Send(np.ones(1), 0)
            return
        requests = [comm.Irecv(np.zeros(1), rank) for rank in range(1, comm.size)]
        taken = sum(len(type(requests[0]).Waitsome(requests)) for _ in range(2))
        comm.check(taken < comm.size, "a request was complete twice")

    case = Case(seed=0, ranks=4, choices="")
    records = ["done:0.0=0,done:0.1=1", "done:0.0=0,done:0.1=0+1+2"]
    good, impossible = explore(Target(taken_twice), case, records)
    assert good.schedule is not None
    assert good.failure is None
    assert impossible.schedule is None


def test_a_source_outside_of_the_communicator_is_impossible():
    """A record meets another communicator than before, as after a recovery without some ranks."""

    def smaller(comm):
        pair = comm.Split(comm.rank // 2)
        pair.recv(source=ANY_SOURCE) if pair.rank else pair.send(None, 1)
        pair.iprobe(source=ANY_SOURCE)

    case = Case(seed=0, ranks=4, choices="")
    for record in ("recv:1.0=3", "probe:0.0=2"):
        (found,) = explore(Target(smaller), case, [record])
        assert (found.schedule, found.failure) == (None, None)


@pytest.mark.parametrize("call", ["recv", "iprobe", "Testany"])
def test_a_deadline_in_a_forced_wait_is_impossible(call):
    """Without the record the call would have ended: what the program does after its deadline proves nothing."""

    def surviving(comm):
        if comm.rank:
            comm.Send(np.ones(1), 0) if comm.rank == 1 else None
            return
        try:
            with comm.clock.deadline(2.0):
                if call == "recv":
                    comm.Recv(np.zeros(1), ANY_SOURCE)
                elif call == "iprobe":
                    comm.iprobe(source=ANY_SOURCE)
                else:
                    requests = [comm.Irecv(np.zeros(1), rank) for rank in (1, 2)]
                    type(requests[0]).Testany(requests)
        except Timeout:
            raise ValueError("a deadline") from None

    record = {"recv": "recv:0.0=2", "iprobe": "probe:0.0=2", "Testany": "done:0.0=1"}[call]
    (found,) = explore(Target(surviving), Case(seed=0, ranks=3, choices=""), [record])
    assert (found.schedule, found.failure) == (None, None)


def test_polls_end_if_a_forced_outcome_does_not_come(monkeypatch):
    """At the limit for polls in a row, and not at the one for programs that wait for a time."""
    monkeypatch.setattr(diagnosis, "LIVELOCK_POLLS", 10_000)
    monkeypatch.setattr(diagnosis, "POLLS_EACH", 100)
    polls = itertools.count(1)

    def polling(comm):
        if comm.rank == 0:
            comm.recv(source=ANY_SOURCE)
            comm.send(None, 1)
        elif comm.rank == 1:
            comm.send(None, 0)
            while not comm.iprobe(source=0):
                assert next(polls) <= 10_000

    (found,) = explore(Target(polling), Case(seed=0, ranks=3, choices=""), ["recv:0.0=2"])
    assert (found.schedule, found.failure) == (None, None)
    assert next(polls) > 1


def test_a_window_serves_others_after_a_death():
    """The access of a living rank is a decision, also if the last rank that acted has died."""

    def adding(comm):
        window = comm.Win.Allocate(8, 8, comm=comm)
        comm.Barrier()
        window.Lock(0)
        window.Put(np.ones(1), 0)
        window.Unlock(0)
        window.Free()

    for rank, time_s in itertools.product(range(3), (9e-5, 17e-5)):
        case = Case(seed=0, ranks=3, choices="", faults=f"crash:{rank}@{time_s}s")
        assert attempt(Target(adding), case)[0] is None


def test_a_rank_whose_leave_went_to_a_dead_coordinator_ends():
    """It succeeds the coordinator while it leaves, and waited for itself."""
    choices = (
        "done:0.0=0,done:1.0=0,done:1.1=0,done:1.2=0,done:1.3=0,done:1.4=0,done:2.0=0,done:2.1=0,"
        "done:2.2=0,done:2.3=0,done:2.4=0,probe:0.0=none,probe:0.1=none,probe:0.2=none,probe:0.3=1,"
        "probe:0.4=2,probe:0.5=none,probe:0.6=none,probe:0.7=1,probe:0.8=2,probe:0.9=1,probe:1.0=none,"
        "probe:1.1=none,probe:1.2=none,probe:1.3=none,probe:1.4=0,probe:1.5=none,probe:1.6=none,"
        "probe:1.7=2,probe:1.8=2,probe:1.9=2,probe:1.10=none,probe:1.11=none,probe:2.0=none,"
        "probe:2.1=none,probe:2.2=none,probe:2.3=none,probe:2.4=none,probe:2.5=1,probe:2.6=none,"
        "probe:2.7=none,probe:2.8=none"
    )
    case = Case(
        seed=0, ranks=3, faults="crash:0@0.060011500000000016s", choices=choices, survive=True,
        parameters={"policy": "selective", "iterations": 8},
    )  # fmt: skip
    failure, watch, _ = attempt(Target(PLANTED.parent / "fuzzed_policies.py"), case)
    assert failure is None
    assert max(task.clock for task in watch.world.kernel.tasks) < 10


DEEP = sorted((PLANTED.parent / "deep").glob("*.py"))
SMALL = ("cancel_missed", "late_register", "two_locks")  # for three ranks


@pytest.mark.parametrize("file", DEEP, ids=lambda file: file.stem)
def test_a_deep_bug_is_found_and_made_small(file):
    """Drawn cases do not reach them: times that differ a tenfold or more would have to change places."""
    ranks = 3 if file.stem in SMALL else 4
    case = Case(seed=0, ranks=ranks, choices="", world={"deadline_s": math.inf})
    found = Exhaustion(Target(file)).run([case])
    (small,) = found.small.values()
    record = parsed(small.case.choices)
    assert 1 <= len(record) <= 3
    assert attempt(Target(file), small.case)[0].is_same(small)
    fixed = Case(seed=0, ranks=ranks, choices="", world={"deadline_s": math.inf}, parameters={"fixed": True})
    assert Exhaustion(Target(file), deviations=2).run([fixed]).failures == {}
    # `benchmarks/schedules.py --drawn 10000` draws more.
    space = Space(ranks=[ranks], world={"deadline_s": math.inf})
    assert campaign(Target(file), space, range(40), shrink=False).failures == {}


def test_there_are_eight_deep_bugs():
    """A glob that finds nothing would pass."""
    assert len(DEEP) == 8


@pytest.mark.parametrize("name", ["arrival_order", "lost_update", "lost_wakeup", "reused_tag"])
def test_priorities_find_bugs_and_replay_them(name, capsys):
    """Those that depend on the order of events alone; the same program without the bug passes."""
    words = [str(PLANTED / f"{name}.py"), "--pct", "2", "--ranks", "3", "--jobs", "0", "--runs", "60"]
    words += ["--set", "iterations=2"]
    assert serve("fuzz", [*words, "--json"]) == 1
    failure = json.loads(capsys.readouterr().out.splitlines()[-1])["failures"][0]
    assert "pct:" in failure["replay"]
    assert serve("fuzz", shlex.split(failure["replay"])[2:]) == 1
    capsys.readouterr()
    assert serve("fuzz", [*words, "--set", "fixed=True"]) == 0
    text = capsys.readouterr().out
    assert "a case finds a given bug of depth 2 with a probability of at least 1/(3·" in text


def test_priorities_are_strict():
    """With depth 1, a rank acts only if all ranks with a higher priority wait or have ended."""
    orders = set()

    def chatter(comm):
        if comm.rank == 0:
            orders.add(tuple(comm.recv(source=ANY_SOURCE) for _ in range(6)))
        else:
            for _ in range(2):
                with comm.compute(0.01):
                    pass
                comm.send(comm.rank, 0)

    space = Space(ranks=[4], depth=1)
    campaign(Target(chatter), space, range(40), shrink=False)
    assert all(order[0::2] == order[1::2] for order in orders)
    assert len(orders) == math.factorial(3)


def test_wrong_options_are_refused():
    """Bounds without a search, a search that also draws, and priorities of no depth."""
    file = str(PLANTED / "arrival_order.py")
    for words in (["--deviations", "1"], ["--exhaustive", "--pct", "2"], ["--pct", "0"]):
        with pytest.raises(ParameterError, match=words[0] if len(words) == 2 else "--pct"):
            serve("fuzz", [file, *words])
