"""`AsyncServerPolicy`: workers train alone, and exchange with a server after their local steps.

`exchange/server.py` implements the server's state and messages, `rules/staleness.py` its rules.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch

from spawnsim.comm import Comm
from spawnsim.errors import ParameterError, WorldError
from spawnsim.policies.base import Info, SpawnPolicy
from spawnsim.policies.exchange.server import ServerNode, ServerOptions, Tier, difference
from spawnsim.policies.rules.staleness import ServerRule, local_steps
from spawnsim.policies.state.layout import (
    Collector,
    ModelAndOptimizer,
    StateScope,
    Tensors,
    assign,
    reset_optimizer,
)


class AsyncServerPolicy(SpawnPolicy):
    """Asynchronous local SGD: after some steps a worker sends its change, and continues from the server's weights.

    The server applies each change on arrival, however late: Δ = Θ_start − θ, a pseudo-gradient. It runs in the
    background of one training rank, or alone on a rank that calls `serve` instead of training.

    | | arguments | source |
    |---|---|---|
    | asynchronous DiLoCo, unmodified | `ServerOptions(ServerRule(0.7, 0.9))` | Liu et al. 2024 |
    | FedAsync | `ServerOptions(ServerRule(0.6, 0), Polynomial())` | Xie et al. 2019 |
    | FedBuff | `ServerOptions(ServerRule(1, 0, size=K), Polynomial())` | Nguyen et al. 2022 |
    | delayed Nesterov, DyLU | `ServerOptions(ServerRule(0.7, 0.9, N, delayed=True)), dylu=True` | Liu et al. 2024 |
    | HALoS | `HALOS, steps=8, dylu=True, tier=Tier(regions)` | Kim et al. 2025 |

    When the server's rank dies, the workers' next exchange raises `RankFailed`. After `comm.recover()`, rank `server`
    of the new communicator serves, starting with its own weights. The deaths of other ranks have no effect. A rank that
    joins starts with the server's weights, like all ranks. A change that is not finite is refused, and its worker
    receives the server's weights.

    Args:
        options: how the server applies changes: rule, staleness, scale, grace.
        steps: H, local steps between exchanges of the fastest worker.
        dylu: fewer steps for slower workers, so that all send equally often.
        least_steps: the minimum with `dylu`.
        server: the rank that serves (the global server, with a tier).
        tier: servers of regions between workers and the global server.
        travels: which parts of the state are exchanged; the optimizer's state is kept, or reset in each exchange.
        patience_s: seconds after which the wait for the server's answer ends. At the end a server waits for workers
            that still train, and for this time for a worker that does not answer.
        timing: a dictionary to fill with durations in seconds, by step.
        tag: tag of the messages; two policies on one communicator need two tags.

    Additional key of `info`: "local_steps", the steps until the next exchange. Events: "server_update" for each applied
    change (worker, tier, staleness, weight, version), "refused_update".

    Raises:
        ParameterError: an argument is out of range.
        MismatchError: in the first call, on every rank, if the models of the group differ in name, dtype or shape.
        RankFailed: the server has died.
        Timeout: the server did not answer within `patience_s`; this rank's model is then unchanged.
    """

    acts_in_every_call = True
    paper = "arXiv 2401.09135, 2106.06639, 2506.04531"

    promises = ("progress",)
    states = ("average", "server_update", "refused_update")

    def __init__(
        self,
        options: ServerOptions,
        *,
        steps: int = 20,
        dylu: bool = False,
        least_steps: int = 5,
        server: int = 0,
        tier: Tier | None = None,
        travels: StateScope | None = None,
        patience_s: float = 60.0,
        timing: dict[str, list[float]] | None = None,
        tag: int = 7501,
    ) -> None:
        super().__init__(steps, timing=timing)
        if not isinstance(options, ServerOptions):
            raise ParameterError(
                f"options={options!r}: give ServerOptions(ServerRule(lr, momentum)); how often ranks exchange is "
                "steps=..."
            )
        self.options, self.tier, self.dylu, self.tag = options, tier, bool(dylu), tag
        self.least_steps, self.server, self.patience_s = least_steps, server, patience_s
        self.travels = travels or StateScope()
        if self.travels.optimizer_state not in ("keep", "reset"):
            raise ParameterError("optimizer_state: an exchange with a server keeps or resets it")
        if not (patience_s > 0 and math.isfinite(patience_s)) or least_steps < 1 or server < 0:
            raise ParameterError(
                f"patience_s={patience_s!r}, least_steps={least_steps!r}, server={server!r}: give a finite time above "
                "0, at least 1 step, a rank of at least 0"
            )
        self.num_averagings = 0
        self._collect = Collector(self.travels)
        self._node: ServerNode | None = None
        self._states: dict[int, dict[str, Any]] = {}  # states of this rank's servers
        self._resume: dict[str, Any] = {}  # this rank's round, after a drain or from a checkpoint
        self._reference: Tensors = {}
        self._version = self._done = 0
        self._began_s = 0.0
        self._wanted = self.average_every
        self.idle_info["local_steps"] = self._wanted

    def act(
        self,
        iteration: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        metric: float | None,
        comm: Comm,
        info: Info,
    ) -> ModelAndOptimizer:
        live, node = self._collect(model, None), self._node
        if node is None or node.comm is not comm:
            node = self._join(comm, live)
            self._begin(node, live)
            if not self._resume:
                return model, optimizer
            self._resume = {}
        self._done += 1
        if self._done >= self._wanted:
            self._exchange(node, live, info)
            if self.travels.optimizer_state == "reset":
                reset_optimizer(optimizer)
        return model, optimizer

    def _join(self, comm: Comm, live: Tensors, *, working: bool = True) -> ServerNode:
        """Begin on a communicator, the first one or the survivors'; collective."""
        if self.server >= comm.Get_size():
            raise ParameterError(f"server={self.server}: the group has {comm.Get_size()} ranks")
        if self._node is not None:  # ranks are lost: the state of regions' servers is relative to them
            self._node.engine.stop()
            top = int(self.tier is not None)
            self._states = {tier: state for tier, state in self._node.states().items() if tier == top}
        node = self._node = ServerNode(
            comm,
            self.tag,
            live,
            top=self.server,
            options=self.options,
            tier=self.tier,
            kept=self._states,
            working=working,
        )
        return node

    def _begin(self, node: ServerNode, live: Tensors) -> None:
        """Train from the common initial weights, or continue the interrupted round."""
        now_s, resume = node.comm.clock.now(), self._resume
        if resume:
            self._reference, self._version = resume["reference"], int(resume["version"])
            self._done, self._began_s = int(resume["done"]), now_s - float(resume["spent_s"])
            return
        assign(live, node.begun)
        self._reference = {name: tensor.clone() for name, tensor in live.items()}
        self._version, self._done, self._began_s = node.version, 0, now_s

    def _exchange(self, node: ServerNode, live: Tensors, info: Info) -> None:
        began_s = node.comm.clock.now()
        speed = self._done / (began_s - self._began_s) if began_s > self._began_s else 0.0
        change = difference(live, self._reference)
        weights, answer = node.exchange(change, self._version, speed, self.patience_s)
        assign(live, weights)
        self._reference = {name: tensor.clone() for name, tensor in live.items()}
        self._version, self._began_s = answer.number, node.comm.clock.now()
        self._done, self.num_averagings = 0, self.num_averagings + 1
        if self.dylu:
            self._wanted = local_steps(self.average_every, speed, answer.value, least=self.least_steps)
            self.idle_info["local_steps"] = self._wanted
        wait_s = self._began_s - began_s
        self.note("exchange", wait_s)
        info.update(
            averaged_this_iteration=True, donors=1, staleness=max(answer.settled, 0), wait_s=wait_s,
            bytes=node.form.weights.nbytes + node.form.changes.nbytes, local_steps=self._wanted,
        )  # fmt: skip

    def serve(self, model: torch.nn.Module, group: Any) -> None:
        """Serve on a rank that does not train, until all workers have left; in place of the policy's calls.

        Args:
            model: the server rank's model, of the same layout as the workers'; receives the server's weights at the
                end.
            group: as in the policy's call.

        Raises:
            ParameterError: this rank is not a server's rank.
        """
        comm, live = self._bound(group), self._collect(model, None)
        node = self._join(comm, live, working=False)
        if not node.servers:
            raise ParameterError(f"rank {comm.Get_rank()} belongs to no server: server={self.server}")
        node.leave(self.patience_s)
        assign(live, node.servers[max(node.servers)].weights)
        self._node = None

    def shutdown(self) -> None:
        """Leave; a server's rank leaves after all other ranks. Bounded wait; may be called twice."""
        super().shutdown()
        node, self._node = self._node, None
        if node is not None:
            spent_s = node.comm.clock.now() - self._began_s
            self._resume = {
                "reference": self._reference, "version": self._version, "done": self._done, "spent_s": spent_s,
            }  # fmt: skip
            with suppress(WorldError):
                node.leave(self.patience_s)
            self._states = node.states()

    @property
    def stats(self) -> dict[str, float]:
        """Exchanges of this rank, and changes that its servers applied and refused."""
        servers = list(self._node.servers.values()) if self._node is not None else []
        return {
            "num_averagings": self.num_averagings,
            "updates": sum(server.version for server in servers),
            "refused": sum(server.refused for server in servers),
        }

    def state_dict(self) -> dict[str, Any]:
        # After `drain`: this rank's round under way, and its servers with their momentum.
        own = {"num_averagings": self.num_averagings, "wanted": self._wanted, "round": self._resume}
        return {
            **super().state_dict(),
            **own,
            "servers": {str(tier): each for tier, each in self._states.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.num_averagings, self._wanted = int(state["num_averagings"]), int(state["wanted"])
        self.idle_info["local_steps"] = self._wanted
        self._resume = state["round"]
        self._states = {int(tier): each for tier, each in state["servers"].items()}


# The options of regions' servers, as in the authors' example.
HALOS = ServerOptions(ServerRule(3.2, 0.9, 16, delayed=True))
