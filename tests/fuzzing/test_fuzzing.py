"""`spawnsim fuzz`: planted bugs are found, made small and replayed; what is right is left alone; each fault strikes."""

import json
import select
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.random_policies import EVERY, POLICIES
from support.virtual_run import platform

import spawnsim
from spawnsim import SpawnPolicy
from spawnsim.cli import main, serve
from spawnsim.cli.fuzz import numbers
from spawnsim.errors import CheckFailed, ParameterError, SpawnsimError, Timeout
from spawnsim.fuzzing import campaign as campaigns
from spawnsim.fuzzing import exploring
from spawnsim.fuzzing.campaign import Target, attempt, campaign, portion, reduce
from spawnsim.fuzzing.cases import Calm, Case, Space
from spawnsim.models.faults import KINDS
from spawnsim.policies import NoLoCoPolicy, OuterOptimizerPolicy

PROGRAMS = Path(__file__).parent.parent / "programs"
PLANTED = sorted(path.stem for path in (PROGRAMS / "planted").glob("*.py"))
SURVIVORS = ("own_step", "world_size")  # programs that promise to go on without the dead
SEEDS = 50
ALL_KINDS = "; ".join(KINDS)


def planted(name: str, *, fixed: bool) -> tuple[Target, Space]:
    """Return a program with a planted bug, or without it, and what its cases are drawn from."""
    parameters = {"iterations": 20, "fixed": fixed}
    return Target(PROGRAMS / "planted" / f"{name}.py"), Space(
        ranks=(2, 3, 5, 8), parameters=parameters, survive=name in SURVIVORS
    )


def test_there_are_twelve_planted_bugs():
    """No one is left out, as a file of another name would be."""
    assert len(PLANTED) == 12


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_made_small_and_replayed(name, capsys):
    """Within 50 seeds; at most 4 ranks and 3 faults are left; the command that is printed finds it again."""
    target, space = planted(name, fixed=False)
    found = campaign(target, space, range(SEEDS), most=1)
    assert found.failures
    small = next(iter(found.small.values()))
    assert small.case.ranks <= 4
    assert len(small.case.plan.faults) <= 3
    words = shlex.split(small.case.command(str(target.program)))
    assert words[:2] == ["spawnsim", "fuzz"]
    assert serve("fuzz", [*words[2:], "--json"]) == 1
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["failures"][0]["message"] == small.message


@pytest.mark.parametrize("name", PLANTED)
def test_the_same_program_without_the_bug_is_left_alone(name):
    """No false alarm: what is reported is the bug, and not what the fuzzer does to the program."""
    target, space = planted(name, fixed=True)
    assert portion(target, space, range(100, 108)).failures == {}


@pytest.mark.parametrize("policy", EVERY)
def test_built_in_policies_survive(policy):
    """In the loop that the guide shows, with faults that MPI rules out, too: no invariant broken, no hang.

    And no state that the policy's class does not declare.
    """
    kinds = "crash; pause; slow; skew; down; delay; reorder; partition; clog; restart; drop; duplicate"
    space = Space(
        ranks=[2, 3, 5, 11], faults=kinds, survive=True, parameters={"policy": policy, "iterations": 8}
    )
    target = Target(PROGRAMS / "fuzzed_policies.py")
    # `benchmarks/fuzz_policies.py` tries many more.
    found = portion(target, space, range(6 if policy in POLICIES else 3))
    assert found.failures == {}
    damaged = portion(target, replace(space, faults="corrupt; crash"), range(2))
    assert {state for state, _ in found.states + damaged.states} <= found.possible


@pytest.mark.parametrize(
    ("policy", "ranks", "seed", "faults"),
    [
        # The server's weights were taken up in another order than that of the model, after a recovery.
        ("server", 2, 3, "crash:1@0s; restart:1@0.010325s"),
        # A message that was lost was a deadlock of who waited for it, and no `Timeout`.
        ("push_sum", 2, 1, "drop:*>*@0.0149s+0.0001s,0.5; delay:0>1@0s+0.01275s,0.0004s,0.007s"),
    ],
)
def test_what_campaigns_have_found_stays_mended(policy, ranks, seed, faults):
    """Each as small as it was made."""
    parameters = {"policy": policy, "iterations": 2}
    case = Case(seed=seed, ranks=ranks, faults=faults, parameters=parameters, survive=True)
    assert attempt(Target(PROGRAMS / "fuzzed_policies.py"), case)[0] is None


