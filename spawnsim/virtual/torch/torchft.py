"""torchft without a cluster: the `Manager` of a virtual rank.

Each virtual rank is a replica. torchft's own LocalSGD, DiLoCo, DistributedDataParallel and Optimizer work with this
`Manager` without changes. Requests to the lighthouse, weights for a recovering replica, and reductions travel as
messages, in a process group that each change of the quorum creates anew.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from spawnsim.comm.packing import Pickle
from spawnsim.errors import RankFailed, Revoked, Timeout, UnsupportedError, UsageError
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.mpi.communicators import held
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.timeline import watched
from spawnsim.virtual.torch.group import VirtualProcessGroup
from spawnsim.virtual.torch.lighthouse import Quorum, Replica, lighthouse
from spawnsim.virtual.torch.stores import VirtualStore, WaitingForStore
from spawnsim.virtual.torch.work import VirtualFuture, VirtualWork

WEIGHTS = 7301  # the tag of the state that a recovering replica receives
MINUTE = timedelta(seconds=60)
_pickle = Pickle()


class QuorumTimeout(Timeout, TimeoutError):
    """No quorum was announced in time: spawnsim's `Timeout`, and the TimeoutError that torchft raises."""


class ManagedFuture(VirtualFuture):
    """The future of a `Manager`'s reduction; its value is the tensor itself."""

    _fut = property(lambda self: self)  # torchft's DistributedDataParallel passes it to the reducer


class ManagedWork(VirtualWork):
    """A reduction of a `Manager`: errors are reported to the manager and not raised; a mean is divided at the end."""

    _new_future = ManagedFuture

    def __init__(self, manager: Manager, work: VirtualWork, divisor: int) -> None:
        super().__init__(work._request, work._outputs, work._limit, work._leave)
        self._manager, self._divisor = manager, divisor

    def _finish(self, timeout: timedelta | None) -> None:
        try:
            super()._finish(timeout)
        except (RankFailed, Revoked, Timeout) as error:
            self._manager.report_error(error)
            self._error, self._over = None, True
        else:
            if self._divisor != 1:
                with torch.no_grad():
                    for tensor in self._outputs:
                        tensor.div_(self._divisor)

    def _complete(self, future: VirtualFuture) -> None:
        future.set_result(self._outputs[0])


