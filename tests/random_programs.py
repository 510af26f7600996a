"""Random message-passing programs, run on virtual ranks and by the plain engine: they must log the same.

usage: PYTHONPATH=tests python tests/random_programs.py [--runs N] [--first SEED] [MIXTURE...]
"""

import argparse
import math
from dataclasses import dataclass, replace

import numpy as np
from reference_engine import ANY, Engine, Net
from virtual_run import run

from spawnsim.comm import Status
from spawnsim.errors import Deadlock, Timeout
from spawnsim.virtual.network import Switch
from spawnsim.virtual.network.cost import Costs
from spawnsim.virtual.network.links import Piece
from spawnsim.virtual.platform import Platform
from spawnsim.virtual.requests import Request

LARGEST = 4096
MODES = {"standard": "Send", "synchronous": "Ssend", "buffered": "Rsend"}


DEFAULT = Net()


@dataclass(frozen=True)
class Mixture:
    """Which steps random programs are made of, and on what network. With `grid` all times are multiples of so many
    seconds, so that many things happen at the same time.
    """

    kinds: str
    net: Net = DEFAULT
    comms: int = 1
    grid: float = 0.0
    to_self: float = 0.0


MESSAGES = "compute send send send recv iprobe irecv wait"
EVERYTHING = (
    "compute compute sleep send send isend isend isend ssend issend rsend recv recv irecv irecv irecv iprobe probe "
    "mprobe wait waitall waitany waitsome test test cancel timed_recv timed_wait timed_send timed_ssend"
)
RENDEZVOUS = Net(eager_bytes=1000)
EXACT = Net(latency=2.0**-10, bandwidth=2.0**20, call=2.0**-20)  # sums of its times are exact
MIXTURES = {
    "messages": Mixture(MESSAGES),
    "serial": Mixture(MESSAGES, Net(contention="serial")),
    "fifo": Mixture(MESSAGES, Net(contention="fifo")),
    "fair": Mixture(MESSAGES, Net(contention="fair")),
    "rendezvous": Mixture(MESSAGES + " isend isend test waitsome", RENDEZVOUS),
    "rendezvous serial": Mixture(MESSAGES + " isend isend", replace(RENDEZVOUS, contention="serial")),
    "rendezvous fifo": Mixture(MESSAGES + " isend isend test", replace(RENDEZVOUS, contention="fifo")),
    "rendezvous fair": Mixture(MESSAGES + " isend isend test", replace(RENDEZVOUS, contention="fair")),
    "synchronous": Mixture(MESSAGES + " ssend issend issend rsend test"),
    "probes": Mixture(MESSAGES + " probe probe mprobe isend"),
    "several": Mixture(MESSAGES + " isend irecv irecv test waitany waitsome waitall"),
    "several serial": Mixture(
        MESSAGES + " isend irecv irecv test waitany waitsome waitall", Net(contention="serial")
    ),
    "cancel": Mixture(MESSAGES + " irecv irecv cancel cancel test", RENDEZVOUS),
    "deadlines": Mixture(
        MESSAGES + " timed_recv timed_recv timed_wait timed_send timed_ssend ssend", RENDEZVOUS
    ),
    "overheads": Mixture(EVERYTHING, replace(RENDEZVOUS, send=2e-5, receive=3e-5)),
    "everything": Mixture(EVERYTHING, RENDEZVOUS, comms=3, to_self=0.1),
    "everything serial": Mixture(EVERYTHING, replace(RENDEZVOUS, contention="serial"), comms=3, to_self=0.1),
    "ties": Mixture(EVERYTHING, replace(EXACT, eager_bytes=1024), comms=2, grid=2.0**-12, to_self=0.05),
    "no latency": Mixture(EVERYTHING, replace(EXACT, latency=0.0, eager_bytes=1024), comms=2, grid=2.0**-12),
}


