"""Random programs of collectives, messages and computing, run in two ways that must agree.

Once with the communicator's own calls, whose times come from the dataflow; and once with each collective sent message
by message on the kernel's wire. Both log the clock after each step by rank; a rank that meets a deadline stops there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from support.collective_messages import Performer
from support.virtual_run import Notes

from spawnsim.errors import Timeout
from spawnsim.models.collectives import Edges, Selection
from spawnsim.models.network import Hockney, LogGP, Nodes, Switch
from spawnsim.models.platform import Platform
from spawnsim.scenario import Scenario
from spawnsim.virtual.cluster import Cluster
from spawnsim.virtual.engine.injection import COLLECTIVE
from spawnsim.virtual.mpi.context import Context

DEADLINE_S = 1e4


def _bytes(nbytes):
    return np.zeros(nbytes, np.uint8)


def _gather(comm, n, root):
    comm.Gather(_bytes(n), _bytes(n * comm.size), root)


def _scatter(comm, n, root):
    comm.Scatter(_bytes(n * comm.size) if comm.rank == root else None, _bytes(n), root)


CALLS = {  # name -> the call of the communicator
    "barrier": lambda comm, n, root: comm.Barrier(),
    "bcast": lambda comm, n, root: comm.Bcast(_bytes(n), root),
    "reduce": lambda comm, n, root: comm.Reduce(_bytes(n), _bytes(n), root=root),
    "allreduce": lambda comm, n, root: comm.Allreduce(_bytes(n), _bytes(n)),
    "gather": _gather,
    "scatter": _scatter,
    "allgather": lambda comm, n, root: comm.Allgather(_bytes(n), _bytes(n * comm.size)),
    "alltoall": lambda comm, n, root: comm.Alltoall(_bytes(n * comm.size), _bytes(n * comm.size)),
    "reduce_scatter": lambda comm, n, root: comm.Reduce_scatter_block(_bytes(n * comm.size), _bytes(n)),
    "scan": lambda comm, n, root: comm.Scan(_bytes(n), _bytes(n)),
    "exscan": lambda comm, n, root: comm.Exscan(_bytes(n), _bytes(n)),
    "neighbor": lambda comm, n, root: comm.Neighbor_alltoall(_bytes(3 * n), _bytes(3 * n)),
}
SHIFTS = (1, 3, 1)  # each rank's neighbours, so many places on; two edges lead to the next
SHARES = {  # of the drawn size: these move a multiple of what a rank gives
    "gather": 4, "scatter": 4, "allgather": 4, "reduce_scatter": 4, "neighbor": 4, "alltoall": 16,
}  # fmt: skip
ROOTED = ("bcast", "reduce", "gather", "scatter")
NETWORKS = {
    "switch": Switch(Hockney(1e-5, 1e9), gamma_s_per_B=1e-10),
    "none": Switch(Hockney(1e-5, 1e9), gamma_s_per_B=1e-10, contention="none"),
    "LogGP": Switch(LogGP(2.5e-6, 1.5e-6, 4e-6, 6e-9), gamma_s_per_B=1e-10),
    "nodes": Nodes(Hockney(1e-6, 1e10), LogGP(1e-5, 1e-6, 2e-6, 1e-9), 4, eager_bytes=4096),
    "eager": Switch(Hockney(1e-5, 1e9), eager_bytes=1 << 40),
}
SIZES = (0, 8, 1000, 30_000, 120_000, 400_000)


@dataclass(frozen=True)
class Program:
    """Steps of `size` ranks: ("compute", seconds by rank), ("message", source, dest, nbytes), (call, nbytes, root)."""

    size: int
    network: str
    library: str
    steps: tuple
    drains: bool = True

    @classmethod
    def draw(cls, seed: int, most: int = 12, steps: int = 8, exact: bool = True) -> Program:
        """Draw a program. If `exact`, vectors divide by what algorithms cut them into: messages are whole bytes."""
        rng = np.random.default_rng(seed)
        size = int(rng.integers(2, most + 1))
        drawn = [cls._step(rng, size, exact) for _ in range(int(rng.integers(1, steps + 1)))]
        network = str(rng.choice(list(NETWORKS)))
        return cls(size, network, str(rng.choice(["mpich", "openmpi"])), tuple(drawn))

    def without_drains(self) -> Program:
        """Return the same program where messages do not meet at receivers."""
        return replace(self, drains=False)

    def of_one_call(self) -> Program:
        """Return the program up to its first collective."""
        calls = [index for index, step in enumerate(self.steps) if step[0] in CALLS]
        return replace(self, steps=self.steps[: calls[0] + 1] if calls else self.steps)

    def platform(self) -> Platform:
        """Return where it runs."""
        network = NETWORKS[self.network]
        network = network if self.drains else replace(network, contention="none")
        return Platform("test", network, collectives=Selection(library=self.library))

    @staticmethod
    def _step(rng, size, exact):
        kind = rng.choice(["compute", "message", "call"], p=[0.25, 0.25, 0.5])
        nbytes = int(rng.choice(SIZES))
        if kind == "compute":
            scale = rng.choice([1e-5, 1e-3])
            return ("compute", tuple(float(s) for s in scale * rng.random(size)))
        if kind == "message":
            source, dest = (int(rank) for rank in rng.choice(size, 2, replace=False))
            return ("message", source, dest, nbytes)
        name = str(rng.choice(list(CALLS)))
        nbytes //= SHARES.get(name, 1)
        if exact:
            nbytes -= nbytes % (size * 32 * (14 if nbytes > 1000 else 1))
        return (name, nbytes, int(rng.integers(size)) if name in ROOTED else 0)


KINDS = ("drop", "delay", "down", "duplicate", "partition", "corrupt")


def fault_plan(seed: int, size: int, kinds=KINDS) -> str:
    """Draw faults of links for programs that last for some milliseconds."""
    rng = np.random.default_rng([seed, 1])

    def one():
        kind = rng.choice(kinds)
        start, length = 5e-3 * rng.random(), rng.choice([1e-4, 2e-3, np.inf], p=[0.45, 0.45, 0.1])
        window = f"@{start:.6f}s" + (f"+{length:.6f}s" if np.isfinite(length) else "")
        if rng.random() < 0.5:
            window = "@0s" + (f"+{length:.6f}s" if np.isfinite(length) else "")
        if kind == "partition":
            members = rng.choice(size, int(rng.integers(1, size // 2 + 1)), replace=False)
            return f"partition:{','.join(map(str, sorted(members)))}{window}"
        source, dest = rng.choice(size, 2, replace=False)
        link = rng.choice([f"{source}>{dest}", f"{source}>*", f"*>{dest}", "*>*"])
        likely = rng.choice([0.05, 0.3, 1.0])
        rest = {
            "drop": f",{likely}", "duplicate": f",{likely}", "corrupt": f",{likely}", "down": "",
            "delay": f",{rng.choice([1e-5, 1e-3])}s,{rng.choice([0.0, 1e-4])}s",
        }[kind]  # fmt: skip
        return f"{kind}:{link}{window}{rest}"

    return "; ".join(one() for _ in range(int(rng.integers(1, 4))))


class Run:
    """One way to run a program.

    `logs` by rank: the clock after each step; `stopped`: who met a deadline, and where; `busy`: how often a card was
    busy at the beginning of a collective.
    """

    def __init__(self, program: Program, faults: str | None = None, seed: int = 0) -> None:
        self.program, self.notes = program, Notes()
        scenario = Scenario(program.size, program.platform(), faults=faults, seed=seed, deadline_s=np.inf)
        self.cluster = Cluster(scenario, self.notes)
        self.logs = [[] for _ in range(program.size)]
        self.stopped, self.busy = {}, 0
        self.comms = [self.cluster.comm_world(rank) for rank in range(program.size)]
        # Of both ways, so that contexts have the same numbers, which are part of each draw's key.
        self.group = Context(self.cluster.world, (tuple(range(program.size)),), inner=True)
        for rank in range(program.size):
            self.cluster.start(rank, self._live)

    def run(self):
        """Run it; return the logs."""
        self.totals = self.cluster.run()
        return self.logs

    def told(self, whole: bool = False):
        """Return the events of faults that struck collectives: (rank, time, what, dest), in order.

        What does not touch times is left out, unless all is asked for: bare messages carry no data.
        """
        found = []
        for rank, time_s, _, fields in self.notes.events:
            if "call" in fields:
                words = fields["what"].split("+")
                words = [word for word in words if whole or word not in ("corrupt", "doubled")]
                found.append((rank, round(time_s, 12), "+".join(words), fields["dest"]))
        return sorted(event for event in found if event[2])

    def _live(self, rank):
        comm = self.comms[rank]
        sources, dests = ([(rank + sign * by) % comm.size for by in SHIFTS] for sign in (-1, 1))
        try:
            with comm.clock.deadline(DEADLINE_S):
                graph = comm.Create_dist_graph_adjacent(sources, dests)
        except Timeout:
            self.stopped[rank] = -1
            return
        self._steps(rank, comm, graph)

    def _steps(self, rank, comm, graph):
        met = Counter({"neighbor": -1})
        for number, (kind, *arguments) in enumerate(self.program.steps):
            try:
                with comm.clock.deadline(DEADLINE_S):
                    if kind == "compute":
                        with comm.compute(arguments[0][rank]):
                            pass
                    elif kind == "message":
                        self._message(comm, *arguments)
                    else:
                        of = "neighbor" if kind == "neighbor" else "all"
                        met[of] += 1  # making the graph was the first of all ranks
                        self.collective(graph if of == "neighbor" else comm, (kind, *arguments), met[of])
            except Timeout:
                self.stopped[rank] = number
                return
            self.logs[rank].append(self.cluster.world.kernel.current.clock)

    @cached_property
    def largest(self) -> int:
        """The bytes of the largest message that is no part of a collective."""
        return max((nbytes for kind, *_, nbytes in self.program.steps if kind == "message"), default=0)

    def _message(self, comm, source, dest, nbytes):
        if comm.rank == source:
            comm.Rsend(_bytes(nbytes), dest)  # leaves at once, however long it is
        elif comm.rank == dest:
            # Room for any message: where links deliver some twice, an earlier one may come here again.
            comm.Recv(_bytes(self.largest), source)

    def collective(self, comm, call, number):
        """Take part in a collective by the communicator's own call."""
        name, nbytes, root = call
        self.busy += comm._rank.nic_free_s > self.cluster.world.kernel.current.clock
        CALLS[name](comm, nbytes, root)


class MessageRun(Run):
    """The same program, each collective message by message."""

    def __init__(self, program: Program, faults: str | None = None, seed: int = 0) -> None:
        super().__init__(program, faults, seed)
        self.performers = [Performer(self.group, rank) for rank in range(program.size)]

    def collective(self, comm, call, number):
        """Do this rank's messages of a collective."""
        name, nbytes, root = call
        timing = self.cluster.world.timing
        sizes = nbytes if name != "alltoall" else np.full((comm.size, comm.size), nbytes)
        if name == "neighbor":
            source = np.repeat(np.arange(comm.size), len(SHIFTS))
            dest = (source + np.tile(SHIFTS, comm.size)) % comm.size
            sizes = Edges(source, dest, np.full(len(source), nbytes))
        plan = timing.plan(name, comm.size, sizes, root, ranks=np.arange(comm.size))
        context = comm._context.number
        self.performers[comm.rank].perform(plan, (number << 8) + context, (COLLECTIVE, context, number))
