"""Random message-passing programs, run on virtual ranks and by the plain engine: they must log the same.

usage: PYTHONPATH=$PWD:$PWD/tests python tests/support/random_programs.py [--runs N] [--first SEED] [MIXTURE...]
"""

import argparse
import gc
import math
from dataclasses import dataclass, replace

import numpy as np
from support.reference_engine import Engine, Net
from support.virtual_run import run

from spawnsim.comm import Status
from spawnsim.comm.constants import ANY_SOURCE, ANY_TAG, LOCK_EXCLUSIVE, LOCK_SHARED
from spawnsim.errors import Deadlock, Timeout
from spawnsim.models.network import Switch
from spawnsim.models.network.cost import Costs
from spawnsim.models.network.links import Piece
from spawnsim.models.platform import Platform
from spawnsim.virtual.mpi.requests import Request
from spawnsim.virtual.reproducibility import generators_per_rank

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
POLLS = (
    "compute send send isend isend issend irecv irecv irecv test test test test iprobe iprobe iprobe waitany waitsome "
    "cancel wait"
)
LOCKS = "locked locked locked shared shared store load load sync compute"
RENDEZVOUS = Net(eager_bytes=1000)
CELLS = (512,) * 7 + (8,) * 3  # what each rank exposes: long numbers for Put, Get and Accumulate; counters
WINDOWS = replace(RENDEZVOUS, cells=CELLS)
EXACT = Net(
    latency=2.0**-10, bandwidth=2.0**20, call=2.0**-20, eager_bytes=1024
)  # sums of its times are exact
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
    "polls serial": Mixture(POLLS, replace(RENDEZVOUS, contention="serial"), comms=2, to_self=0.1),
    "polls ties": Mixture(POLLS, EXACT, comms=2, grid=2.0**-12, to_self=0.05),
    "cancel": Mixture(MESSAGES + " irecv irecv cancel cancel test", RENDEZVOUS),
    "deadlines": Mixture(
        MESSAGES + " timed_recv timed_recv timed_wait timed_send timed_ssend ssend", RENDEZVOUS
    ),
    "overheads": Mixture(EVERYTHING, replace(RENDEZVOUS, send=2e-5, receive=3e-5)),
    "everything": Mixture(EVERYTHING, RENDEZVOUS, comms=3, to_self=0.1),
    "everything serial": Mixture(EVERYTHING, replace(RENDEZVOUS, contention="serial"), comms=3, to_self=0.1),
    "everything fifo": Mixture(EVERYTHING, replace(RENDEZVOUS, contention="fifo"), comms=3, to_self=0.1),
    "ties": Mixture(EVERYTHING, EXACT, comms=2, grid=2.0**-12, to_self=0.05),
    "ties fifo": Mixture(EVERYTHING, replace(EXACT, contention="fifo"), comms=2, grid=2.0**-12, to_self=0.05),
    "no latency": Mixture(EVERYTHING, replace(EXACT, latency=0.0), comms=2, grid=2.0**-12),
    "windows": Mixture(LOCKS + " locked wait test", WINDOWS, to_self=0.1),
    "windows serial": Mixture(LOCKS + " locked " + MESSAGES, replace(WINDOWS, contention="serial")),
    "windows fifo": Mixture(LOCKS + " locked isend " + MESSAGES, replace(WINDOWS, contention="fifo")),
    "windows fair": Mixture(LOCKS + " isend " + MESSAGES, replace(WINDOWS, contention="fair")),
    "windows overheads": Mixture(
        LOCKS + " locked " + EVERYTHING, replace(WINDOWS, send=2e-5, receive=3e-5, progress="async")
    ),
    "windows ties": Mixture(
        LOCKS + " isend " + MESSAGES,
        replace(EXACT, cells=CELLS, contention="fifo"),
        grid=2.0**-12,
        to_self=0.05,
    ),
    "windows no latency": Mixture(
        LOCKS + " isend " + MESSAGES,
        replace(EXACT, cells=CELLS, latency=0.0),
        comms=2,
        grid=2.0**-12,
        to_self=0.05,
    ),
    "fences": Mixture("fence access access access store load compute", WINDOWS, to_self=0.1),
    "fences serial": Mixture(
        "fence access access access store load isend " + MESSAGES, replace(WINDOWS, contention="serial")
    ),
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
        drawn += draw.steps(str(kind))
    drawn.sort(key=lambda each: each[0])
    return [[step for _, rank, step in drawn if rank == me] for me in range(size)]


SENDS = {"send": "standard", "isend": "standard", "ssend": "synchronous", "issend": "synchronous",
         "rsend": "buffered", "timed_send": "standard", "timed_ssend": "synchronous"}  # fmt: skip