def communicators(size, count):
    """Return the world ranks of each communicator: the world, the world backwards, the even and the odd ranks."""
    ranks = range(size)
    return [tuple(ranks), tuple(reversed(ranks)), tuple(ranks[::2]), tuple(ranks[1::2])][
        : 4 if count > 2 else count
    ]


def random_programs(seed, size, steps, mixture):
    """Return a program for each rank. Most messages that one rank sends another receives, or the programs would soon
    wait for each other for ever.
    """
    draw = Draw(np.random.default_rng([seed, size, steps]), size, mixture)
    drawn = [(0.0, rank, ("compute", draw.seconds())) for rank in range(size)]
    for kind in draw.rng.choice(mixture.kinds.split(), steps * size):
        drawn += draw.message(str(kind)) if kind in SENDS else draw.alone(str(kind))
    drawn.sort(key=lambda each: each[0])
    return [[step for _, rank, step in drawn if rank == me] for me in range(size)]


SENDS = {"send": "standard", "isend": "standard", "ssend": "synchronous", "issend": "synchronous",
         "rsend": "buffered", "timed_send": "standard", "timed_ssend": "synchronous"}  # fmt: skip
RECEIVES = ("recv", "irecv", "timed_recv", "mprobe")


class Draw:
    """Draws steps, each with its place in the order of its rank's program: a number from 0 to 1."""

    def __init__(self, rng, size, mixture):
        self.rng, self.size, self.mixture = rng, size, mixture
        self.comms = communicators(size, mixture.comms)
        kinds = mixture.kinds.split()
        self.receives = [kind for kind in kinds if kind in RECEIVES]

    def seconds(self, least=0):
        if self.mixture.grid:
            return float(self.rng.integers(least, 12)) * self.mixture.grid
        return float(self.rng.uniform(least * 1e-4, 0.006))

    def message(self, kind):
        """A send, and mostly a receive that may take it."""
        rng, (comm, source, dest), tag = self.rng, self.pair(), int(self.rng.integers(2))
        place, size = rng.random(), self.nbytes()
        call = "isend" if kind[0] == "i" else "send"
        step = (call, comm, dest, tag, size, SENDS[kind])
        steps = [(place, self.comms[comm][source], (*step, self.seconds(1)) if kind[0] == "t" else step)]
        if rng.random() < 0.9:
            pattern = (comm, ANY if rng.random() < 0.3 else source, ANY if rng.random() < 0.3 else tag)
            place = min(max(place + rng.normal(0, 0.15), 0.0), 1.0)
            receive = self.receive(str(rng.choice(self.receives)), pattern)
            if "probe" in self.mixture.kinds.split() and rng.random() < 0.3:
                steps.append((place, self.comms[comm][dest], ("probe", *pattern)))
            steps.append((place, self.comms[comm][dest], receive))
        return steps

    def receive(self, kind, pattern):
        return ("recv", *pattern, self.seconds(1)) if kind == "timed_recv" else (kind, *pattern)

    def alone(self, kind):
        """A step that needs no other rank."""
        rng, place = self.rng, self.rng.random()
        comm, source, dest = self.pair()
        rank, which = self.comms[comm][dest], int(rng.integers(3))
        pattern = (
            comm,
            ANY if rng.random() < 0.5 else source,
            ANY if rng.random() < 0.3 else int(rng.integers(2)),
        )
        if kind in ("compute", "sleep"):
            step = kind, self.seconds()
        elif kind == "iprobe":
            step = kind, *pattern
        elif kind in (*RECEIVES, "probe"):
            if rng.random() < 0.9:  # they come with their messages
                return []
            step = self.receive(kind, pattern)
        elif kind == "timed_wait":
            step = "wait", which, self.seconds(1)
        else:
            step = kind, *((which,) if kind in ("wait", "test", "cancel") else ())
        return [(place, rank, step)]

    def pair(self):
        """Return (communicator, source, dest)."""
        comm = int(self.rng.choice([number for number, members in enumerate(self.comms) if len(members) > 1]))
        size = len(self.comms[comm])
        source = int(self.rng.integers(size))
        if self.rng.random() < self.mixture.to_self:
            return comm, source, source
        return comm, source, int((source + self.rng.integers(1, size)) % size)

    def nbytes(self):
        if self.mixture.grid:
            return int(self.rng.integers(1, 8)) * 256
        return int(self.rng.integers(4, LARGEST))


