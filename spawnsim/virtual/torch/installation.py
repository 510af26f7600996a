"""Replaces torch's process groups and stores by virtual ones while ranks run in threads.

Each rank has its own copy of c10d's state (`distributed_c10d._world`), and C++'s registry of groups by name is kept
per thread. All code outside virtual ranks, including other threads, continues as before; afterwards the original state
is restored. This module uses names of torch's internals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from inspect import CO_OPTIMIZED
from threading import get_ident
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from spawnsim.comm.packing import Pickle
from spawnsim.errors import UnsupportedError
from spawnsim.importing import after_import, exclusive, is_of_a_rank
from spawnsim.virtual.engine.kernel import current_task
from spawnsim.virtual.engine.world import World
from spawnsim.virtual.interpreter import Patches, Put
from spawnsim.virtual.mpi.context import Context
from spawnsim.virtual.mpi.module import MPI
from spawnsim.virtual.torch import MASTER, profiling, stores
from spawnsim.virtual.torch.group import VIRTUAL, VirtualProcessGroup
from spawnsim.virtual.torch.work import following, unbroken, waiting

c10d: Any = sys.modules["torch.distributed.distributed_c10d"]  # its stubs lack most internals
native: Any = stores.native
STATE, COMPILER = "torch.world", "torch._dynamo.convert_frame"
HOOKS = {
    native.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    native.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
}
NATIVE_STORES = {name: getattr(native, name) for name in stores.KINDS}


class RankWorld(c10d._World):  # type: ignore[misc]
    """c10d's state of one rank."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


class Worlds:
    """Stands for c10d's state: the calling rank's, or outside ranks the process's own."""

    def __init__(self, outside: Any) -> None:
        vars(self)["_outside"] = outside

    def _here(self) -> Any:
        task = current_task()
        if task is None:
            return vars(self)["_outside"]
        rank = task.kernel.owner.ranks[task.rank]
        incarnation, found = rank.attachments.get(STATE, (-1, None))
        if incarnation != rank.incarnation:
            found = RankWorld()
            rank.attachments[STATE] = rank.incarnation, found
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._here(), name, value)


def _caller() -> World | None:
    task = current_task()
    return None if task is None else task.kernel.owner


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return c10d's function that makes process groups; on virtual ranks it makes virtual ones."""

    @wraps(original)
    def make(
        group_size: int, group_rank: int, global_ranks_in_group: list[int], backend: Any, store: Any, group_name: str,
        backend_options: Any = None, timeout: Any = None, pg_tag: Any = None, device_id: Any = None,
        group_desc: str | None = None,
    ) -> Any:  # fmt: skip
        world, state = _caller(), c10d._world
        if world is None:
            return original(
                group_size, group_rank, global_ranks_in_group, backend, store, group_name,
                backend_options=backend_options, timeout=timeout, pg_tag=pg_tag, device_id=device_id,
                group_desc=group_desc,
            )  # fmt: skip
        if group_name in state.pg_names.values():
            raise ValueError(
                "The specified group name has already been created, please use a different group name"
            )
        known = c10d._find_pg_by_ranks_and_tag(pg_tag, global_ranks_in_group) if pg_tag else None
        if known:
            return known, state.pg_map[known][1]
        if global_ranks_in_group and c10d._get_default_group().rank() not in global_ranks_in_group:
            return c10d.GroupMember.NON_GROUP_MEMBER, None
        if group_rank < 0:  # backend "mpi": its launcher determines both
            group_rank, group_size = world.kernel.current.rank, len(world.ranks)
            store = stores.VirtualStore(
                stores.shared_stores(world).setdefault("mpi", stores.Shared("mpiexec", 0))
            )
        limit = timeout or c10d._get_default_timeout(backend)
        store = stores.PrefixStore(f"{group_name}/", store)
        label = group_desc if group_desc not in (None, "undefined") else f"group {group_name}"

        def share(meeting: stores.Meeting) -> Context:
            context = Context(world, (tuple(meeting.members[rank] for rank in range(group_size)),))
            context.name, context.lasting, context.queue, context.sums = str(label), True, {}, "gloo"
            return context

        context = stores.meet(store, (group_rank, group_size), limit, share)
        me = world.ranks[world.kernel.current.rank]
        comm = MPI.Intracomm.enter(context, me.id, str(label))
        comm._own = me.attachments["COMM_WORLD"]._own
        chosen = limit != c10d._get_default_timeout(backend)
        group = VirtualProcessGroup(
            comm, (group_name, group_desc or "undefined"), (limit, chosen), store, backend=str(backend)
        )
        _register(c10d, group, backend, store, tag=pg_tag)
        return group, store

    return make