RECEIVES = ("recv", "irecv", "timed_recv", "mprobe")
ON_WINDOWS = ("locked", "shared", "fence", "access", "store", "load", "sync")
ACCESSES = ("put", "put", "get", "get", "accumulate", "swap", "fetch", "compare", "rput", "rget", "flush")


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

    def steps(self, kind):
        """Return the steps of a kind: of one rank, or of all that belong together."""
        if kind in SENDS:
            return self.message(kind)
        return self.on_window(kind) if kind in ON_WINDOWS else self.alone(kind)

    def message(self, kind):
        """A send, and mostly a receive that may take it."""
        rng, (comm, source, dest), tag = self.rng, self.pair(), int(self.rng.integers(2))
        place, size = rng.random(), self.nbytes()
        call = "isend" if kind[0] == "i" else "send"
        step = (call, comm, dest, tag, size, SENDS[kind])
        steps = [(place, self.comms[comm][source], (*step, self.seconds(1)) if kind[0] == "t" else step)]
        if rng.random() < 0.9:
            pattern = (
                comm,
                ANY_SOURCE if rng.random() < 0.3 else source,
                ANY_TAG if rng.random() < 0.3 else tag,
            )
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
            ANY_SOURCE if rng.random() < 0.5 else source,
            ANY_TAG if rng.random() < 0.3 else int(rng.integers(2)),
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

    def on_window(self, kind):
        """Accesses to a window, from lock to unlock; or a step on the rank's own part; or a fence of all."""
        rng, (_, rank, target), place = self.rng, self.pair(), self.rng.random()
        if kind == "fence":
            return [(place, each, ("fence",)) for each in range(self.size)]
        if kind == "store":
            return [(place, rank, ("store", *self.cells()))]
        if kind in ("load", "sync"):
            return [(place, rank, (kind,))]
        end = place if kind == "access" else min(place + abs(rng.normal(0, 0.15)), 1.0)
        between = []
        for _ in range(1 if kind == "access" else rng.integers(1, 4)):
            to = self.pair()[2] if kind == "shared" else target
            between.append((float(rng.uniform(place, end)), rank, self.access(str(rng.choice(ACCESSES)), to)))
        if kind == "access":
            return between
        how = (target, str(rng.choice(["alone", "shared"])))
        begin, over = (
            (("lock", *how), ("unlock", target)) if kind == "locked" else (("lock_all",), ("unlock_all",))
        )
        return [(place, rank, begin), *between, (end, rank, over)]

    def access(self, call, target):
        if call in ("fetch", "compare"):
            counter = int(self.rng.integers(CELLS.index(8), len(CELLS)))
            return (call, target, counter, *((int(self.rng.integers(3)),) if call == "compare" else ()))
        return (call, target) if call == "flush" else (call, target, *self.cells())

    def cells(self):
        """Return (first, count) of some long numbers."""
        first = int(self.rng.integers(CELLS.index(8)))
        return first, int(self.rng.integers(1, CELLS.index(8) - first + 1))

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