class Player:
    """Carries out a program on a virtual rank, with real messages."""

    def __init__(self, comm, comms, log):
        self.comms, self.clock, self.log = comms, comm.clock, log
        self.comm, self.requests, self.sent = comm, [], 0

    def play(self, program):
        for what, *arguments in program:
            getattr(self, what)(*arguments)

    def note(self, *entry):
        self.log.append((*entry, self.clock.now()))

    def compute(self, seconds):
        with self.comm.compute(seconds):
            pass

    def sleep(self, seconds):
        self.clock.sleep(seconds)

    def within(self, deadline, call):
        """Call; return False if that met the deadline."""
        if deadline == math.inf:
            call()
            return True
        try:
            with self.clock.deadline(deadline):
                call()
        except Timeout:
            self.note("timeout")
            return False
        return True

    def payload(self, nbytes):
        data = np.zeros(nbytes, np.uint8)
        data[:4].view(np.int32)[0] = self.sent
        self.sent += 1
        return data

    def send(self, comm, dest, tag, nbytes, mode="standard", deadline=math.inf):
        data, call = self.payload(nbytes), getattr(self.comms[comm], MODES[mode])
        if self.within(deadline, lambda: call(data, dest, tag)):
            self.note("sent")

    def isend(self, comm, dest, tag, nbytes, mode="standard"):
        call = getattr(self.comms[comm], "I" + MODES[mode].lower())
        self.requests.append((None, call(self.payload(nbytes), dest, tag)))

    def recv(self, comm, source, tag, deadline=math.inf):
        buf, status = np.zeros(LARGEST, np.uint8), Status()
        if self.within(deadline, lambda: self.comms[comm].Recv(buf, source, tag, status)):
            self.report(buf, status)

    def irecv(self, comm, source, tag):
        buf = np.zeros(LARGEST, np.uint8)
        self.requests.append((buf, self.comms[comm].Irecv(buf, source, tag)))

    def iprobe(self, comm, source, tag):
        seen = self.comms[comm].Iprobe(source, tag)
        self.log.append(("seen", seen, self.clock.now() - self.call_s))

    def probe(self, comm, source, tag):
        status = Status()
        self.comms[comm].Probe(source, tag, status)
        self.note("probed", status.source, status.tag, status.nbytes)

    def mprobe(self, comm, source, tag):
        buf, status = np.zeros(LARGEST, np.uint8), Status()
        self.comms[comm].Mprobe(source, tag).Recv(buf, status)
        self.report(buf, status)

    def wait(self, index, deadline=math.inf):
        if index < len(self.requests):
            status, (buf, request) = Status(), self.requests[index]
            if self.within(deadline, lambda: request.Wait(status)):
                self.report(buf, status)
                del self.requests[index]

    def waitall(self):
        requests, self.requests = self.requests, []
        for buf, request in requests:  # as Waitall does it, but with the time of each
            status = Status()
            request.Wait(status)
            self.report(buf, status)

    def waitany(self):
        if self.requests:
            status = Status()
            index = Request.Waitany([request for _, request in self.requests], status)
            self.report(self.requests.pop(index)[0], status)

    def waitsome(self):
        if self.requests:
            statuses = []
            over = Request.Waitsome([request for _, request in self.requests], statuses)
            for index, status in zip(over, statuses, strict=True):
                self.report(self.requests[index][0], status)
            self.requests = [each for index, each in enumerate(self.requests) if index not in over]

    def test(self, index):
        if index < len(self.requests):
            status, (buf, request) = Status(), self.requests[index]
            over = request.Test(status)
            self.log.append(("over", over, self.clock.now() - self.call_s))
            if over:
                del self.requests[index]
                self.report(buf, status)

    def cancel(self, index):
        receives = [each for each in self.requests[index:] if each[0] is not None]
        if receives:
            status, (buf, request) = Status(), receives[0]
            request.Cancel()
            request.Wait(status)
            self.report(buf, status)
            self.requests = [each for each in self.requests if each[1] is not request]

    def report(self, buf, status):
        if buf is None:
            self.note("sent")
        elif status.Is_cancelled():
            self.note("cancelled")
        else:
            self.note("got", status.source, status.tag, int(buf[:4].view(np.int32)[0]))