def test_ranks_that_end_an_average_with_different_models_are_told():
    """A policy that promises equal ones, and adds something of its rank's own."""

    class Apart(OuterOptimizerPolicy):
        def turn(self, iteration, model, optimizer, info):
            healed = super().turn(iteration, model, optimizer, info)
            with torch.no_grad():
                model.bias[0] += 1e-6 * self.outer.comm.Get_rank()
            return healed

    def main(comm):
        model = torch.nn.Linear(4, 3)
        policy = Apart.diloco(2)
        for iteration in range(4):
            policy(iteration, model, torch.optim.SGD(model.parameters(), lr=0.1), group=comm)

    failure = attempt(Target(main), Case(seed=0, ranks=3))[0]
    assert (failure.what, "bias differs from" in failure.message) == ("equal models", True)


def test_a_pair_that_loses_a_message_recovers():
    """What a campaign has found: a policy's wait for a message that was lost was a deadlock, and no `Timeout`."""

    def main(comm):
        model = torch.nn.Linear(4, 3)
        optimizer, policy = torch.optim.SGD(model.parameters(), lr=0.1), NoLoCoPolicy(2)
        group, iteration = comm, 0
        while iteration < 3:
            try:
                with group.compute(0.01):
                    pass
                policy(iteration, model, optimizer, group=group)
                iteration += 1
            except Timeout:
                found = group.recover(iteration)
                group, iteration = found.comm, found.step

    failure, watch, _ = attempt(
        Target(main), Case(seed=0, ranks=2, faults="drop:*>0@0.013s+0.02s", survive=True)
    )
    assert failure is None
    assert watch.fired()["drop", "Isend"]


def exchange(comm, iterations=10):
    """Collectives, messages with a wildcard, windows: what faults can strike."""
    comm.record(begins=True)
    window = comm.Win.Allocate(8, comm=comm)
    for iteration in range(iterations):
        with comm.compute(0.01):
            pass
        total = np.empty(3)
        comm.record(shown_s=comm.clock.now())
        comm.Allreduce(np.ones(3), total)
        comm.isend(np.ones(3), (comm.rank + 1) % comm.size, tag=iteration)
        if comm.iprobe(tag=iteration):
            comm.recv(tag=iteration)
        window.Lock(0)
        window.Put(np.ones(1), 0)
        window.Unlock(0)


def test_each_kind_of_fault_is_proved_to_strike():
    """And it is told in which calls."""
    found = portion(Target(exchange), Space(faults=ALL_KINDS), range(24))
    assert set(found.drawn) == set(KINDS)
    assert all(found.kinds()[kind] for kind in KINDS)
    assert {("delay", "Allreduce"), ("delay", "isend"), ("slow", "compute")} <= set(found.fired)


def test_a_fault_that_never_strikes_is_named(capsys):
    """A plan that has no effect proves nothing."""
    program = PROGRAMS / "planted" / "off_by_one_age.py"
    fixed = ["--set", "fixed=True", "--jobs", "0", "--runs", "2", "--alive", "none"]
    assert serve("fuzz", [str(program), *fixed, "--faults", "slow:0@900s+1s,2"]) == 0
    assert "never took effect, so nothing is known about it: slow" in capsys.readouterr().out


def test_two_processes_find_what_one_finds():
    """The same cases, however they are divided."""
    target, space = planted("clock_decides", fixed=False)
    alone = campaign(target, space, range(24), shrink=False)
    together = campaign(target, space, range(24), jobs=2, shrink=False)
    assert alone.counts == together.counts
    assert alone.failures == together.failures
    assert alone.fired == together.fired


def test_the_same_case_again_is_the_same_run():
    """To the bit: digest, and what has struck."""
    case = Space().case(3, lambda ranks: Calm(0.1, 0.01))
    runs = [attempt(Target(exchange), case)[1] for _ in range(2)]
    assert runs[0].world.digest() == runs[1].world.digest()
    assert runs[0].fired() == runs[1].fired()
    assert Case.from_json(case.to_json()) == case


# ------------------------------------------------------------------------------------------------------ invariants


class Wrong(SpawnPolicy):
    """A policy that breaks one invariant, in its third call on rank 1."""

    promises = ("range",)

    def __init__(self, how):
        super().__init__(1)
        self.how = how

    def act(self, iteration, model, optimizer, metric, comm, info):
        comm.Barrier()
        if comm.rank == 1 and iteration == 2:
            with torch.no_grad():
                if self.how == "finite parameters":
                    model.weight[0, 0] = torch.nan
                elif self.how == "range of parameters":
                    model.weight *= 3.0
                elif self.how == "same shapes":
                    model.weight.data = torch.ones(1, 1)
                elif self.how == "bounded waits":
                    comm.clock.sleep(1000.0)
        return model, optimizer


