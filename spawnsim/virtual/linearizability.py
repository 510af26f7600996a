"""Whether an object that ranks share behaves as if each operation took effect at once: linearizability.

Herlihy and Wing (1990) call a history linearizable if some order of its operations keeps their order in time and gives
each the result that a sequential specification gives. The search is Wing and Gong's (1993), depth first, with Lowe's
(2017) memory of visited pairs: operations that are done, state. An operation without a return may take effect at any
time after its beginning, or never. Operations that touch in time are concurrent, unless one thread makes both.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import FunctionType
from typing import Any, NamedTuple

from spawnsim.errors import ParameterError
from spawnsim.units import text_table
from spawnsim.virtual.operations import Operation, plain, short

# Visited pairs of a search that decides, one for the first impossible operation, and one for a detail of the message.
MOST, SOME, FEW = 500_000, 30_000, 3_000
# Operations of a message, the last ones that may conflict, and results that are tried.
SHOWN, CLOSE, TRIED = 8, 16, 20


def violation(name: str, history: Sequence[Operation], specification: Callable[[], Any]) -> str | None:
    """Return why a history is not linearizable, or None if it is.

    Args:
        name: the object; operations on other objects do not count.
        history: operations in the order in which they began.
        specification: returns an object with a method for each operation, in its first state. A method that raises is
            impossible in that state.

    Raises:
        ParameterError: The specification lacks a method or cannot be copied, or too many orders are possible.
    """
    search = _Search(name, [each for each in history if each.object == name], specification)
    ends = [(each.end_s, at) for at, each in enumerate(search.operations) if each.end_s is not None]
    order = [place for _, place in sorted(ends)]
    explained = search.explains(order, MOST)
    if explained is None:
        raise search.refused(
            f"{len(search.operations)} operations have more orders than {MOST:,} steps can try; use fewer ranks, or "
            "give each part of the object its own name"
        )
    if explained:
        return None
    # Numbers of operations, by their ends: an order explains them, or few steps do not decide; none does.
    good, bad = 0, len(order)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if search.explains(order[:middle], SOME) is False else (middle, bad)
    return _message(search, order[:bad])


class _Packer(pickle.Pickler):
    """Pickles an instance of a class that cannot be imported, too: classes and functions are not copied."""

    def __init__(self, file: io.BytesIO, kept: dict[int, Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        """Return the key of a class or function, None for everything else."""
        if isinstance(value, (type, FunctionType)):
            self._kept[id(value)] = value
            return id(value)
        return None


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, kept: dict[int, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.persistent_load = kept.__getitem__  # type: ignore[method-assign]


class _Step(NamedTuple):
    """The outcome of a call in a state: the result and the number of the next state, or the error."""

    result: Any
    state: int
    error: str = ""


class _Search:
    """Operations on one object in the order of their beginnings, and the states to which they lead.

    A state is the pickled specification. That is sound: equal bytes are equal states. Equal states with different bytes
    (sets, shared references) only cost time.

    A call is pure if it changes no state that the search has met. Such an operation is done as soon as its result is
    right: an order with the operation in a later place is also one with it in the earlier place.
    """

    def __init__(self, name: str, history: Sequence[Operation], specification: Callable[[], Any]) -> None:
        self.name, self.title = name, getattr(specification, "__name__", "the specification")
        self.operations = sorted(history, key=lambda each: each.begin_s)
        self.results = [plain(each.result) for each in self.operations]
        self._until_s: list[float] = []
        self._kept: dict[int, Any] = {}
        self._states: dict[bytes, int] = {}
        self._packed: list[bytes] = []
        self._steps: dict[tuple[int, bytes], _Step] = {}
        try:
            first = specification()
            self._number(first)
            self._calls = [self._pack((each.method, each.arguments)) for each in self.operations]
        except Exception as error:
            raise self.refused(
                f"give a class whose instances and arguments can be pickled ({type(error).__name__}: {error})"
            ) from error
        self._pure, self._met = set(self._calls), set[int]()
        for each in self.operations:
            if not callable(getattr(first, each.method, None)):
                raise self.refused(
                    f"no method {each.method!r}, which rank {each.rank} recorded ({each.line})"
                )

    def refused(self, why: str) -> ParameterError:
        return ParameterError(f"comm.check({self.name!r}, linearizable={self.title}): {why}")

    def _pack(self, value: Any) -> bytes:
        file = io.BytesIO()
        _Packer(file, self._kept).dump(value)
        return file.getvalue()

    def _number(self, instance: Any) -> int:
        packed = self._pack(instance)
        number = self._states.setdefault(packed, len(self._packed))
        self._packed += [packed] if number == len(self._packed) else []
        return number

    def shown(self, state: int) -> str:
        """Return a state as the attributes of the specification, or as its own repr."""
        instance = _Unpacker(self._packed[state], self._kept).load()
        own_repr: Any = type(instance).__repr__
        if own_repr is not object.__repr__:
            return short(instance)
        own = getattr(instance, "__dict__", {}).items()
        return ", ".join(f"{name}={short(value)}" for name, value in own) or f"{type(instance).__name__}()"

    def _step(self, state: int, call: bytes) -> _Step:
        """Return the outcome of a call in a state."""
        key = state, call
        if key not in self._steps:
            instance = _Unpacker(self._packed[state], self._kept).load()
            method, arguments = _Unpacker(call, self._kept).load()
            try:
                result = plain(getattr(instance, method)(*arguments))
                self._steps[key] = _Step(result, self._number(instance))
            except Exception as error:  # noqa: BLE001 - impossible in this state, whatever it raises
                self._steps[key] = _Step(None, -1, f"{type(error).__name__}: {error}".removesuffix(": "))
        return self._steps[key]

    def is_idle(self, place: int, other: Operation) -> bool:
        """Return whether an operation changes nothing, and has the call and the result of another one."""
        return self._calls[place] in self._pure and str(self.operations[place]) == str(other)

    def _impure(self, state: int) -> set[bytes]:
        """Return the calls that were pure until the search has met this state."""
        self._met.add(state)
        return {call for call in self._pure if self._step(state, call).state not in (state, -1)}

    def _next(self, done: int) -> list[int]:
        """Return the operations that may be next, by their ends: all that ended before their beginning are done."""
        found, bound_s, threads = list[int](), math.inf, dict[Any, float]()
        for place in range((~done & (done + 1)).bit_length() - 1, len(self.operations)):
            each, until_s = self.operations[place], self._until_s[place]
            if each.begin_s > bound_s:
                break
            if not done >> place & 1:
                earlier_s = threads.get(each.thread, math.inf)
                if earlier_s > each.begin_s:
                    found.append(place)
                bound_s, threads[each.thread] = min(bound_s, until_s), min(earlier_s, until_s)
        return sorted(found, key=self._until_s.__getitem__)

    def _after(self, done: int, state: int) -> list[tuple[int, int]]:
        """Return what one more operation leads to; of equal calls, only the first to end is tried."""
        found: list[tuple[int, int]] = []
        tried: dict[bytes, float] = {}
        for place in self._next(done):
            end_s, call, result = self._until_s[place], self._calls[place], self.results[place]
            step = self._step(state, call)
            if step.error or (end_s < math.inf and not (step.result is result or step.result == result)):
                continue
            if call in self._pure:
                if end_s < math.inf:
                    return [(done | 1 << place, state)]
            # The other equal calls fit in later: all that must follow their ends must follow this earlier end.
            elif call not in tried or tried[call] == end_s < math.inf:
                tried[call] = end_s
                found.append((done | 1 << place, step.state))
        return found

    def states_after(self, places: Sequence[int], most: int = FEW) -> Iterator[int | None]:
        """Yield the states after orders of operations, and of others as necessary; None after too many steps."""
        required = sum(1 << place for place in places)
        seen, waiting = {(0, 0)}, [(0, 0)]
        while waiting:
            done, state = waiting.pop()
            if state not in self._met and (impure := self._impure(state)):
                self._pure -= impure
                seen, waiting = {(0, 0)}, [(0, 0)]
                continue
            if done & required == required:
                yield state
            elif len(seen) > most:
                yield None
                return
            else:
                new = [each for each in self._after(done, state) if each not in seen]
                seen.update(new)
                waiting += reversed(new)

    def explains(self, places: Sequence[int], most: int = FEW) -> bool | None:
        """Return whether an order explains the results of operations, if the rest is pending; None: unknown."""
        self._until_s = [math.inf] * len(self.operations)
        for place in places:
            self._until_s[place] = self.operations[place].until_s()
        state = next(self.states_after(places, most), -1)
        return None if state is None else state >= 0

    def allowed(self, prefix: Sequence[int]) -> str:
        """Return which results the specification allows for the last of these operations."""
        last, recorded, found = prefix[-1], self.results[prefix[-1]], list[str]()
        self.explains(prefix[:-1])
        ends = [state for state in islice(self.states_after(prefix[:-1]), TRIED) if state is not None]
        steps = [step for (_, call), step in self._steps.items() if call == self._calls[last]]
        for step in [*(self._step(state, self._calls[last]) for state in ends), *steps[-TRIED:]]:
            self.results[last] = step.result
            if not step.error and short(step.result) not in found and self.explains(prefix):
                found.append(short(step.result))
        self.results[last] = recorded
        every = len(found) <= 4 and len(steps) <= TRIED
        if found:
            return f"{self.title} allows {'only ' * every}{' or '.join(found[:4])}{', for example' * (not every)}"
        errors = [f"{self.title} raises {each.error}" for each in steps if each.error]
        return errors[0] if errors else "no order explains it"


def _message(search: _Search, prefix: Sequence[int]) -> str:
    """Return the message on operations, by their ends: an order explains all except the last, and none all."""
    wrong, allowed = search.operations[prefix[-1]], search.allowed(prefix)
    conflicts = {at for at in prefix[-CLOSE:-1] if search.explains([each for each in prefix if each != at])}
    ended = [place for place in prefix[:-1] if search.operations[place].precedes(wrong)]
    search.explains(prefix[:-1])  # the last one and those after it are pending
    given = (search.shown(state) for state in search.states_after(ended) if state is not None)
    states = list(dict.fromkeys(islice(given, 1000)))
    known = [at for at, each in enumerate(search.operations) if each.begin_s <= wrong.until_s()]

    def remark(place: int) -> str:
        each = search.operations[place]
        words = ["concurrent"] * (not each.precedes(wrong)) + ["conflicts"] * (place in conflicts)
        return "← not possible" if each is wrong else ", ".join(words)

    def near(place: int) -> tuple[Any, ...]:
        early = place not in conflicts, search.is_idle(place, wrong), not remark(place)
        return place != prefix[-1], *early, -search.operations[place].until_s()

    rows = [
        (
            f"rank {each.rank}", str(each), f"{each.begin_s:.6g} s",
            "pending" if each.end_s is None else f"{each.end_s:.6g} s", each.line, remark(place),
        )
        for place in sorted(sorted(known, key=near)[:SHOWN])
        for each in [search.operations[place]]
    ]  # fmt: skip
    more_states = " …" if len(states) > 3 else ""
    more, head = len(known) - len(rows), ("rank", "operation", "begin", "end", "at", "")
    return "\n".join((
        f"{search.name} is not linearizable: {wrong} of rank {wrong.rank} ({wrong.line}); {allowed}",
        text_table(head, rows, left=len(head), indent="  "),
        *([f"  … and {more} more that began before its end"] if more else []),
        *([f"  state of {search.title} before it: {' or '.join(states[:3])}{more_states}"] if states else []),
    ))  # fmt: skip