def _register(c10d: Any, group: VirtualProcessGroup, backend: Any, store: Any, *, tag: str | None) -> None:
    """Register a group in torch's tables, in any version: 2.13 has a function for it."""
    known, name = c10d._world, group.group_name
    known.pg_map[group], known.pg_names[group] = (backend, store), name
    known.pg_backend_config[group] = str(c10d.BackendConfig(backend))
    c10d._register_process_group(name, group)
    known.pg_to_tag[group] = f"user:{tag}" if tag else f"ptd:{name}"
    for each in (known.pg_to_tag[group],) if tag else ("", known.pg_to_tag[group]):
        known.tags_to_pg.setdefault(each, []).append(group)


def _on_ranks(original: Any, virtual: Any) -> type:
    """Return a class that makes a virtual object on virtual ranks, and an original one elsewhere."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if current_task() is None:
            return original(*args, **kwargs)
        return virtual.__new__(cls)

    return type(
        original.__name__,
        (virtual,),
        {"__new__": __new__, "__doc__": virtual.__doc__, "__module__": virtual.__module__},
    )


def _default_group(original: property) -> property:
    """Return torch's property `group.WORLD`, with the value None while a shared module is being loaded.

    Such a module keeps the value as the default of its functions, for all ranks, and the first rank loads it. None
    stands for each caller's default group.
    """
    get: Any = original.fget

    def world(kind: Any) -> Any:
        asking = sys._getframe(1)
        if not asking.f_code.co_flags & CO_OPTIMIZED and current_task() is not None:  # of a module or a class
            names = asking.f_globals
            loaded = getattr(names.get("__spec__"), "_initializing", False)
            if loaded and not is_of_a_rank(names["__name__"]):
                return None
        return get(kind)

    return property(world, original.fset)


def _replace(put: Put, package: str, kinds: dict[Any, Any]) -> None:
    """Replace classes by virtual ones for virtual ranks, wherever modules of a package hold them."""
    by_id = {id(original): _on_ranks(original, virtual) for original, virtual in kinds.items()}
    for name, module in list(sys.modules.items()):
        if module is native or f"{name}.".startswith(f"{package}."):
            for held, value in list(vars(module).items()):
                if id(value) in by_id:
                    put(module, held, by_id[id(value)])


def _refusing(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if current_task() is None:
            return original(*args, **kwargs)
        raise UnsupportedError(what)

    return call


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that describes DistributedDataParallel's setup, with the requested backend's name."""

    @wraps(original)
    def described(self: Any) -> dict[str, Any]:
        found = original(self)
        if found.get("backend_name") == VIRTUAL:
            found["backend_name"] = self.process_group.name()
            if found["backend_name"] == "gloo":  # torch adds these for that name
                names = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
                found |= {name.lower(): os.environ.get(name, "N/A") for name in names} | {
                    "gloo_num_threads": 2
                }
        return found  # type: ignore[no-any-return]

    return described