@pytest.mark.parametrize(
    "how", ["finite parameters", "range of parameters", "same shapes", "bounded waits", ""]
)
def test_a_policy_that_breaks_an_invariant_is_caught_in_that_call(how):
    """With rank, time and line; the program cannot catch it. The same policy that breaks none passes."""

    def main(comm):
        model = torch.nn.Linear(2, 2)
        optimizer, policy = torch.optim.SGD(model.parameters(), lr=0.1), Wrong(how)
        for iteration in range(4):
            try:
                policy(iteration, model, optimizer, group=comm)
            except SpawnsimError:
                comm.clock.sleep(0.0)

    failure = attempt(Target(main), Case(seed=0, ranks=3))[0]
    assert (failure.what if failure else "") == how
    if how:
        assert "rank 1 at" in failure.message
        assert "test_fuzzing.py:" in failure.message


def test_a_message_that_nobody_receives_is_told():
    """In a run without faults: with them, who should receive it may have died."""

    def main(comm):
        if comm.rank == 0:
            comm.send("lost", 1, tag=9)

    failure = attempt(Target(main), Case(seed=0, ranks=2))[0]
    assert (failure.what, "rank 0 to rank 1 with tag 9" in failure.message) == ("no lost message", True)


def test_a_rank_that_never_gets_on_after_a_fault_is_told():
    """Safety alone would pass: it does nothing wrong, and nothing at all."""

    def main(comm, gives_up=True):
        for iteration in range(100):
            with comm.compute(0.01):
                pass
            late = comm.clock.now() > 0.05 + 0.0101 * iteration
            if not (gives_up and comm.rank == 1 and late):
                comm.record(iteration=iteration)

    found = portion(Target(main), Space(ranks=[3]), range(24))  # also where nobody says how long it may take
    assert {key[0] for key in found.failures} == {"progress after faults"}
    case = Case(seed=0, ranks=3, faults="pause:1@0.1s+0.2s", alive_s=0.2)
    failure = attempt(Target(main), case)[0]
    assert failure.what == "progress after faults"
    assert "ranks [1] made no progress from 0.3 s" in failure.message
    assert attempt(Target(main), Case(**(vars(case) | {"parameters": {"gives_up": False}})))[0] is None


def test_an_endless_loop_is_told(monkeypatch):
    """One that makes no call, so that virtual time stands still."""
    monkeypatch.setattr(campaigns, "LIMIT_S", 0.3)

    def main(comm):
        while comm.rank == 0:
            pass

    failure = attempt(Target(main), Case(seed=0, ranks=2))[0]
    assert failure.what == "Overdue" and "an endless loop without a call?" in failure.message


def test_a_case_that_waits_for_the_machine_is_given_time(monkeypatch):
    """Ten times as long; then it is told that it waits, not that it computes."""
    monkeypatch.setattr(campaigns, "LIMIT_S", 1.0)

    def main(comm):
        for _ in range(8):
            select.select([], [], [], 0.25)  # no virtual time

    assert attempt(Target(main), Case(seed=0, ranks=1))[0] is None
    monkeypatch.setattr(campaigns, "STARVED", 1)
    assert "outside of the simulation" in attempt(Target(main), Case(seed=0, ranks=1))[0].message


def test_check_of_a_file_looks_at_each_run(tmp_path, capsys):
    """`check(run)` in the program's file; state of its modules does not outlive a case."""
    program = tmp_path / "counted.py"
    program.write_text(
        "import beside\nCALLS = []\n"
        "def main(comm):\n    CALLS.append(1)\n    beside.SEEN.append(1)\n"
        "    comm.record(calls=len(CALLS), seen=len(beside.SEEN))\n"
        "def check(run):\n    assert run.table['calls'].max() == run.table['seen'].max() == run.totals['ranks']\n"
        "    return run.totals['ranks'] < 4\n"
    )
    (tmp_path / "beside.py").write_text("SEEN = []\n")
    assert (
        serve("fuzz", [str(program), "--runs", "8", "--ranks", "2-3", "--jobs", "0", "--faults", "none"]) == 0
    )
    assert (
        serve("fuzz", [str(program), "--runs", "8", "--ranks", "2-5", "--jobs", "0", "--faults", "none"]) == 1
    )
    out = capsys.readouterr().out
    assert "check(run) returned False" in out
    assert "--ranks 4 " in out


