"""A server of weights: it applies changes on arrival, and answers with its weights.

`Server` is the state of one server, without a communicator. `ServerNode` combines all roles of one rank (worker,
server, global server, or several of them) behind one endpoint. A serving rank serves in the background, so that its own
training does not delay the workers. A rule of `rules/staleness.py` applies a change to the weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import not_
from typing import Any

import numpy as np
import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, RankFailed, Timeout
from spawnsim.policies.exchange.endpoint import Absences, Endpoint, ProgressEngine
from spawnsim.policies.exchange.group_mean import check_same
from spawnsim.policies.exchange.messages import Kind, Message, Outgoing
from spawnsim.policies.rules.staleness import ServerOptimizer, ServerRule, StalenessWeight, constant
from spawnsim.policies.state.arithmetic import META, all_finite, as_tensor, sum_dtype, without_data
from spawnsim.policies.state.codecs import Bytes
from spawnsim.policies.state.layout import Entry, Layout, Tensors
from spawnsim.policies.state.snapshot import allocator_for, device_of, laid_out, lay_out

POLL_S = 1e-4  # between two polls of a worker whose own rank serves in the background
BACKGROUND_WAIT_S = 0.25
DEATH_CHECK_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of a server: how it applies changes.

    Args:
        rule: the update rule.
        staleness: weight of a change as a function of its staleness.
        scale: weight of all changes.
        grace_s: seconds from the first unanswered change to the answer to all changes that arrived meanwhile: workers
            that finish at nearly the same time continue from the same weights.
    """

    rule: ServerRule
    staleness: StalenessWeight = constant
    scale: float = 1.0
    grace_s: float = 0.0


class Form:
    """Wire format of weights and changes: the tensors' dtypes, but float64 for changes of integers."""

    def __init__(self, live: Tensors) -> None:
        changes = (
            Entry(name, t.dtype if t.is_floating_point() else torch.float64, tuple(t.shape))
            for name, t in live.items()
        )
        self.weights, self.changes, self.device = Layout.of(live), Layout(changes), device_of(live)
        self.allocate = allocator_for(self.device)

    def pack(self, layout: Layout, tensors: Tensors) -> Bytes:
        """Return the tensors as the body of a message."""
        body: Bytes = self.allocate(layout.nbytes)
        lay_out(layout, as_tensor(body), tensors, self.device)
        return body

    def unpack(self, layout: Layout, message: Message) -> Tensors:
        return laid_out(layout, as_tensor(message.body), self.device)


def difference(now: Tensors, then: Tensors) -> Tensors:
    """Return then − now in the tensors' summation dtypes, 0 where they are equal (infinities of a mask)."""
    found: Tensors = {}
    for name, tensor in now.items():
        wide = sum_dtype(tensor.dtype)
        if without_data(tensor):  # torch takes long to determine the result's shape
            found[name] = torch.empty_like(tensor, dtype=wide)
            continue
        moved = then[name].to(wide) - tensor.to(wide)
        found[name] = moved if all_finite(moved) else torch.where(tensor == then[name], 0, moved)
    return found