class Part:
    """The memory that a rank exposes: of each number of n bytes there are n / 8 copies."""

    def __init__(self):
        self.ends = [sum(CELLS[:cell]) // 8 for cell in range(len(CELLS) + 1)]
        self.memory = np.zeros(self.ends[-1], np.int64)

    def place(self, first, count=1):
        return self.ends[first], self.ends[first + count] - self.ends[first]

    def values(self):
        return Read(self.memory, CELLS).values()


@dataclass
class Read:
    """What an access brings, if anything."""

    found: np.ndarray
    cells: tuple = ()

    def values(self):
        """Return the numbers; "torn" where copies differ."""
        parts = np.split(self.found, np.cumsum(self.cells)[:-1] // 8) if self.cells else ()
        return [int(part[0]) if (part == part[0]).all() else "torn" for part in parts]


class Accesses:
    """The steps on windows."""

    def open(self, comm):
        """Expose memory, for all to access."""
        self.part, self.pending, self.stamps = Part(), [], 0
        self.window = comm.Win.Create(self.part.memory, 8, comm=comm)
        self.locked, self.all, self.fenced = set(), False, False

    def may(self, target):
        return self.fenced or self.all or target in self.locked

    def lock(self, target, kind):
        if not self.may(target):
            self.window.Lock(target, LOCK_EXCLUSIVE if kind == "alone" else LOCK_SHARED)
            self.locked.add(target)
            self.note("locked")

    def unlock(self, target):
        if target in self.locked:
            self.over(lambda: self.window.Unlock(target), {target})
            self.locked.remove(target)

    def lock_all(self):
        if not (self.all or self.locked or self.fenced):
            self.window.Lock_all()
            self.all = True

    def unlock_all(self):
        if self.all:
            self.over(self.window.Unlock_all, range(self.comm.size))
            self.all = False

    def fence(self):
        self.over(self.window.Fence, range(self.comm.size))
        self.fenced = True
        self.note("fence")

    def flush(self, target):
        if self.may(target):
            self.over(lambda: self.window.Flush(target), {target})

    def over(self, call, targets):
        """Complete what is pending at some targets."""
        call()
        for target, read in self.pending:
            if target in targets:
                self.report(read, None)
        self.pending = [each for each in self.pending if each[0] not in targets]

    def stamp(self, first, count):
        """Return a number that nobody has written yet, as often as some numbers take."""
        self.stamps += 1
        return np.full(self.part.place(first, count)[1], 1000 * self.comm.rank + self.stamps, np.int64)

    def read(self, first, count=1):
        return Read(np.full(self.part.place(first, count)[1], -1, np.int64), CELLS[first : first + count])

    def put(self, target, first, count):
        data = self.stamp(first, count)
        if self.may(target):
            self.window.Put(data, target, self.part.place(first, count))
            self.pending.append((target, Read(None)))

    def rput(self, target, first, count):
        data = self.stamp(first, count)
        if self.may(target):
            request = self.window.Rput(data, target, self.part.place(first, count))
            self.requests.append((Read(None), request))

    def get(self, target, first, count):
        if self.may(target):
            read = self.read(first, count)
            self.window.Get(read.found, target, self.part.place(first, count))
            self.pending.append((target, read))

    def rget(self, target, first, count):
        if self.may(target):
            read = self.read(first, count)
            request = self.window.Rget(read.found, target, self.part.place(first, count))
            self.requests.append((read, request))

    def accumulate(self, target, first, count):
        data = self.stamp(first, count)
        if self.may(target):
            self.window.Accumulate(data, target, self.part.place(first, count))
            self.pending.append((target, Read(None)))

    def swap(self, target, first, count):
        data, read = self.stamp(first, count), self.read(first, count)
        if self.may(target):
            self.window.Get_accumulate(data, read.found, target, self.part.place(first, count))
            self.pending.append((target, read))

    def fetch(self, target, cell):
        if self.may(target):
            read = self.read(cell)
            self.window.Fetch_and_op(np.ones(1, np.int64), read.found, target, self.part.place(cell)[0])
            self.pending.append((target, read))

    def compare(self, target, cell, expected):
        if self.may(target):
            read, old, new = self.read(cell), np.array([expected]), np.array([expected + 1])
            self.window.Compare_and_swap(new, old, read.found, target, self.part.place(cell)[0])
            self.pending.append((target, read))

    def store(self, first, count):
        place, length = self.part.place(first, count)
        self.part.memory[place : place + length] = self.stamp(first, count)

    def load(self):
        self.note("load", *self.part.values())

    def sync(self):
        self.window.Sync()


class Player(Accesses):
    """Carries out a program on a virtual rank, with real messages."""

    def __init__(self, comm, comms, log):
        self.comms, self.clock, self.log = comms, comm.clock, log
        self.comm, self.requests, self.sent = comm, [], 0
        self.task = comm._world.kernel.current

    def play(self, program):
        for what, *arguments in program:
            getattr(self, what)(*arguments)

    def note(self, *entry):
        self.log.append((*entry, self.task.clock))  # `clock.now()` would wait for that time

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
        self.log.append(("seen", seen, self.task.clock - self.call_s))

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
            self.log.append(("over", over, self.task.clock - self.call_s))
            if over:
                del self.requests[index]
                self.report(buf, status)

    def cancel(self, index):
        receives = [each for each in self.requests[index:] if isinstance(each[0], np.ndarray)]
        if receives:
            status, (buf, request) = Status(), receives[0]
            request.Cancel()
            request.Wait(status)
            self.report(buf, status)
            self.requests = [each for each in self.requests if each[1] is not request]

    def report(self, buf, status):
        if isinstance(buf, Read):
            self.note("done", *buf.values())
        elif buf is None:
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
        player = Player(comm, comms, logs[comm.rank])
        player.call_s = mixture.net.call
        if mixture.net.cells:
            player.open(comm)
        comm.clock.sleep(START - comm.clock.now())
        player.play(programs[comm.rank])

    platform = Platform("test", network(mixture.net), progress=mixture.net.progress)
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
    """Run many programs of each mixture; print how many differ, and the first that do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("mixtures", nargs="*", default=list(MIXTURES))
    asked = parser.parse_args()
    end = asked.first + asked.runs
    for name in asked.mixtures:
        wrong = []
        for begin in range(asked.first, end, BATCH):
            wrong += differing(range(begin, min(begin + BATCH, end)), name)
        print(f"{name:20} {len(wrong)} of {asked.runs} differ {wrong[:8]}", flush=True)  # noqa: T201


BATCH = 500


def differing(seeds, name):
    """Return seed -> differences of those programs that have any.

    What a run does for itself takes longer than a short program; here it is done once for many: generators are put in
    their places, and all objects looked through for garbage.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with generators_per_rank():
            return {seed: found for seed in seeds if (found := differences(*shape(seed), name))}
    finally:
        gc.set_threshold(*threshold)
        gc.collect()


def shape(seed):
    """Return (seed, ranks, steps) of the program with a seed."""
    rng = np.random.default_rng([seed, 1])
    return seed, int(rng.integers(2, 7)), int(rng.integers(1, 16))


if __name__ == "__main__":
    campaign()