@pytest.mark.parametrize("body", ["raise KeyError('at once')", "comm.check(False, 'at once')"])
def test_a_program_that_fails_before_any_time_has_passed_is_told(body, tmp_path, capsys):
    """Where no time passes no fault is drawn, and the failure is the program's."""
    program = tmp_path / "short.py"
    program.write_text(f"def main(comm):\n    {body}\n")
    assert serve("fuzz", [str(program), "--runs", "9", "--ranks", "2-12", "--jobs", "0"]) == 1
    out = capsys.readouterr().out
    assert "9 of 9 cases" in out
    assert "at once" in out


def test_faults_may_end_a_program_that_promises_nothing():
    """A death ends it, as MPI lets it: only a program that promises to survive has failed then."""

    def main(comm):
        for _ in range(5):
            with comm.compute(0.01):
                pass
            comm.Barrier()

    case = Case(seed=0, ranks=3, faults="crash:1@0.02s")
    assert attempt(Target(main), case)[0::2] == (None, True)
    assert attempt(Target(main), Case(**(vars(case) | {"survive": True})))[0].what == "RankFailed"


def test_an_unmodified_program_is_fuzzed_too(capsys):
    """With its own arguments; and what it prints stays out of the report."""
    program = PROGRAMS / "suite" / "oddeven.py"
    assert serve("fuzz", [str(program), "--runs", "4", "--jobs", "0"]) == 0
    assert "4 cases" in capsys.readouterr().out.splitlines()[-1]


# ------------------------------------------------------------------------------------------------- ties, and checks


def arrivals(comm):
    """Rank 0 takes one message of each from anybody."""
    if comm.rank:
        comm.send(comm.rank, 0)
    else:
        comm.record(order=".".join(str(comm.recv()) for _ in range(comm.size - 1)))


def test_ties_order_what_comes_at_one_time():
    """By number, the other way round, or as a seed says; the same each time."""

    def order(ties):
        run = spawnsim.run(arrivals, ranks=12, ties=ties, platform=platform())
        return [int(word) for word in run.table["order"][0].split(".")]

    by_number = list(range(1, 12))
    assert order("fifo") == by_number
    assert order("reverse") == by_number[::-1]
    shuffled = [order(f"random:{seed}") for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == by_number != shuffled[0]


def test_ties_do_not_change_what_does_not_depend_on_them():
    """A program that names whom it receives from has one digest under all orders."""

    def main(comm):
        for iteration in range(6):
            with comm.compute(0.01):
                pass
            comm.isend(iteration, (comm.rank + 1) % comm.size, tag=iteration)
            comm.recv(source=(comm.rank - 1) % comm.size, tag=iteration)
            comm.allreduce(comm.rank)

    orders = ("fifo", "reverse", "random:1", "random:2")
    digests = {
        spawnsim.run(main, ranks=12, ties=ties, platform="ethernet-10g").totals["digest"] for ties in orders
    }
    assert len(digests) == 1


def test_half_a_fault_is_refused():
    """A drawn fault has a drawn rank and time: `crash:1@*` would crash other ranks, too."""
    with pytest.raises(ParameterError, match="give crash alone"):
        Space(faults="delay; crash:1@*")
    assert Space(faults="crash:*@*; delay:*>*@*").kinds == ("crash", "delay")


def test_check_ends_a_virtual_run_and_cannot_be_caught():
    """With rank, time and line."""

    def main(comm):
        comm.check(True, "fine")
        with comm.compute(0.5):
            pass
        try:
            comm.check(comm.rank != 11, "eleven")
        except SpawnsimError:
            comm.barrier()
        comm.barrier()

    with pytest.raises(CheckFailed, match=r"eleven \(rank 11 at 0\.5\d* s, test_fuzzing\.py:\d+\)"):
        spawnsim.run(main, ranks=12)


def test_check_on_a_real_rank_records_a_warning():
    """It harms nobody: the job goes on."""
    from spawnsim.real.runtime.rank import RankComm

    told = []

    class Rank(RankComm):
        def __init__(self):
            self.record = type(
                "Record", (), {"event": lambda self, kind, **fields: told.append((kind, fields))}
            )()

    Rank().check(True, "fine")
    Rank().check([], "empty")
    assert told == [("warning", {"text": "empty"})]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--faults", "crush"], "did you mean crash"),
        (["--faults", "crash:99@1s"], "no case has more than 8 ranks"),
        (["--faults", "drop:0@1s"], "needs a link"),
        (["--ranks", "0"], "at least 1"),
        (["--ranks", "2-x"], "write 8, 2-8"),
        (["--ties", "lifo"], "write fifo, reverse, random:SEED or pct:"),
        (["--runs", "0"], "at least 1"),
        (["--set", "nonsense=1"], "main takes no parameter nonsense"),
        (["--", "argument"], "argument"),
    ],
)
def test_what_has_no_meaning_is_refused_in_one_line(options, message):
    """Before any case is carried out."""
    program = PROGRAMS / "planted" / "reused_tag.py"
    with pytest.raises(ParameterError, match=message):
        serve("fuzz", [str(program), "--jobs", "0", *options])


