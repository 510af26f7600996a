"""Stores: `TCPStore`, `FileStore`, `HashStore` and `PrefixStore` on virtual ranks. No port is opened.

The content of a store with an address or a file is kept once for all ranks, on the node of rank 0. A call takes effect
there when its request has arrived, in the order of time, and returns when the answer is back. A `HashStore` belongs to
its own rank, as in a process. Waits are in virtual time; their time-outs count as events only if the program has set
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spawnsim.errors import Timeout, UsageError
from spawnsim.virtual.engine.completion import Completion
from spawnsim.virtual.engine.kernel import Task, current_task
from spawnsim.virtual.engine.waiting import Unbroken, await_one, limited
from spawnsim.virtual.engine.world import World

# An attribute, not an import: the module has no file, and may be absent from `sys.modules` after a run.
native: Any = torch._C._distributed_c10d
DEFAULT = timedelta(seconds=300)  # c10d's default limit of a store's waits
UNCHOSEN = {
    DEFAULT,
    dist.constants.default_pg_timeout,
    *filter(None, [dist.constants.default_pg_nccl_timeout]),
}
FIRST_PORT = 29501  # the port of a master that asks for any port


class StoreTimeout(Timeout, dist.DistStoreError):
    """A wait for keys has missed its deadline: spawnsim's `Timeout`, and the exception that c10d raises."""


@dataclass(eq=False)
class Shared:
    """The common content of all stores with one address."""

    label: str
    master: int | None = None  # the rank whose node holds it; None: the caller's own memory
    served: bool = False  # whether its master has started
    values: dict[str, bytes] = field(default_factory=dict)
    queues: dict[str, list[bytes]] = field(default_factory=dict)
    waiting: list[tuple[Callable[[], bool], Completion]] = field(default_factory=list)
    meetings: dict[str, list[Meeting]] = field(default_factory=dict)

    def changed(self, now_s: float) -> None:
        """Wake ranks after their condition is met."""
        over = [completion for ready, completion in self.waiting if ready()]
        for completion in over:
            completion.complete(now_s)


@dataclass(eq=False)
class Meeting:
    """The members of a process group that is being formed."""

    size: int
    members: dict[int, int] = field(default_factory=dict)  # rank of the group -> rank of the world
    context: Any = None  # the shared object, once all members have arrived