def _default_timeout(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for a backend's timeout, without the warning that a torch for CPUs lacks nccl."""

    @wraps(original)
    def timeout(backend: Any) -> Any:
        return original(backend) if current_task() is None or backend != "nccl" else c10d.default_pg_timeout

    return timeout


def _builtin_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return DistributedDataParallel's registration of built-in hooks; virtual ranks get hooks written in Python.

    C++'s own hooks read from a work's future a list of tensors in C++'s format, which Python cannot store there.
    """

    @wraps(original)
    def register(self: Any, kind: Any) -> None:
        hook = None if current_task() is None else HOOKS.get(kind)
        if hook is None:
            original(self, kind)
        else:
            self.logger._set_comm_hook_name(str(kind))
            native._register_comm_hook(self.reducer, self.process_group, hook)

    return register


class _Pickler:
    """A pickler that makes bytes independent of the memory addresses of tensors."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def dump(self, obj: Any) -> None:
        self._file.write(_pickle.dumps(obj))


_pickle = Pickle()
REFUSED = {
    (
        "torch.distributed.rpc",
        "init_rpc",
    ): "torch.distributed.rpc is not offered on virtual ranks: use collectives, send and recv",
    (
        "torch.distributed.elastic.multiprocessing",
        "start_processes",
    ): "a virtual rank cannot start a launcher: run the script that it would start, and give --ranks",
}


def _install(put: Put) -> None:
    _replace(
        put,
        "torch.distributed",
        {NATIVE_STORES[name]: virtual for name, virtual in stores.KINDS.items()},
    )
    put(c10d, "_world", Worlds(c10d._world))
    put(c10d._WorldMeta, "WORLD", _default_group(c10d._WorldMeta.WORLD))
    put(c10d, "_new_process_group_helper", _new_group(c10d._new_process_group_helper))
    put(c10d, "_pickler", _Pickler)
    put(c10d, "_get_default_timeout", _default_timeout(c10d._get_default_timeout))
    if not hasattr(torch._C, "_nccl_version"):  # torch's log of an error queries it in a group of "nccl"
        put(import_module("torch.cuda.nccl"), "version", lambda: (0, 0, 0))
    profiling.install(put)
    parallel = torch.nn.parallel.DistributedDataParallel
    put(parallel, "_get_ddp_logging_data", _naming(parallel._get_ddp_logging_data))
    put(parallel, "_register_builtin_comm_hook", _builtin_hook(parallel._register_builtin_comm_hook))
    put(native.Reducer, "_delay_all_reduce", unbroken(native.Reducer._delay_all_reduce))
    put(torch._C.Future, "wait", waiting(torch._C.Future.wait))
    put(torch._C.Future, "then", following(torch._C.Future.then))
    for (name, function), what in REFUSED.items():
        module = import_module(name)
        put(module, function, _refusing(getattr(module, function), what))


def _install_torchft(put: Put) -> None:
    from spawnsim.virtual.torch import lighthouse, torchft

    manager, coordination = sys.modules["torchft.manager"], sys.modules["torchft._torchft"]
    kinds = {manager.Manager: torchft.Manager, coordination.LighthouseServer: lighthouse.LighthouseServer}
    _replace(put, "torchft", kinds)


class CompileLock:
    """torch.compile's lock; its holder does not yield to other ranks when it only reads its clock.

    Another rank that then waited for the lock would stop the whole run.

    Args:
        lock: torch's own lock.
    """

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        self._lock.acquire()
        exclusive.append(get_ident())

    def __exit__(self, *_: object) -> None:
        exclusive.pop()
        self._lock.release()


def _install_compiler(put: Put) -> None:
    convert, rules = sys.modules[COMPILER], import_module("torch._dynamo.trace_rules")
    put(convert, "compile_lock", CompileLock(convert.compile_lock))
    if not any("spawnsim" in folder for folder in rules.SKIP_DIRS):
        rules.add(
            "spawnsim.virtual"
        )  # a call of a group ends a compiled graph, as a call of torch's own groups does


_compiler_installed = Patches(_install_compiler).in_place
_installed, torchft_installed = Patches(_install).in_place, Patches(_install_torchft).in_place


@contextmanager
def installed(world: World) -> Iterator[None]:
    """Give virtual ranks their torch.distributed while the block runs."""
    address = stores.shared_stores(world).setdefault(
        MASTER, stores.Shared("TCPStore({}:{})".format(*MASTER), 0)
    )
    address.served = True
    native._set_thread_isolation_mode(True)
    try:
        with _installed(), ExitStack() as stack:
            compiler = after_import(COMPILER, lambda: stack.enter_context(_compiler_installed()))
            with compiler:
                yield
    finally:
        native._set_thread_isolation_mode(False)