@dataclass(frozen=True)
class Link:
    """A link that costs what a `Net` says."""

    net: Net

    def pieces(self):
        net, byte_s = self.net, 1 / self.net.bandwidth
        fixed = Costs(net.send, 0.0, net.latency, net.receive, 0.0)
        return (Piece(0, fixed, Costs(0.0, byte_s, byte_s, 0.0, byte_s)),)


def network(net):
    """Return the virtual network that costs what a `Net` says."""
    return Switch(Link(net), call_overhead_s=net.call, eager_bytes=net.eager_bytes, contention=net.contention)


def on_virtual_ranks(programs, mixture, members):
    """Return the logs of programs on virtual ranks. Times count from when all have their communicators."""
    logs = [[] for _ in programs]

    def main(comm):
        comms = [comm, *(None,) * (len(members) - 1)]
        for number, ranks in enumerate(members[1:], 1):
            group = comm.Get_group().Incl(ranks)
            comms[number] = comm.Create_group(group) if comm.rank in ranks else None
        comm.clock.sleep(START - comm.clock.now())
        player = Player(comm, comms, logs[comm.rank])
        player.call_s = mixture.net.call
        player.play(programs[comm.rank])

    platform = Platform("test", network(mixture.net))
    try:
        totals, _ = run(main, len(programs), deadline_s=math.inf, platform=platform)
        return logs, totals
    except Deadlock:  # random programs often end in one; what came before must agree all the same
        return logs, None


START = 1.0


def differences(seed, size, steps, name):
    """Return what the two logs of one random program disagree in, rank by rank; empty if in nothing."""
    mixture = MIXTURES[name]
    members = communicators(size, mixture.comms)
    programs = random_programs(seed, size, steps, mixture)
    found, _ = on_virtual_ranks(programs, mixture, members)
    wanted = Engine([[("compute", START), *each] for each in programs], mixture.net, members).run()
    exact = 1e-9 if mixture.net.contention == "fair" else 1e-12
    return [
        (rank, programs[rank], ours, theirs)
        for rank, (ours, theirs) in enumerate(zip(found, wanted, strict=True))
        if not _same(ours, theirs, exact)
    ]


def _same(ours, theirs, exact):
    return len(ours) == len(theirs) and all(
        one[:-1] == other[:-1] and math.isclose(one[-1], other[-1], rel_tol=exact)
        for one, other in zip(ours, theirs, strict=True)
    )


def campaign():
    """Run many programs of each mixture; print how many differ, and the first that does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("mixtures", nargs="*", default=list(MIXTURES))
    asked = parser.parse_args()
    for name in asked.mixtures:
        wrong = [
            seed for seed in range(asked.first, asked.first + asked.runs) if differences(*shape(seed), name)
        ]
        print(f"{name:20} {len(wrong)} of {asked.runs} differ {wrong[:8]}", flush=True)  # noqa: T201


def shape(seed):
    """Return (seed, ranks, steps) of the program with a seed."""
    rng = np.random.default_rng([seed, 1])
    return seed, int(rng.integers(2, 7)), int(rng.integers(1, 16))


if __name__ == "__main__":
    campaign()