class WaitingForStore(Unbroken):
    """A rank that waits for keys, or for the other members of a group."""

    __slots__ = ("_absent", "_what", "_world")

    def __init__(
        self, world: World, what: str | Callable[[], str], absent: Callable[[], Sequence[int]] | None = None
    ) -> None:  # fmt: skip
        self._world, self._what, self._absent = world, what, absent

    def describe(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    def peers(self) -> Sequence[int]:
        """Return the world ranks that could end the wait."""
        here = self._world.kernel.current
        return [rank.id for rank in self._world.ranks if getattr(here, "rank", -1) != rank.id]

    def missing(self, by_s: float = math.inf) -> Sequence[int]:
        """Return the absent ranks of the group; () for a wait for keys, which any rank might set."""
        return () if self._absent is None else self._absent()


def shared_stores(world: World) -> dict[Any, Shared]:
    """Return the stores of a world by address."""
    found: dict[Any, Shared] = world.attachments.setdefault("torch.stores", {})
    return found


class VirtualStore(native.Store):  # type: ignore[misc]
    """A store of the calling rank."""

    def __init__(self, shared: Shared, timeout: timedelta = DEFAULT) -> None:
        super().__init__()
        task = current_task()
        assert task is not None
        self.shared, self._timeout = shared, timeout
        self._world: World = task.kernel.owner

    # -- transfers -------------------------------------------------------------------------------------------

    def _travel(self) -> Task:
        """Advance the running task's clock by the way to the store, or back; other ranks may act in that time."""
        kernel, shared = self._world.kernel, self.shared
        task = kernel.current
        rank = self._world.ranks[task.rank]
        away_s = self._world.network.call_overhead_s
        if shared.master is not None and shared.master != rank.id:
            away_s += self._world.cost(rank.id, shared.master, 0)[2]
        rank.advance_to(task, task.clock + away_s)
        return task

    def _do(self, action: Callable[[], Any], *, writes: bool = False) -> Any:
        """Execute a call at the store, at the time of its arrival."""
        self._travel()
        kernel = self._world.kernel
        kernel.observe()
        found = action()
        if writes:
            kernel.idle = 0
            self.shared.changed(kernel.current.clock)
        self._travel()
        return found

    def _await(self, ready: Callable[[], bool], waiting: WaitingForStore, timeout: timedelta) -> None:
        """Wait at the store until `ready` returns True."""
        self._travel()
        kernel = self._world.kernel
        kernel.observe()
        if ready():
            return
        task, completion = kernel.current, Completion(kernel)
        entry = (ready, completion)
        self.shared.waiting.append(entry)
        try:
            with limited(task, timeout.total_seconds(), explicit=timeout not in UNCHOSEN):
                await_one(self._world, completion, waiting)
        finally:
            self.shared.waiting.remove(entry)

    def _await_keys(self, keys: Sequence[str], timeout: timedelta | None) -> None:
        values, limit = self.shared.values, self._timeout if timeout is None else timeout
        names = ", ".join(f"/{key}" for key in keys)

        def described() -> str:
            absent = ", ".join(f"/{key}" for key in keys if key not in values)
            return f"wait({absent}) on {self.shared.label}"

        waiting = WaitingForStore(self._world, described)
        try:
            self._await(lambda: all(key in values for key in keys), waiting, limit)
        except Timeout as error:
            text = f"wait timeout after {limit / timedelta(milliseconds=1):.0f}ms, keys: {names} ({error})"
            raise StoreTimeout(error.ranks, error.operation, error.sequence, text) from None

    # -- c10d's calls ----------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        self._do(lambda: self.shared.values.__setitem__(key, _bytes(value)), writes=True)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        self._await_keys([key], None)
        value = self.shared.values[key]
        self._travel()
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._await_keys(keys, timeout)
        self._travel()

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        found: bool = self._do(lambda: all(key in self.shared.values for key in keys))
        if not found:
            self._world.kernel.fruitless()
        return found

    def add(self, key: str, value: int) -> int:
        """Add to a number; return the sum."""

        def action() -> int:
            total = int(self.shared.values.get(key, b"0")) + int(value)
            self.shared.values[key] = str(total).encode()
            return total

        return self._do(action, writes=True)  # type: ignore[no-any-return]

    def append(self, key: str, value: Any) -> None:
        """Append to a value."""
        values = self.shared.values
        self._do(lambda: values.__setitem__(key, values.get(key, b"") + _bytes(value)), writes=True)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Set a key if it has the expected value (or is absent, as expected); return the resulting value."""
        values, expected, desired = self.shared.values, _bytes(expected_value), _bytes(desired_value)

        def action() -> bytes:
            now = values.get(key)
            if (now is None and not expected) or now == expected:
                values[key] = desired
            return values.get(key, expected)

        return self._do(action, writes=True)  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return self._do(lambda: self.shared.values.pop(key, None) is not None, writes=True)  # type: ignore[no-any-return]

    def num_keys(self) -> int:
        return self._do(lambda: len(self.shared.values))  # type: ignore[no-any-return]

    def list_keys(self) -> list[str]:
        return self._do(lambda: sorted(self.shared.values))  # type: ignore[no-any-return]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys; return their values."""
        self.wait(keys)
        return [self.shared.values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Set keys."""
        fresh = dict(zip(keys, map(_bytes, values), strict=True))
        self._do(lambda: self.shared.values.update(fresh), writes=True)

    def queue_push(self, key: str, value: Any) -> None:
        self._do(lambda: self.shared.queues.setdefault(key, []).append(_bytes(value)), writes=True)

    def queue_len(self, key: str) -> int:
        return self._do(lambda: len(self.shared.queues.get(key, ())))  # type: ignore[no-any-return]

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value of a queue; if it is empty, wait for a value or raise."""
        queues = self.shared.queues
        if block:
            waiting = WaitingForStore(self._world, f"queue_pop({key}) on {self.shared.label}")
            self._await(lambda: bool(queues.get(key)), waiting, self._timeout)
        if not queues.get(key):
            raise dist.QueueEmptyError(f"queue {key} is empty")
        value = queues[key].pop(0)
        self._travel()
        return value

    def has_extended_api(self) -> bool:
        """Return True: the store has append, multi_get and multi_set."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def clone(self) -> VirtualStore:
        return VirtualStore(self.shared, self._timeout)

    def __repr__(self) -> str:
        return self.shared.label


class TCPStore(VirtualStore):
    """A store at an address, which a master serves: a rank, or the launcher."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False,
        timeout: timedelta = DEFAULT, wait_for_workers: bool = True, multi_tenant: bool = False,
        master_listen_fd: int | None = None, use_libuv: bool = True,
    ) -> None:  # fmt: skip
        task = current_task()
        assert task is not None
        known = shared_stores(task.kernel.owner)
        if not port and is_master:
            port = FIRST_PORT + len(known)
        fresh = Shared(f"TCPStore({host_name}:{port})", task.rank if is_master else 0)
        shared = known.setdefault((host_name, port), fresh)
        if is_master and shared.served and not multi_tenant:
            known[host_name, port] = shared = fresh  # the previous one has been closed
        super().__init__(shared, timeout)
        self.host, self.port = host_name, port
        if is_master:
            shared.master, shared.served = task.rank, True
            self._do(lambda: None, writes=True)
        elif not shared.served:
            waiting = WaitingForStore(self._world, f"connecting to {shared.label}")
            self._await(lambda: shared.served, waiting, timeout)
        if wait_for_workers and world_size:
            self.add("init/", 1)
            if is_master:
                ready = lambda: int(shared.values["init/"]) >= world_size  # noqa: E731
                self._await(ready, WaitingForStore(self._world, f"workers of {shared.label}"), timeout)


class FileStore(VirtualStore):
    """A store in a file that all ranks see; no file is written."""

    def __init__(self, path: str, world_size: int = -1) -> None:
        task = current_task()
        assert task is not None
        super().__init__(shared_stores(task.kernel.owner).setdefault(path, Shared(f"FileStore({path})", 0)))
        self.path = path


class HashStore(VirtualStore):
    """A store in the memory of one rank."""

    def __init__(self) -> None:
        super().__init__(Shared("HashStore()"))


class PrefixStore(native.Store):  # type: ignore[misc]
    """A part of another store: its keys begin with a prefix."""

    def __init__(self, prefix: str, store: Any) -> None:
        super().__init__()
        self.prefix, self.underlying_store = prefix, store

    @property
    def _underlying_non_prefix_store(self) -> Any:
        store = self.underlying_store
        return store._underlying_non_prefix_store if isinstance(store, PrefixStore) else store

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self._key(key) for key in keys]

    def set(self, key: str, value: Any) -> None:
        self.underlying_store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """Wait for a key; return its value."""
        return self.underlying_store.get(self._key(key))  # type: ignore[no-any-return]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.underlying_store.wait(self._keys(keys), *(() if timeout is None else (timeout,)))

    def check(self, keys: Sequence[str]) -> bool:
        return self.underlying_store.check(self._keys(keys))  # type: ignore[no-any-return]

    def add(self, key: str, value: int) -> int:
        """Add to a number; return the sum."""
        return self.underlying_store.add(self._key(key), value)  # type: ignore[no-any-return]

    def append(self, key: str, value: Any) -> None:
        self.underlying_store.append(self._key(key), value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Set a key if it has the expected value; return the resulting value."""
        return self.underlying_store.compare_set(self._key(key), expected_value, desired_value)  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return self.underlying_store.delete_key(self._key(key))  # type: ignore[no-any-return]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys; return their values."""
        return self.underlying_store.multi_get(self._keys(keys))  # type: ignore[no-any-return]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        self.underlying_store.multi_set(self._keys(keys), values)

    def queue_push(self, key: str, value: Any) -> None:
        self.underlying_store.queue_push(self._key(key), value)

    def queue_len(self, key: str) -> int:
        return self.underlying_store.queue_len(self._key(key))  # type: ignore[no-any-return]

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self.underlying_store.queue_pop(self._key(key), block)  # type: ignore[no-any-return]

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()  # type: ignore[no-any-return]

    def list_keys(self) -> list[str]:
        return self.underlying_store.list_keys()  # type: ignore[no-any-return]

    def has_extended_api(self) -> bool:
        return self.underlying_store.has_extended_api()  # type: ignore[no-any-return]

    def set_timeout(self, timeout: timedelta) -> None:
        self.underlying_store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self.underlying_store.timeout  # type: ignore[no-any-return]

    def clone(self) -> PrefixStore:
        return PrefixStore(self.prefix, self.underlying_store.clone())


KINDS = {"TCPStore": TCPStore, "FileStore": FileStore, "HashStore": HashStore, "PrefixStore": PrefixStore}


def meet(store: Any, place: tuple[int, int], timeout: timedelta, make: Callable[[Meeting], Any]) -> Any:
    """Meet the other members of a group in a store, each under its rank of the group.

    Args:
        store: the meeting place, with a prefix that only this group uses.
        place: this rank in the group, and the number of its members.
        timeout: how long to wait for the other members.
        make: makes the shared object, once all members have arrived.

    Returns:
        The shared object.

    Raises:
        UsageError: The store does not belong to a virtual rank.
        StoreTimeout: A member is late.
    """
    prefix, size = "", place[1]
    while isinstance(store, PrefixStore):
        prefix, store = f"{store.prefix}/{prefix}", store.underlying_store
    if not isinstance(store, VirtualStore):
        raise UsageError(
            f"a process group over {type(store).__name__}: virtual ranks need a store that they created themselves "
            "(TCPStore, FileStore, HashStore of torch.distributed), or an init_method"
        )
    world = store._world
    me, open_here = world.kernel.current.rank, store.shared.meetings.setdefault(prefix, [])
    meeting = next((each for each in open_here if place[0] not in each.members and each.size == size), None)
    if meeting is None:
        open_here.append(meeting := Meeting(size))
    store._do(lambda: meeting.members.__setitem__(place[0], me), writes=True)
    absent = lambda: [rank for rank in range(size) if rank not in meeting.members]  # noqa: E731
    what = f"init_process_group(rank={place[0]}, world_size={size}) in {store.shared.label}"
    waiting = WaitingForStore(world, what, absent)
    store._await(lambda: len(meeting.members) == size, waiting, timeout)
    if meeting.context is None:
        meeting.context = make(meeting)
        open_here.remove(meeting)
    store._travel()
    return meeting.context


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