class NoWork(torch.distributed.Work):
    """A work that was complete before it began: the tensor stays unchanged."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._future: Any = ManagedFuture(self)
        self._future.set_result(tensor)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class Manager:
    """torchft's `Manager`, for a replica that is a virtual rank. Its arguments are upstream's; addresses are ignored.

    Args:
        pg: ignored; the quorum's own group reduces.
        load_state_dict: loads a recovered state.
        state_dict: returns the state.
        min_replica_size: number of participating replicas that a commit requires.
        use_async_quorum: run the quorum concurrently with the forward pass.
        timeout: limit for reductions and for transfers of weights.
        quorum_timeout: limit for the wait for a quorum.
        world_size_mode: DYNAMIC, or FIXED_WITH_SPARES: replicas beyond `min_replica_size` contribute zeros.
        heartbeat_interval: time between two heartbeats.
        init_sync: whether all replicas receive the first replica's weights at step 0.
        max_retries: consecutive steps that may fail; None: unlimited.
        others: upstream's other arguments.

    Raises:
        UnsupportedError: the replica has several ranks.
    """

    def __init__(
        self, pg: Any = None, load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None, min_replica_size: int = 1, use_async_quorum: bool = True,
        timeout: timedelta = MINUTE, quorum_timeout: timedelta = MINUTE, connect_timeout: timedelta = MINUTE,
        rank: int | None = None, world_size: int | None = None, world_size_mode: Any = None, *,
        heartbeat_interval: timedelta = timedelta(milliseconds=100), init_sync: bool = True,
        max_retries: int | None = None, **others: Any,
    ) -> None:  # fmt: skip
        if world_size is not None and world_size > 1:
            raise UnsupportedError(
                f"a replica of {world_size} ranks: a virtual replica has one rank: omit world_size"
            )
        task = current_task()
        assert task is not None
        self._world: World = task.kernel.owner
        me = self._world.ranks[task.rank]
        self._replica = Replica((me.id, me.incarnation), task.clock, heartbeat_interval.total_seconds())
        self._timeout, self._quorum_timeout, self._max_retries = timeout, quorum_timeout, max_retries
        self._use_async_quorum, self._init_sync, self._min_replica_size = (
            use_async_quorum,
            init_sync,
            min_replica_size,
        )
        self._fixed = getattr(world_size_mode, "name", "DYNAMIC") == "FIXED_WITH_SPARES"
        self._loads: dict[str, Callable[[Any], None]] = {}
        self._saves: dict[str, Callable[[], Any]] = {}
        if load_state_dict and state_dict:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        self._lighthouse = lighthouse()
        self._store = VirtualStore(self._lighthouse.shared)
        self._store._do(lambda: self._lighthouse.join(self._replica))
        self._step = self._committed = 0
        self._quorum: Quorum | None = None
        self._group: Any = None
        # This replica's number among the participants (None: it does not participate), and their count.
        self._part: tuple[int | None, int] = None, 0
        self._errored: BaseException | None = None
        self._crashed: BaseException | None = None  # error of the concurrent quorum
        self._background: Any = None
        self._healing = False
        self._state: Any = None  # received, and not applied yet
        self._sends: list[VirtualWork] = []

    # -- state -------------------------------------------------------------------------------------------------

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Add a part to the state that a replica recovers."""
        if key in self._loads:
            raise UsageError(f"register_state_dict_fn: there is a state named {key!r} already")
        self._loads[key], self._saves[key] = load_state_dict, state_dict

    def set_state_dict_fns(
        self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        """Set the only part of the state."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def allow_state_dict_read(self) -> None:
        """Do nothing: a state is read when the rank is in a call, never during a step of its optimizer."""

    disallow_state_dict_read = allow_state_dict_read

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._committed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the values that `state_dict` returns."""
        self._step, self._committed = state_dict["step"], state_dict["batches_committed"]

    def current_step(self) -> int:
        return self._step

    def batches_committed(self) -> int:
        return self._committed

    # -- the quorum --------------------------------------------------------------------------------------------

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Determine the participants of the next step, and recover from another replica if this one is behind."""
        self._join()
        self._replica.shrink_only = shrink_only
        self._errored, self._healing = None, False
        limit = timeout or self._quorum_timeout
        if self._use_async_quorum:
            self._background = held("COMM_WORLD")._own.background(lambda: self._guarded(limit, allow_heal))
            return
        self._meet(limit, allow_heal)
        if self._healing:
            self._apply()
            self._healing = False

    def wait_quorum(self) -> None:
        """Wait for the quorum."""
        self._join()
        if self._quorum is None:
            raise UsageError("a torchft.Manager was used before start_quorum")

    def _join(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.join()
        crashed, self._crashed = self._crashed, None
        if crashed is not None:
            raise crashed

    def _guarded(self, limit: timedelta, allow_heal: bool) -> None:
        try:
            self._meet(limit, allow_heal)
        except Exception as error:  # noqa: BLE001 - raised where the program waits for the quorum
            self._crashed = error

    def _meet(self, limit: timedelta, allow_heal: bool) -> None:
        replica, found = self._replica, self._lighthouse
        replica.step = self._step
        self._store._do(lambda: found.ask(replica))
        what = f"start_quorum at step {self._step} of the lighthouse"
        waiting = WaitingForStore(self._world, what)
        try:
            self._store._await(lambda: replica.quorum is not None, waiting, limit)
        except Timeout as error:
            replica.asked_s = None
            asked, known = found.count()
            text = (
                f"no quorum: {asked + 1} of {known} replicas with heartbeats have requested one; more than half, "
                f"and at least {found.min_replicas}, must request it ({error})"
            )
            raise QuorumTimeout(error.ranks, error.operation, error.sequence, text) from None
        self._store._travel()
        assert replica.quorum is not None
        self._enter(replica.quorum, allow_heal)

    def _enter(self, quorum: Quorum, allow_heal: bool) -> None:
        place = quorum.members.index(self._replica.place)
        if self._group is None or self._group.comm._context is not quorum.context:
            comm = MPI.Intracomm.enter(quorum.context, self._replica.place[0], quorum.context.name)
            comm._own = held("COMM_WORLD")._own
            names = quorum.context.name, "torchft"
            self._group = VirtualProcessGroup(comm, names, (self._timeout, True), self._store, backend="gloo")
        self._quorum = quorum
        newest = [each for each, step in enumerate(quorum.steps) if step == max(quorum.steps)]
        everyone = list(range(len(quorum.steps)))
        part = newest if self._use_async_quorum or not allow_heal else everyone
        self._part = (part.index(place) if place in part else None), len(part)
        if self._fixed:
            number, count = self._part
            spare = number is not None and number >= self._min_replica_size
            self._part = None if spare else number, min(count, self._min_replica_size)
        if allow_heal:
            self._exchange(quorum.sources(self._init_sync), place, max(quorum.steps))

    def _exchange(self, sources: dict[int, int], place: int, newest: int) -> None:
        """Send this replica's state to the replicas that recover from it, or receive a state."""
        try:
            for other in [each for each, source in sources.items() if source == place]:
                user = {key: save() for key, save in self._saves.items()}
                self._send({"user": user, "torchft": self.state_dict()}, other)
            if place in sources:
                self._healing = True
                self._state = self._receive(sources[place])
                self.load_state_dict(self._state["torchft"])
                self._step = newest
                found = {"step": newest, "source": self._group.comm._peers[sources[place]]}
                held("COMM_WORLD")._own.record.event("heal", **found)
        except (RankFailed, Revoked, Timeout) as error:
            self.report_error(error)

    def _send(self, state: Any, other: int) -> None:
        data = torch.frombuffer(bytearray(_pickle.dumps(state)), dtype=torch.uint8)
        self._sends += [
            self._group.send([torch.tensor([len(data)])], other, WEIGHTS),
            self._group.send([data], other, WEIGHTS),
        ]

    def _receive(self, source: int) -> Any:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], source, WEIGHTS).wait()
        data = torch.zeros(int(size), dtype=torch.uint8)
        self._group.recv([data], source, WEIGHTS).wait()
        return _pickle.loads(data.numpy().tobytes())

    def _apply(self) -> None:
        """Load the received state into the program."""
        state, self._state = self._state, None
        if state is None:  # not received; the error has been reported
            return
        if not self._loads:
            raise UsageError(
                "a replica must recover, but no state_dict functions are registered: call register_state_dict_fn"
            )
        for key, load in self._loads.items():
            load(state["user"][key])

    # -- a step ------------------------------------------------------------------------------------------------

    def allreduce(
        self, tensor: torch.Tensor, should_quantize: bool = False, reduce_op: Any = ReduceOp.AVG
    ) -> Any:
        """Reduce a tensor over the quorum, unquantized; upstream does not quantize without Triton, either."""
        if self._errored is not None:
            return NoWork(tensor)
        self.wait_quorum()
        if not self.is_participating():
            tensor.zero_()
        mean = reduce_op == ReduceOp.AVG
        if mean and not torch.is_floating_point(tensor):
            raise ValueError("average reduce op is only supported for floating point tensors")
        options: Any = AllreduceOptions()
        options.reduceOp = ReduceOp.SUM if mean else reduce_op
        try:
            work = self._group.allreduce([tensor], options)
        except (RankFailed, Revoked) as error:
            self.report_error(error)
            return NoWork(tensor)
        return ManagedWork(self, work, self.num_participants() if mean else 1)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Return whether the step is committed: nothing has failed, and enough replicas participated."""
        self.wait_quorum()
        for send in self._sends:
            try:
                send.wait()
            except (RankFailed, Revoked, Timeout):
                continue  # the receiver has died, and asks again if it restarts
        self._sends.clear()
        if self._healing:
            self._apply()
        commit = self._errored is None and self.num_participants() >= self._min_replica_size
        if commit:
            self._step, self._replica.failures = self._step + 1, 0
            self._committed += self.num_participants()
            return True
        self._replica.failures += 1
        if self._max_retries is not None and self._replica.failures > self._max_retries:
            raise RuntimeError(
                f"should_commit failed {self._replica.failures} times consecutively, exceeding "
                f"max_retries={self._max_retries}"
            )
        return False

    def report_error(self, error: BaseException) -> None:
        """Prevent the commit of the current step."""
        self._errored = error

    def errored(self) -> Any:
        """Return None, or an object with the step's error as `original_exception`."""
        return None if self._errored is None else SimpleNamespace(original_exception=self._errored)

    def participating_rank(self) -> int | None:
        """Return this replica's number among the participants; None if it does not participate."""
        self._join()
        return self._part[0]

    def num_participants(self) -> int:
        """Return the number of participating replicas."""
        self._join()
        return self._part[1]

    def is_participating(self) -> bool:
        return self._part[0] is not None and not self._healing

    def shutdown(self, wait: bool = True) -> None:
        """Stop sending heartbeats."""
        task = current_task()
        self._replica.ended_s = self._world.kernel.env.now if task is None else task.clock


# These calls also pay for earlier computing, and appear in a trace.
for _name in ("start_quorum", "should_commit"):
    setattr(Manager, _name, watched(_name, vars(Manager)[_name]))
