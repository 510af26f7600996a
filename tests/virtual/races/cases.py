"""Programs of mpi4py with and without data races, made from templates: `python -m benchmarks.races` scores.

The categories are those of RMARaceBench (Schwitanski et al., SC-W 2023): conflicts at the origin and at the target,
synchronization, atomic calls, and accesses that are hard to find; and windows of shared memory in addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HEAD = """
from mpi4py import MPI
import numpy as np

comm = MPI.COMM_WORLD
rank = comm.rank
win = MPI.Win.Allocate(64, 8, comm=comm)
mem = np.frombuffer(win, np.float64)
mem[:] = 0
value, other, result = np.ones(1), np.full(1, 2.0), np.zeros(1)
comm.Barrier()
"""
TAIL = """
comm.Barrier()
win.Free()
"""
# Calls to element 0 of rank 1, from value and to result.
CALLS = {
    "put": "win.Put(value, 1)",
    "get": "win.Get(result, 1)",
    "acc": "win.Accumulate(value, 1)",
    "gacc": "win.Get_accumulate(value, result, 1)",
    "gaccread": "win.Get_accumulate(value, result, 1, op=MPI.NO_OP)",
    "fop": "win.Fetch_and_op(value, result, 1)",
    "cas": "win.Compare_and_swap(value, other, result, 1)",
    "load": "print(mem[0])",
    "store": "mem[0] = 5",
}
LOCAL = ("load", "store")
CONFLICTS = [
    "get-put",
    "get-store",
    "get-acc",
    "put-put",
    "put-acc",
    "put-gaccread",
    "put-load",
    "put-store",
    "acc-load",
    "acc-store",
    "gacc-load",
    "gacc-store",
    "gaccread-store",
    "fop-store",
    "cas-store",
    "cas-load",
]
AGREE = [
    "get-get",
    "get-load",
    "get-gaccread",
    "acc-acc",
    "acc-gaccread",
    "gaccread-gaccread",
    "gaccread-load",
    "gacc-gacc",
    "fop-fop",
    "cas-cas",
]
# Of a call with `value` and `result`: what the origin may not do before the call is complete.
AT_ORIGIN = {
    "put": ("value[0] = 3", "print(value[0])"),
    "get": ("result[0] = 3", None),
    "get ": ("print(result[0])", None),
    "get  ": ("win.Get(result, 1, [2, 1])", None),
    "get   ": ("win.Put(result, 1, [2, 1])", None),
    "acc": ("value[0] = 3", "print(value[0])"),
    "gacc": ("value[0] = 3", "print(value[0])"),
    "gacc ": ("print(result[0])", None),
    "fop": ("value[0] = 3", None),
    "fop ": ("print(result[0])", None),
    "cas": ("other[0] = 3", "print(other[0])"),
    "cas ": ("print(result + 1)", None),
}
BEGINS_AND_ENDS = {
    "fence": ("win.Fence()", "win.Fence()"),
    "lock": ("win.Lock(1, MPI.LOCK_SHARED)", "win.Unlock(1)"),
    "lockall": ("win.Lock_all()", "win.Unlock_all()"),
}


@dataclass(frozen=True)
class Case:
    """One program, and whether it has a race."""

    category: str
    name: str
    body: str
    racy: bool
    ranks: int = 3

    @property
    def text(self) -> str:
        """The program."""
        return HEAD + self.body + TAIL


def on(rank: int, *lines: str) -> str:
    """Return lines that one rank executes."""
    return f"if rank == {rank}:\n" + "".join(f"    {line}\n" for line in lines)


def at_origin() -> list[Case]:
    """A call and an access of the same rank to its buffer."""
    found = []
    for mode, (begin, end) in BEGINS_AND_ENDS.items():
        for call, (racy, harmless) in AT_ORIGIN.items():
            for line, kind in ((racy, True), (harmless, False)):
                if line is None or (mode != "lock" and call.strip() in ("cas", "fop", "acc")):
                    continue
                name = f"{mode}-{call.strip()}-{line.partition('(')[0].partition('[')[0]}-{len(call)}"
                if mode == "fence":
                    body, after = [CALLS[call.strip()], line], [CALLS[call.strip()]]
                    early = f"{begin}\n{on(0, *body)}{end}\n"
                    late = f"{begin}\n{on(0, *after)}{end}\n{on(0, line)}{end}\n"
                else:
                    early = on(0, begin, CALLS[call.strip()], line, end)
                    flush = "win.Flush_local(1)" if mode == "lockall" else "win.Flush(1)"
                    late = on(0, begin, CALLS[call.strip()], flush, line, end)
                found.append(Case("conflict", f"origin-{name}-early", early, kind))
                if kind:
                    found.append(Case("conflict", f"origin-{name}-late", late, False))
    return found


def at_target() -> list[Case]:
    """Two accesses to one element of rank 1, by ranks 0 and 2, or by ranks 0 and 1 itself."""
    found = []
    for pair in CONFLICTS + AGREE:
        first, second = pair.split("-")
        racy, who = pair in CONFLICTS, 1 if second in LOCAL else 2
        a, b = CALLS[first], CALLS[second]
        fence, sync = "win.Fence()\n", "comm.Barrier()\n"
        found.append(Case("conflict", f"fence-{pair}", f"{fence}{on(0, a)}{on(who, b)}{fence}", racy))
        locked = f"win.Lock_all()\n{on(0, a)}{on(who, b)}win.Unlock_all()\n"
        found.append(Case("conflict", f"lockall-{pair}", locked, racy))
        if racy:
            later = f"{fence}{on(0, a)}{fence}{on(who, b)}{fence}"
            found.append(Case("conflict", f"fence-{pair}-apart", later, False))
            flushed = f"win.Lock_all()\n{on(0, a, 'win.Flush(1)')}{sync}{on(who, b)}{sync}win.Unlock_all()\n"
            found.append(Case("conflict", f"lockall-{pair}-flushed", flushed, False))
            early = f"win.Lock_all()\n{on(0, a)}{sync}{on(who, b)}{sync}win.Unlock_all()\n"
            found.append(Case("sync", f"lockall-{pair}-unflushed", early, True))
        if second in LOCAL:
            start = "group = comm.group\n"
            origin = on(0, "win.Start(group.Incl([1]))", a, "win.Complete()")
            inside = start + origin + on(1, "win.Post(group.Incl([0]))", b, "win.Wait()")
            after = start + origin + on(1, "win.Post(group.Incl([0]))", "win.Wait()", b)
            found.append(Case("conflict", f"pscw-{pair}", inside, racy))
            if racy:
                found.append(Case("sync", f"pscw-{pair}-after", after, False))
    return found


SYNC = {
    # name: (racy, ranks 0, 1, 2), to put on rank 1 and load or put again
    "flush-and-message": (False, ["win.Lock_all()", "win.Put(value, 1)", "win.Flush(1)", "comm.send(0, 1)",
                                  "win.Unlock_all()"], ["comm.recv(source=0)", "print(mem[0])"]),
    "message-before-flush": (True, ["win.Lock_all()", "win.Put(value, 1)", "comm.send(0, 1)", "win.Flush(1)",
                                    "win.Unlock_all()"], ["comm.recv(source=0)", "print(mem[0])"]),
    "flush-local-and-message": (True, ["win.Lock_all()", "win.Put(value, 1)", "win.Flush_local(1)", "comm.send(0, 1)",
                                       "win.Unlock_all()"], ["comm.recv(source=0)", "print(mem[0])"]),
    "unlock-and-message": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.send(0, 1)"],
                           ["comm.recv(source=0)", "print(mem[0])"]),
    "unlock-and-probe": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.send(0, 1)"],
                         ["comm.Probe(0)", "print(mem[0])", "comm.recv(source=0)"]),
    "unlock-and-barrier-at-wrong-place": (True, ["win.Lock(1)", "win.Put(value, 1)", "comm.Barrier()", "win.Unlock(1)"],
                                          ["comm.Barrier()", "print(mem[0])"]),
    "irecv-waited": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.Send(value, 1)"],
                     ["request = comm.Irecv(result, 0)", "request.Wait()", "print(mem[0])"]),
    "irecv-not-waited": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.Send(value, 1)"],
                         ["request = comm.Irecv(result, 0)", "print(mem[0])", "request.Wait()"]),
    "persistent-receive": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.Send(value, 1)"],
                           ["request = comm.Recv_init(result, 0)", "request.Start()", "request.Wait()",
                            "print(mem[0])", "request.Free()"]),
    "ibarrier-waited": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.Ibarrier().Wait()"],
                        ["comm.Ibarrier().Wait()", "print(mem[0])"]),
    "ibarrier-not-waited": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.Ibarrier().Wait()"],
                            ["request = comm.Ibarrier()", "print(mem[0])", "request.Wait()"]),
    "bcast-from-origin": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.bcast(0, root=0)"],
                          ["comm.bcast(None, root=0)", "print(mem[0])"]),
    "bcast-from-target": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.bcast(None, root=1)"],
                          ["comm.bcast(0, root=1)", "print(mem[0])"]),
    "reduce-to-target": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.reduce(0, root=1)"],
                         ["comm.reduce(0, root=1)", "print(mem[0])"]),
    "reduce-to-origin": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.reduce(0, root=0)"],
                         ["comm.reduce(0, root=0)", "print(mem[0])"]),
    "scan": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.scan(0)"],
             ["comm.scan(0)", "print(mem[0])"]),
    "exclusive-both": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"],
                       ["win.Lock(1)", "mem[0] = 5", "win.Unlock(1)"]),
    "exclusive-and-none": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"], ["mem[0] = 5"]),
    "shared-both": (True, ["win.Lock(1, MPI.LOCK_SHARED)", "win.Put(value, 1)", "win.Unlock(1)"],
                    ["win.Lock(1, MPI.LOCK_SHARED)", "mem[0] = 5", "win.Unlock(1)"]),
    "exclusive-and-shared": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"],
                             ["win.Lock(1, MPI.LOCK_SHARED)", "print(mem[0])", "win.Unlock(1)"]),
    "exclusive-and-lockall": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"], [],
                              ["win.Lock_all()", "win.Get(result, 1)", "win.Unlock_all()"]),
    "lock-of-another-rank": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"],
                             ["win.Lock(0)", "print(mem[0])", "win.Unlock(0)"]),
    "exclusive-two-origins": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"], [],
                              ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"]),
    "shared-two-origins": (True, ["win.Lock(1, MPI.LOCK_SHARED)", "win.Put(value, 1)", "win.Unlock(1)"], [],
                           ["win.Lock(1, MPI.LOCK_SHARED)", "win.Put(value, 1)", "win.Unlock(1)"]),
    "request-waited-and-flushed": (False, ["win.Lock_all()", "win.Rput(value, 1).Wait()", "win.Flush(1)",
                                           "comm.send(0, 1)", "win.Unlock_all()"],
                                   ["comm.recv(source=0)", "print(mem[0])"]),
    "request-waited": (True, ["win.Lock_all()", "win.Rput(value, 1).Wait()", "comm.send(0, 1)", "win.Unlock_all()"],
                       ["comm.recv(source=0)", "print(mem[0])"]),
    "rget-waited": (False, ["win.Lock_all()", "win.Rget(result, 1).Wait()", "print(result[0])", "comm.send(0, 1)",
                            "win.Unlock_all()"], ["comm.recv(source=0)", "mem[0] = 3"]),
    "rget-not-waited": (True, ["win.Lock_all()", "request = win.Rget(result, 1)", "print(result[0])", "request.Wait()",
                               "win.Unlock_all()"], []),
    "rput-buffer-after-wait": (False, ["win.Lock_all()", "win.Rput(value, 1).Wait()", "value[0] = 3",
                                       "win.Unlock_all()"], []),
    "rput-buffer-before-wait": (True, ["win.Lock_all()", "request = win.Rput(value, 1)", "value[0] = 3",
                                       "request.Wait()", "win.Unlock_all()"], []),
    "same-origin-put-get": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Get(result, 1)", "win.Unlock(1)"], []),
    "same-origin-put-flush-get": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Flush(1)", "win.Get(result, 1)",
                                          "win.Unlock(1)"], []),
    "same-origin-put-flush-local-put": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Flush_local(1)",
                                               "win.Put(other, 1)", "win.Unlock(1)"], []),
    "same-origin-get-flush-local-get": (False, ["win.Lock(1)", "win.Get(result, 1)", "win.Flush_local(1)",
                                                "win.Get(result, 1)", "win.Unlock(1)"], []),
    "polling-on-put": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)"],
                       ["while mem[0] != 1:", "    win.Lock(1)", "    win.Unlock(1)"]),
    "polling-on-atomic": (False, ["win.Lock_all()", "win.Put(value, 1, [1, 1])", "win.Flush(1)",
                                  "win.Accumulate(value, 1, op=MPI.REPLACE)", "win.Unlock_all()"],
                          ["win.Lock_all()", "while result[0] != 1:",
                           "    win.Fetch_and_op(None, result, 1, 0, MPI.NO_OP)", "    win.Flush(1)",
                           "win.Unlock_all()", "print(mem[1])"]),
    "atomic-signal-before-flush": (True, ["win.Lock_all()", "win.Put(value, 1, [1, 1])",
                                          "win.Accumulate(value, 1, op=MPI.REPLACE)", "win.Unlock_all()"],
                                   ["win.Lock_all()", "while result[0] != 1:",
                                    "    win.Fetch_and_op(None, result, 1, 0, MPI.NO_OP)", "    win.Flush(1)",
                                    "win.Unlock_all()", "print(mem[1])"]),
    "chain-of-three": (False, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.send(0, 2)"],
                       ["comm.recv(source=2)", "print(mem[0])"], ["comm.recv(source=0)", "comm.send(0, 1)"]),
    "chain-cut": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.send(0, 2)"],
                  ["comm.recv(source=2)", "print(mem[0])"], ["comm.send(0, 1)", "comm.recv(source=0)"]),
    "message-from-target": (True, ["win.Lock(1)", "win.Put(value, 1)", "win.Unlock(1)", "comm.recv(source=1)"],
                            ["comm.send(0, 0)", "print(mem[0])"]),
    "other-element": (False, ["win.Lock_all()", "win.Put(value, 1)", "win.Unlock_all()"], ["print(mem[1])"]),
    "neighbours": (True, ["win.Lock_all()", "win.Put(np.ones(2), 1)", "win.Unlock_all()"], ["print(mem[1:2].sum())"]),
    "flush-of-another-rank": (True, ["win.Lock_all()", "win.Put(value, 1)", "win.Flush(2)", "comm.send(0, 1)",
                                     "win.Unlock_all()"], ["comm.recv(source=0)", "print(mem[0])"]),
    "flush-all": (False, ["win.Lock_all()", "win.Put(value, 1)", "win.Flush_all()", "comm.send(0, 1)",
                          "win.Unlock_all()"], ["comm.recv(source=0)", "print(mem[0])"]),
    "receive-into-window": (True, ["win.Lock_all()", "win.Put(value, 1)", "win.Unlock_all()", "comm.Send(other, 1)"],
                            ["comm.Recv(mem[:1], 2)", "comm.Recv(result, 0)"], ["comm.Send(other, 1)"]),
    "receive-into-window-later": (False, ["win.Lock_all()", "win.Put(value, 1)", "win.Unlock_all()",
                                          "comm.send(0, 1)"],
                                  ["comm.recv(source=0)", "comm.Recv(mem[:1], 2)"], ["comm.Send(other, 1)"]),
}  # fmt: skip


def synchronization() -> list[Case]:
    """A put to rank 1 and another access there, ordered or not."""
    found = []
    for name, (racy, *bodies) in SYNC.items():
        if any(word in name for word in ("ibarrier", "bcast", "reduce", "scan", "barrier-at")):
            calls = [line for line in bodies[0] if line.startswith("comm.")]
            bodies = [
                *bodies,
                [
                    line.replace("(0, root=0)", "(None, root=0)") if "bcast" in line else line
                    for line in calls
                ],
            ]
        text = "".join(on(rank, *lines) for rank, lines in enumerate(bodies) if lines)
        found.append(Case("sync", name, text, racy))
    return found


def atomics() -> list[Case]:
    """Atomic calls of two origins: of one type and operation or not, at one element or between two."""
    both = "win.Lock_all()\n{}win.Unlock_all()\n"
    pairs = {
        "same": ("win.Accumulate(value, 1)", "win.Accumulate(value, 1)", False),
        "float-int": ("win.Accumulate(value, 1)", "win.Accumulate(np.ones(1, int), 1)", True),
        "short-int": ("win.Accumulate(np.ones(1, np.int16), 1)", "win.Accumulate(np.ones(1, np.int32), 1)", True),
        "double-float": ("win.Accumulate(value, 1)", "win.Accumulate(np.ones(1, np.float32), 1)", True),
        "sum-prod": ("win.Accumulate(value, 1)", "win.Accumulate(value, 1, op=MPI.PROD)", True),
        "sum-no-op": ("win.Accumulate(value, 1)", "win.Get_accumulate(value, result, 1, op=MPI.NO_OP)", False),
        "fop-acc": ("win.Fetch_and_op(value, result, 1)", "win.Accumulate(value, 1)", False),
        "fop-cas": ("win.Fetch_and_op(value, result, 1)", "win.Compare_and_swap(value, other, result, 1)", True),
        "replace-cas": ("win.Accumulate(value, 1, op=MPI.REPLACE)", "win.Compare_and_swap(value, other, result, 1)",
                        False),
        "put-acc": ("win.Put(value, 1)", "win.Accumulate(value, 1)", True),
        "several": ("win.Accumulate(np.ones(4), 1)", "win.Accumulate(np.ones(2), 1, [1, 2])", False),
        "derived": ("win.Accumulate([value, 1, MPI.DOUBLE], 1, [0, 1, MPI.DOUBLE])",
                    "win.Accumulate([np.ones(2), 1, pair], 1, [0, 1, pair])", False),
        "derived-put": ("win.Put([np.ones(2), 1, pair], 1, [0, 1, pair])", "win.Accumulate(value, 1)", True),
        "derived-gap": ("win.Put([np.ones(3), 1, apart], 1, [0, 1, apart])", "win.Accumulate(value, 1, [1, 1])", False),
    }  # fmt: skip
    types = "pair = MPI.DOUBLE.Create_contiguous(2).Commit()\napart = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()\n"
    found = [
        Case("atomic", name, types + both.format(on(0, a) + on(2, b)) + "pair.Free()\napart.Free()\n", racy)
        for name, (a, b, racy) in pairs.items()
    ]
    half = "small = MPI.Win.Create(mem, 4, comm=comm)\nsmall.Lock_all()\n{}small.Unlock_all()\nsmall.Free()\n"
    calls = [
        f"small.Accumulate(np.ones(1, np.{kind}), 1, [{place}, 1])"
        for kind, place in (("int64", 0), ("int64", 1))
    ]
    found.append(Case("atomic", "half-way", half.format(on(0, calls[0]) + on(2, calls[1])), True))
    found.append(
        Case("atomic", "next", half.format(on(0, calls[0]) + on(2, calls[1].replace("[1,", "[2,"))), False)
    )
    same = both.format(on(0, "win.Accumulate(value, 1)", "win.Accumulate(np.ones(1, int), 1)"))
    found.append(Case("atomic", "float-int-same-origin", same, True))
    found.append(Case("atomic", "same-origin", same.replace("np.ones(1, int)", "value"), False))
    return found


MISC = {
    "alias-of-buffer": (True, "alias = value[:]\n" + on(0, "win.Lock_all()", "win.Put(value, 1)", "alias[0] = 4",
                                                       "win.Unlock_all()")),
    "alias-copied": (False, "alias = value.copy()\n" + on(0, "win.Lock_all()", "win.Put(value, 1)", "alias[0] = 4",
                                                         "win.Unlock_all()")),
    "alias-of-window": (True, "rows = mem.reshape(2, 4)\nwin.Lock_all()\n" + on(0, "win.Put(value, 1)")
                        + on(1, "rows[0, 0] = 3") + "win.Unlock_all()\n"),
    "other-row": (False, "rows = mem.reshape(2, 4)\nwin.Lock_all()\n" + on(0, "win.Put(value, 1)")
                  + on(1, "rows[1, 0] = 3") + "win.Unlock_all()\n"),
    "column": (True, "rows = mem.reshape(2, 4)\nwin.Lock_all()\n" + on(0, "win.Put(value, 1, [4, 1])")
               + on(1, "print(rows[:, 0].sum())") + "win.Unlock_all()\n"),
    "other-column": (False, "rows = mem.reshape(2, 4)\nwin.Lock_all()\n" + on(0, "win.Put(value, 1, [5, 1])")
                     + on(1, "print(rows[:, 0].sum())") + "win.Unlock_all()\n"),
    "nested-functions": (True, "def f(n):\n    if n:\n        return f(n - 1)\n    win.Put(value, 1)\n"
                         "def g(n):\n    return g(n - 1) if n else mem[0]\nwin.Lock_all()\n" + on(0, "f(5)")
                         + on(1, "g(5)") + "win.Unlock_all()\n"),
    "nested-functions-apart": (False, "def f(n):\n    if n:\n        return f(n - 1)\n    win.Put(value, 1)\n"
                               "def g(n):\n    return g(n - 1) if n else mem[0]\nwin.Fence()\n" + on(0, "f(5)")
                               + "win.Fence()\n" + on(1, "g(5)") + "win.Fence()\n"),
    "function-in-a-table": (True, "calls = {'put': win.Put}\nwin.Fence()\n" + on(0, "calls['put'](value, 1)")
                            + on(2, "calls['put'](value, 1)") + "win.Fence()\n"),
    "store-by-numpy": (True, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "np.copyto(mem, 7)")
                       + "win.Fence()\n"),
    "store-by-method": (True, "win.Fence()\n" + on(0, "win.Get(result, 1)") + on(1, "mem.fill(7)") + "win.Fence()\n"),
    "add-in-place": (True, "win.Fence()\n" + on(0, "win.Get(result, 1)") + on(1, "mem += 1") + "win.Fence()\n"),
    "load-by-copy": (True, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "a = mem.copy()") + "win.Fence()\n"),
    "load-in-arithmetic": (True, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "a = mem * 2") + "win.Fence()\n"),
    "load-in-a-comparison": (True, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "a = mem[0] > 1")
                             + "win.Fence()\n"),
    "load-in-text": (True, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "a = f'{mem}'") + "win.Fence()\n"),
    "load-in-a-loop": (True, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "for x in mem:", "    pass")
                       + "win.Fence()\n"),
    "view-only": (False, "win.Fence()\n" + on(0, "win.Put(value, 1)") + on(1, "part = mem[0:2]", "n = len(part)")
                  + "win.Fence()\n"),
    "own-array": (True, "mine = np.zeros(4)\nw = MPI.Win.Create(mine, 8, comm=comm)\nw.Fence()\n"
                  + on(0, "w.Put(value, 1)") + on(1, "mine[0] = 3") + "w.Fence()\nw.Free()\n"),
    "own-array-apart": (False, "mine = np.zeros(4)\nw = MPI.Win.Create(mine, 8, comm=comm)\nw.Fence()\n"
                        + on(0, "w.Put(value, 1)") + "w.Fence()\n" + on(1, "mine[0] = 3") + "w.Fence()\nw.Free()\n"),
    "two-windows-of-one-array": (True, "w = MPI.Win.Create(mem, 8, comm=comm)\nw.Lock_all()\nwin.Lock_all()\n"
                                 + on(0, "w.Put(value, 1)") + on(2, "win.Put(value, 1)")
                                 + "win.Unlock_all()\nw.Unlock_all()\nw.Free()\n"),
    "two-windows": (False, "w = MPI.Win.Allocate(64, 8, comm=comm)\nw.Lock_all()\nwin.Lock_all()\n"
                    + on(0, "w.Put(value, 1)") + on(2, "win.Put(value, 1)")
                    + "win.Unlock_all()\nw.Unlock_all()\nw.Free()\n"),
    "part-of-the-ranks": (True, "half = comm.Split(rank == 0)\nif rank:\n    w = MPI.Win.Allocate(8, 8, comm=half)\n"
                          "    w.Lock_all()\n    w.Put(value, 0)\n    w.Unlock_all()\n    w.Free()\nhalf.Free()\n"),
    "part-of-the-ranks-atomic": (False, "half = comm.Split(rank == 0)\nif rank:\n"
                                 "    w = MPI.Win.Allocate(8, 8, comm=half)\n    w.Lock_all()\n"
                                 "    w.Accumulate(value, 0)\n    w.Unlock_all()\n    w.Free()\nhalf.Free()\n"),
    "dynamic": (True, "mine = np.zeros(4)\nw = MPI.Win.Create_dynamic(comm=comm)\nw.Attach(mine)\n"
                "place = comm.allgather(MPI.Get_address(mine))[1]\nw.Lock_all()\n"
                + on(0, "w.Put(value, 1, [place, 1])") + on(2, "w.Put(value, 1, [place, 1])")
                + "w.Unlock_all()\ncomm.Barrier()\nw.Detach(mine)\nw.Free()\n"),
    "dynamic-apart": (False, "mine = np.zeros(4)\nw = MPI.Win.Create_dynamic(comm=comm)\nw.Attach(mine)\n"
                      "place = comm.allgather(MPI.Get_address(mine))[1]\nw.Lock_all()\n"
                      + on(0, "w.Put(value, 1, [place, 1])") + on(2, "w.Put(value, 1, [place + 8, 1])")
                      + "w.Unlock_all()\ncomm.Barrier()\nw.Detach(mine)\nw.Free()\n"),
    "to-itself": (True, "win.Lock_all()\n" + on(1, "win.Put(value, 1)", "print(mem[0])") + "win.Unlock_all()\n"),
    "to-itself-flushed": (False, "win.Lock_all()\n" + on(1, "win.Put(value, 1)", "win.Flush(1)", "print(mem[0])")
                          + "win.Unlock_all()\n"),
    "nobody": (False, "win.Fence()\nwin.Put(value, MPI.PROC_NULL)\nvalue[0] = 2\nwin.Fence()\n"),
    "window-as-origin": (True, "win.Lock_all()\n" + on(0, "win.Put(mem[:1], 1)") + on(2, "win.Put(value, 0)")
                         + "win.Unlock_all()\n"),
    "window-as-origin-apart": (False, "win.Fence()\n" + on(0, "win.Put(mem[:1], 1)") + "win.Fence()\n"
                               + on(2, "win.Put(value, 0)") + "win.Fence()\n"),
    "halo": (False, "for step in range(5):\n    win.Fence()\n    win.Put(mem[1:2], (rank + 1) % comm.size)\n"
             "    win.Fence()\n    mem[1] = mem[0] + rank\n"),
    "halo-without-second-fence": (True, "for step in range(5):\n    win.Fence()\n"
                                  "    win.Put(mem[1:2], (rank + 1) % comm.size)\n    mem[1] = mem[0] + rank\n"
                                  "win.Fence()\n"),
    "counter": (False, "win.Lock_all()\nfor n in range(20):\n    win.Fetch_and_op(value, result, 0)\n    win.Flush(0)\n"
                "win.Unlock_all()\n"),
    "counter-by-get-and-put": (True, "win.Lock_all()\nfor n in range(3):\n    win.Get(result, 0)\n    win.Flush(0)\n"
                               "    win.Put(result + 1, 0)\n    win.Flush(0)\nwin.Unlock_all()\n"),
    "counter-in-locks": (False, "for n in range(3):\n    win.Lock(0)\n    win.Get(result, 0)\n    win.Flush(0)\n"
                         "    win.Put(result + 1, 0)\n    win.Unlock(0)\n"),
}  # fmt: skip
SHARED_HEAD = "s = MPI.Win.Allocate_shared(64 if rank == 0 else 0, 8, comm=comm)\n"
SHARED_HEAD += "all_ = np.frombuffer(s.Shared_query(0)[0], np.float64)\n"
SHARED = {
    "stores": (True, "s.Lock_all()\nall_[0] = rank + 1\ns.Unlock_all()\n"),
    "own-elements": (False, "s.Lock_all()\nall_[rank] = rank + 1\ns.Unlock_all()\n"),
    "store-and-load": (True, on(0, "all_[0] = 4") + on(1, "print(all_[0])")),
    "store-barrier-load": (False, on(0, "all_[0] = 4", "s.Sync()") + "comm.Barrier()\ns.Sync()\n"
                           + on(1, "print(all_[0])")),
    "store-message-load": (False, on(0, "all_[0] = 4", "s.Sync()", "comm.send(0, 1)")
                           + on(1, "comm.recv(source=0)", "s.Sync()", "print(all_[0])")),
    "message-store-load": (True, on(0, "comm.send(0, 1)", "all_[0] = 4", "s.Sync()")
                           + on(1, "comm.recv(source=0)", "s.Sync()", "print(all_[0])")),
    "put-and-load": (True, "s.Lock_all()\n" + on(1, "s.Put(value, 0)") + on(2, "print(all_[0])") + "s.Unlock_all()\n"),
    "fenced": (False, "s.Fence()\n" + on(1, "all_[0] = 2") + "s.Fence()\n" + on(2, "all_[0] = 3") + "s.Fence()\n"),
    "locked": (False, "s.Lock(0)\nall_[0] += 1\ns.Unlock(0)\n"),
}  # fmt: skip


def cases() -> list[Case]:
    """Return all programs."""
    misc = [Case("misc", name, body, racy) for name, (racy, body) in MISC.items()]
    shared = [
        Case("shared", name, f"{SHARED_HEAD}comm.Barrier()\n{body}comm.Barrier()\ns.Free()\n", racy)
        for name, (racy, body) in SHARED.items()
    ]
    many = [
        Case(each.category, f"{each.name}-11-ranks", each.body, each.racy, ranks=11)
        for each in misc
        if each.name in ("halo", "counter", "counter-by-get-and-put", "counter-in-locks")
    ]
    return [*at_origin(), *at_target(), *synchronization(), *atomics(), *misc, *many, *shared]


def judged(case: Case, folder: Path) -> tuple[bool, str]:
    """Run a program; return whether a race was found, and the report."""
    import spawnsim
    from spawnsim.errors import DataRace

    path = folder / "case.py"
    path.write_text(case.text)
    try:
        spawnsim.run(path, ranks=case.ranks, races=True, options={"prefix": False})
    except DataRace as error:
        return True, str(error)
    return False, ""