def test_numbers_of_ranks():
    """Single ones, and from to."""
    assert numbers("2-4,8") == [2, 3, 4, 8]
    for file, message in (("nowhere.py", "No such file"), (".", "Is a directory")):
        with pytest.raises(ParameterError, match=f"cannot read {file}: {message}"):
            serve("fuzz", [file])


def test_shrinking_keeps_the_failure():
    """A failure that needs its fault keeps it; one that does not loses it. Times become round."""

    def main(comm, iterations=20, needs=True):
        for _ in range(iterations):
            with comm.compute(0.01):
                pass
        comm.check(not needs or comm.clock.now() < 0.25 + 0.01 * iterations, "late")
        comm.check(needs or comm.size < 3, "many")

    faults = "pause:6@0.0513s+0.3127s; slow:2@0.01s+0.02s,3; delay:*>*@0s+0.2s,0s,0.01s"
    for needs, left in ((True, ["pause"]), (False, [])):
        case = Case(
            seed=5, ranks=8, faults=faults, ties="random:5", parameters={"iterations": 20, "needs": needs}
        )
        target = Target(main)
        small = reduce(target, attempt(target, case)[0], range(1, 9))
        assert [fault.kind for fault in small.case.plan.faults] == left
        assert (small.case.ranks, small.case.ties) == (1 if needs else 3, "fifo")
        assert small.case.parameters["iterations"] == 1


def test_shrinking_keeps_to_the_error_and_to_the_numbers_of_ranks():
    """A ring that closes with an odd number of ranks; alone a rank would send to itself, another deadlock."""

    def main(comm):
        down, up = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        if comm.rank % 2:
            comm.recv(source=up)
            comm.ssend("first", up)
            comm.recv(source=down)
            comm.ssend("last", down)
        else:
            comm.ssend("last", down)
            comm.recv(source=down)
            comm.ssend("first", up)
            comm.recv(source=up)
        comm.barrier()

    def alone(comm):
        comm.check(comm.size != 8, "eight")
        comm.check(comm.size != 2, "two")

    target = Target(main)
    failure = attempt(target, Case(seed=0, ranks=7))[0]
    assert failure.what == "Deadlock"
    assert failure.waits[0].startswith("ssend test_fuzzing.py:")
    for allowed, ranks in ((range(2, 9), 3), ([1, 7, 8], 7), ([5, 6, 7], 5)):
        small = reduce(target, failure, allowed)
        assert (small.case.ranks, small.waits) == (ranks, failure.waits)
    found = attempt(Target(alone), Case(seed=0, ranks=8))[0]
    assert reduce(Target(alone), found, range(1, 9)).case.ranks == 8


GATHERED = """
def main(comm, right):
    if comm.rank:
        comm.send(comm.rank, 0)
    else:
        got = [comm.recv() for _ in range(comm.size - 1)]
        comm.check(right or not got, "never")
"""


@pytest.mark.parametrize(
    ("option", "module", "after", "right", "text"),
    [
        ("--faults=none", campaigns, 20, True, "16 cases in"),
        ("--faults=none", campaigns, 9, False, "never (rank 0"),
        ("--exhaustive", exploring, 20, True, "more were found and not run; complete up to 1 deviation"),
    ],
)
def test_ctrl_c_shows_the_findings_so_far(option, module, after, right, text, monkeypatch, capsys, tmp_path):
    """Of whole portions; also if it comes while a failure is made small."""
    left, run = iter(range(after)), module.attempt

    def interrupted(*arguments, **how):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return run(*arguments, **how)

    monkeypatch.setattr(module, "attempt", interrupted)
    file = tmp_path / "gathered.py"
    file.write_text(GATHERED)
    words = ["fuzz", str(file), option, "--jobs", "0", "-n", "6", "--set", f"right={right}"]
    assert main(words) == 130
    found = capsys.readouterr()
    assert (text in found.out, found.err) == (True, "spawnsim: interrupted\n")
    left = iter(range(after))
    assert main([*words, "--json"]) == 130
    assert len(json.loads(capsys.readouterr().out)["failures"]) == (not right)
