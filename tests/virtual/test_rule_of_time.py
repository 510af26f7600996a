"""The rule of virtual time, held to a plain discrete-event engine and to its promises about events."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_engine import ANY, LATENCY, OVERHEAD, Engine
from virtual_run import platform, run

from spawnsim.comm import Status
from spawnsim.errors import Deadlock, Livelock


def as_rank(program, log):
    """Return a main that carries out a program of the reference engine, with real messages."""

    def main(comm):
        handles, sent = [], 0
        for what, *arguments in program[comm.rank]:
            if what == "compute":
                with comm.compute(arguments[0]):
                    pass
            elif what == "send":
                dest, tag, nbytes = arguments
                payload = np.zeros(nbytes, np.uint8)
                payload[:4].view(np.int32)[0] = sent
                comm.Send(payload, dest, tag)
                sent += 1
            elif what == "probe":
                log[comm.rank].append(("seen", comm.Iprobe(*arguments), comm.clock.now() - OVERHEAD))
            elif what == "recv":
                receive(comm, log, comm.Recv, arguments)
            elif what == "irecv":
                buf = np.zeros(4096, np.uint8)
                handles.append((buf, comm.Irecv(buf, *arguments)))
            elif handles:
                wait(comm, log, *handles.pop(0))

    return main


def receive(comm, log, call, arguments):
    """Receive and log."""
    buf, status = np.zeros(4096, np.uint8), Status()
    call(buf, *arguments, status)
    log[comm.rank].append(
        ("got", status.source, status.tag, int(buf[:4].view(np.int32)[0]), comm.clock.now())
    )


def wait(comm, log, buf, request):
    """Wait for a request and log."""
    status = Status()
    request.Wait(status)
    log[comm.rank].append(
        ("got", status.source, status.tag, int(buf[:4].view(np.int32)[0]), comm.clock.now())
    )


def random_programs(seed, size, steps, kinds):
    """Return programs without ties in time: every duration is a random float."""
    rng = np.random.default_rng(seed)
    programs = []
    for rank in range(size):
        program = [("compute", float(rng.uniform(0, 0.01)))]
        for kind in rng.choice(kinds, steps):
            other = int((rank + 1 + rng.integers(size - 1)) % size)
            tag, any_source, any_tag = int(rng.integers(2)), rng.random() < 0.4, rng.random() < 0.3
            pattern = (ANY if any_source else other, ANY if any_tag else tag)
            if kind == "compute":
                program.append(("compute", float(rng.uniform(0, 0.01))))
            elif kind == "send":
                program.append(("send", other, tag, int(rng.integers(4, 4096))))
            else:
                program.append((str(kind), *(pattern if kind != "wait" else ())))
        programs.append(program)
    return programs


KINDS = ["compute", "send", "send", "send", "recv", "probe", "irecv", "wait"]


@pytest.mark.parametrize("contention", ["none", "serial", "fifo", "fair"])
@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(2, 8), steps=st.integers(1, 14))
def test_random_programs_log_what_a_plain_engine_logs(contention, seed, size, steps):
    """Named and wildcard receives, non-blocking ones and probes: the same messages at the same times."""
    programs = random_programs(seed, size, steps, KINDS)
    expected = Engine(programs, contention).run()
    logs = [[] for _ in range(size)]
    try:
        run(as_rank(programs, logs), size, deadline_s=float("inf"), platform=platform(contention=contention))
    except Deadlock:
        pass  # random programs often end in one; what came before must agree all the same
    for found, wanted in zip(logs, expected, strict=True):
        assert [entry[:-1] for entry in found] == [entry[:-1] for entry in wanted]
        assert [entry[-1] for entry in found] == pytest.approx(
            [entry[-1] for entry in wanted], rel=1e-12 if contention != "fair" else 1e-9
        )


@pytest.mark.parametrize(("contention", "events"), [("none", 0), ("serial", 0), ("fifo", 20)])
def test_a_ring_of_named_receives_needs_no_event_a_message(contention, events):
    """What carries no information costs no event; where arrival decides, ranks in step pay one event a round."""

    def main(comm):
        for _ in range(20):
            comm.send(None, (comm.rank + 1) % comm.size)
            comm.recv(source=(comm.rank - 1) % comm.size)

    totals, _ = run(main, 100, deadline_s=float("inf"), platform=platform(contention=contention))
    assert (totals.scheduled, totals.messages) == (events, 2000)


def test_wildcards_cost_one_event_a_message():
    """A coordinator that takes from anybody pays for ordering, once a message."""

    def main(comm):
        if comm.rank == 0:
            for _ in range(comm.size - 1):
                comm.recv()
        else:
            with comm.compute(0.001 * comm.rank):
                pass
            comm.send(None, 0)

    totals, _ = run(main, 50, deadline_s=float("inf"))
    assert totals.scheduled <= 2 * 50


def test_wildcards_take_the_earliest_arrival_though_it_is_sent_last():
    """The rank that runs first in the engine is not the one whose message arrives first."""

    def main(comm):
        if comm.rank == 2:
            comm.record(order=str([comm.recv() for _ in range(2)]))
        else:
            with comm.compute(1.0 - 0.5 * comm.rank):
                pass
            comm.send(comm.rank, 2)

    assert run(main, 3)[1].column("order") == {2: "[1, 0]"}


def test_a_rank_leaves_a_rooted_collective_when_its_own_part_is_over():
    """The root of a broadcast does not wait for a straggler, and may send it what it waits for."""

    def main(comm):
        if comm.rank == 1:
            assert comm.recv(source=0) == "go"  # sent behind the broadcast that this rank has not joined yet
        comm.bcast("x" if comm.rank == 0 else None)
        if comm.rank == 0:
            comm.record(left=comm.clock.now())
            comm.send("go", 1)

    assert run(main, 4)[1].column("left")[0] < 3 * LATENCY


def test_polling_without_end_is_a_livelock():
    """A rank that polls for what nobody will do is reported, not left running."""

    def main(comm):
        while comm.rank == 0 and not comm.Iprobe():
            pass

    with pytest.raises(Livelock, match="polls in a row"):
        run(main, 2)