def _rounded(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (wide if dtype.is_floating_point else wide.round()).to(dtype)


class Server:
    """One server's weights, and the ranks that wait for them. `tier` is 0 for workers' changes, 1 for servers'."""

    def __init__(self, options: ServerOptions, weights: Tensors, form: Form, *, tier: int = 0) -> None:
        self.options, self.form, self.tier = options, form, tier
        self._dtypes = {name: tensor.dtype for name, tensor in weights.items()}
        wide = [tensor.to(sum_dtype(tensor.dtype), copy=True) for tensor in weights.values()]
        self.optimizer = ServerOptimizer(options.rule, wide)
        self.version = self.refused = 0
        self.fastest = 0.0
        self._waiting: list[tuple[int, int, int]] = []  # (worker, its request, staleness of its change)
        self._latest: dict[int, int] = {}  # latest request of each worker
        self._first_s = math.inf

    @property
    def weights(self) -> Tensors:
        """The current weights, in the model's dtypes."""
        pairs = zip(self._dtypes.items(), self.optimizer.weights, strict=True)
        return {name: _rounded(wide, dtype) for (name, dtype), wide in pairs}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; its tensors are never changed in place."""
        optimizer = self.optimizer
        held = {"weights": [*optimizer.weights], "momenta": [*optimizer.momenta], "sums": [*optimizer.sums]}
        return {**held, "arrivals": optimizer.arrivals, "version": self.version, "fastest": self.fastest}

    def load(self, state: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        optimizer.weights, optimizer.momenta = list(state["weights"]), list(state["momenta"])
        optimizer.sums, optimizer.arrivals = list(state["sums"]), int(state["arrivals"])
        self.version, self.fastest = int(state["version"]), float(state["fastest"])

    def is_new(self, source: int, message: Message) -> bool:
        """Return whether a change is new: a message may arrive twice."""
        new = message.iteration > self._latest.get(source, 0)
        self._latest[source] = max(self._latest.get(source, 0), message.iteration)
        return new

    def take(self, source: int, message: Message, now_s: float) -> tuple[int, float] | None:
        """Apply a change, and record that its worker waits for an answer.

        Returns staleness and weight of the change; None if it is refused because it is damaged or not finite. Its
        worker is answered in any case, which heals a diverged worker.
        """
        self._first_s = min(self._first_s, now_s)
        self.fastest = max(self.fastest, message.value)
        staleness = self.version - message.number
        self._waiting.append((source, message.iteration, staleness))
        given = {} if message.damaged else self.form.unpack(self.form.changes, message)
        if not given or not all(all_finite(tensor) for tensor in given.values()):
            self.refused += 1
            return None
        weight = self.options.scale * self.options.staleness(staleness)
        if self.form.device != META:
            changes = [given[name].to(sum_dtype(dtype)) for name, dtype in self._dtypes.items()]
            self.optimizer.take(changes, weight)
        self.version += 1
        return staleness, weight

    def merge(self, weights: Tensors, share: float) -> None:
        """Move the weights by a share towards the given ones: θ ← (1 − a)θ + aΘ."""
        if self.form.device == META:
            return
        pairs = zip(self._dtypes, self.optimizer.weights, strict=True)
        self.optimizer.weights = [own + share * (weights[name].to(own.dtype) - own) for name, own in pairs]

    def due_s(self) -> float:
        return self._first_s + self.options.grace_s

    def answers(self) -> list[tuple[int, Message]]:
        """Return an answer to each waiting worker."""
        waiting, self._waiting, self._first_s = self._waiting, [], math.inf
        body = self.form.pack(self.form.weights, self.weights)
        answer = Message(Kind.PULL, self.version, part=self.tier, value=self.fastest, body=body)
        return [(rank, replace(answer, iteration=request, settled=old)) for rank, request, old in waiting]


@dataclass(frozen=True, slots=True)
class Tier:
    """A second tier of servers: one server in each region, and a global one above them (HALoS).

    Args:
        regions: returns the region of each rank, for a number of ranks; a region's first rank is its server.
        options: options of the global server.
        every: changes that a region's server applies before it sends its own change.
        merge: a in θ ← (1 − a)θ + aΘ, applied at the global server's answer.
    """

    regions: Callable[[int], Sequence[int]]
    options: ServerOptions = field(
        default_factory=lambda: ServerOptions(ServerRule(0.3, 0.5, 2, delayed=True))
    )
    every: int = 32
    merge: float = 0.25

    def __post_init__(self) -> None:
        if not (self.every >= 1 and 0 < self.merge <= 1):
            raise ParameterError(
                f"every={self.every!r}, merge={self.merge!r}: give every >= 1, merge above 0 to 1"
            )

    def homes(self, size: int) -> list[int]:
        """Return the rank that serves each rank."""
        regions = list(self.regions(size))
        if len(regions) != size:
            raise ParameterError(f"regions({size}): {len(regions)} regions; give one for each rank")
        return [regions.index(region) for region in regions]


class ServerNode:
    """One rank's roles among servers and workers. Construction is collective: all start with the top server's weights.

    `top` is the rank of the (global) server, `options` are the options of the workers' servers. `kept` are states of
    this rank's servers by tier, to continue from: only the top's after a recovery, all after a drain. `working`: this
    rank trains as well. `begun` are the common initial weights.
    """

    def __init__(
        self, comm: Comm, tag: int, live: Tensors, *, top: int, options: ServerOptions, tier: Tier | None,
        kept: Mapping[int, Mapping[str, Any]],
        working: bool = True,
    ) -> None:  # fmt: skip
        rank, size = comm.Get_rank(), comm.Get_size()
        self.comm, self.top, self.tier = comm, top, tier
        self.form = Form(live)
        check_same(comm, self.form.weights, guard=False)
        homes = tier.homes(size) if tier is not None else [top] * size
        self.home, self.working = homes[rank], working
        begun = self.begun = self._begun(live, kept.get(int(tier is not None)))
        # A continuing server has a version; regions' servers start with a new one.
        version = np.asarray([kept.get(int(tier is not None), {}).get("version", 0)])
        comm.Bcast(version, top)
        self.version = 0 if tier is not None else int(version[0])  # of the workers' initial weights
        self.servers: dict[int, Server] = {}  # by tier
        self._members: dict[int, set[int]] = {}
        if rank == self.home:
            self.servers[0] = Server(options, begun, self.form)
            self._members[0] = {other for other in range(size) if homes[other] == rank}
        if tier is not None and rank == top:
            self.servers[1] = Server(tier.options, begun, self.form, tier=1)
            self._members[1] = set(homes)
        for place, server in self.servers.items():
            if place in kept:
                server.load(kept[place])
        # Of a region's server: weights, and both servers' versions, at its last merge.
        self._base, self._merged = begun, (0, int(version[0]))
        if "base" in kept.get(0, {}):
            self._base, self._merged = kept[0]["base"], tuple(kept[0]["merged"])
        self._lifting = False
        self._pulled: Message | None = None
        self._requests = [0, 0]  # of the worker, and of the region's server
        self._out: deque[Outgoing] = deque()
        self.endpoint = Endpoint(comm, tag)
        self.endpoint.allocate = self.form.allocate
        self.engine = ProgressEngine(
            self.endpoint, self, poll_interval_s=POLL_S, background_wait_s=BACKGROUND_WAIT_S,
            death_check_s=DEATH_CHECK_S,
        )  # fmt: skip
        if self.servers and working:
            self.engine.run_in_background()

    def _begun(self, live: Tensors, kept: Mapping[str, Any] | None) -> Tensors:
        """Return the weights of the top rank; collective."""
        layout = self.form.weights
        own = live
        if kept is not None and self.comm.Get_rank() == self.top:
            # A server's weights are in the order of the layout, which differs from the model's.
            pairs = zip(layout.entries, kept["weights"], strict=True)
            own = {entry.name: _rounded(wide, entry.dtype) for entry, wide in pairs}
        body = self.form.pack(layout, own)
        self.comm.Bcast(body, self.top)
        return {
            name: tensor.clone()
            for name, tensor in laid_out(layout, as_tensor(body), self.form.device).items()
        }

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the states of this rank's servers by tier, for a checkpoint or another communicator."""
        found = {tier: server.state() for tier, server in self.servers.items()}
        if 0 in found and self.tier is not None:
            found[0] |= {"base": self._base, "merged": list(self._merged)}
        return found

    # ---------------------------------------------------------------------------------------------- for the engine
    def advance(self, arrived: list[tuple[int, Message]], now_s: float, dead: set[int]) -> None:
        for members in self._members.values():
            members -= dead
        for source, message in arrived:
            if message.kind is Kind.PUSH and self.servers[message.part].is_new(source, message):
                self._take(source, message, now_s)
            elif message.kind is Kind.PULL and message.iteration == self._requests[message.part]:
                if message.part:
                    self._merge(message)
                else:
                    self._pulled = message
            elif message.kind is Kind.LEAVE:
                self._members[message.part].discard(source)
        for server in self.servers.values():
            if now_s >= server.due_s():
                self._out += server.answers()
        self.endpoint.send_queue(self._out)

    def wake_s(self) -> float:
        return min((server.due_s() for server in self.servers.values()), default=math.inf)

    def _take(self, source: int, message: Message, now_s: float) -> None:
        server = self.servers[message.part]
        taken = server.take(source, message, now_s)
        world = self.comm.Get_group().members
        if taken is None:
            self.comm.record.event("refused_update", worker=world[source], tier=message.part)
            return
        self.comm.record.event(
            "server_update", worker=world[source], tier=message.part, staleness=taken[0], weight=taken[1],
            version=server.version,
        )  # fmt: skip
        if message.part == 0 and self.tier is not None:
            self._lift(server, self.tier.every)

    def _lift(self, server: Server, every: int) -> None:
        """Send a region server's change to the global server, if due; at most one is under way."""
        if self._lifting or server.version < self._merged[0] + every:
            return
        self._lifting = True
        body = self.form.pack(self.form.changes, difference(server.weights, self._base))
        self._requests[1] += 1
        self._out.append((self.top, Message(Kind.PUSH, self._merged[1], self._requests[1], 1, body=body)))

    def _merge(self, message: Message) -> None:
        """Merge the global weights into a region server's weights."""
        assert self.tier is not None
        server = self.servers[0]
        if not message.damaged:
            server.merge(self.form.unpack(self.form.weights, message), self.tier.merge)
        self._base, self._merged, self._lifting = server.weights, (server.version, message.number), False

    # ---------------------------------------------------------------------------------------------- for the worker
    def exchange(
        self, change: Tensors, version: int, speed: float, patience_s: float
    ) -> tuple[Tensors, Message]:
        """Send a worker's change and wait for weights; return these, and the message that contained them."""
        body = self.form.pack(self.form.changes, change)
        self._pulled = None
        self._requests[0] += 1
        self._out.append((self.home, Message(Kind.PUSH, version, self._requests[0], value=speed, body=body)))
        self.engine.drive(self._answered, patience_s)
        pulled = self._last_answer()
        if pulled is None or pulled.damaged:
            if self.home in self.endpoint.failed:
                raise RankFailed((self.home,))
            raise Timeout((self.home,), "the server's answer")
        return self.form.unpack(self.form.weights, pulled), pulled

    def _last_answer(self) -> Message | None:
        return self._pulled

    def _answered(self) -> bool:
        return self._pulled is not None or self.home in self.endpoint.failed

    def leave(self, patience_s: float) -> None:
        """End: notify the server, and serve until all other ranks have left or are absent; see `Absences`."""
        self.engine.stop(
            patience_s, served=True
        )  # from now on this rank has no other work, and waits for messages itself
        if self.working:
            self._out.append((self.home, Message(Kind.LEAVE, 0)))
        for tier in sorted(self.servers):
            if not (self.working or tier):  # it is not its own worker
                self._members[0].discard(self.comm.Get_rank())
            absences = Absences(self.comm, patience_s)
            while self._members[tier]:
                self.engine.drive(partial(not_, self._members[tier]), absences.wait_s())
                if absences.is_due():
                    self._members[tier] -= absences.check().keys()
            if tier == 0 and self.tier is not None:
                self._out.append((self.top, Message(Kind.LEAVE, 0, part=1)))
        self.engine.progress()
        self.endpoint.complete_receives(patience_s)
