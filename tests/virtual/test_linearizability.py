"""Linearizability: the search decides as all orders do; operations are recorded, pending ones too."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from programs.operations.ticket import Ticket
from support.virtual_run import Notes, platform

from spawnsim.errors import ParameterError, SpawnsimError
from spawnsim.scenario import Scenario
from spawnsim.virtual import linearizability, simulate
from spawnsim.virtual.linearizability import violation
from spawnsim.virtual.operations import Operation, plain

HISTORIES = 1200


class Register:
    def __init__(self):
        self.value = 0

    def read(self):
        return self.value

    def write(self, value):
        self.value = value

    def swap(self, expected, value):
        before, self.value = self.value, value if self.value == expected else self.value
        return before


class Queue(list):
    """A list itself: its items are no attributes."""

    def put(self, item):
        self.append(item)

    def get(self):
        return self.pop(0)  # raises if it is empty


CALLS = {
    Ticket: [("take",)],
    Register: [("read",), ("write", 1), ("write", 2), ("swap", 0, 1), ("swap", 1, 2)],
    Queue: [("put", 1), ("put", 2), ("get",), ("get",)],
}


def drawn(specification, seed):
    """Return a history of at most 6 operations of at most 4 ranks: correct, except that a result may be changed."""
    draw, calls, effects = random.Random(seed), [], []
    for rank in range(draw.randint(1, 4)):
        clock = draw.randint(0, 2)
        for _ in range(draw.randint(1, 3)):
            begin, clock = clock, clock + draw.randint(0, 3)
            method, *given = draw.choice(CALLS[specification])
            line = f"line {len(calls)}"
            calls.append(
                Operation(rank, rank, "it", method, tuple(given), float(begin), line, None, float(clock))
            )
            effects.append((draw.uniform(begin, clock), rank, len(calls), calls[-1]))
    history, state = [], specification()
    for *_, call in sorted(effects, key=lambda each: each[:3])[:6]:
        pending = draw.random() < 0.2
        if not pending or draw.random() < 0.5:
            try:
                call.result = getattr(state, call.method)(*call.arguments)
            except IndexError:
                continue
        if pending:
            call.result, call.end_s = None, None
        history.append(call)
    ended = [call for call in history if call.result is not None]
    if ended and draw.random() < 0.7:
        draw.choice(ended).result = draw.randint(0, 3)
    return sorted(history, key=lambda each: (each.begin_s, each.rank, each.line))


def precedes(history, one, other):
    """Return whether an operation must come before another one."""
    if one.end_s is None:
        return False
    later = one.thread == other.thread and history.index(one) < history.index(other)
    return one.end_s < other.begin_s or (later and one.end_s <= other.begin_s)


def brute(history, specification):
    """Return whether an order of the operations, perhaps without some of the pending ones, explains all results."""
    ended = [each for each in history if each.end_s is not None]
    pending = [each for each in history if each.end_s is None]
    chosen = itertools.chain.from_iterable(
        itertools.combinations(pending, count) for count in range(len(pending) + 1)
    )
    return any(
        fits(order, history, specification)
        for some in chosen
        for order in itertools.permutations([*ended, *some])
    )


def fits(order, history, specification):
    """Return whether the results in this order agree with the specification."""
    state = specification()
    for place, each in enumerate(order):
        if any(precedes(history, later, each) for later in order[place + 1 :]):
            return False
        try:
            result = getattr(state, each.method)(*each.arguments)
        except IndexError:
            return False
        if each.end_s is not None and result != each.result:
            return False
    return True


def without_later_ends(history, end):
    """Return the history up to an end: an operation that ends later is pending."""
    known = [(at, each) for at, each in enumerate(history) if each.begin_s <= end[0]]
    return [
        each if each.end_s is not None and (each.end_s, at) <= end else dataclasses.replace(each, end_s=None)
        for at, each in known
    ]


@pytest.mark.parametrize("specification", CALLS)
def test_the_search_decides_as_all_orders_do(specification):
    """On small histories, also with pending operations; and the message names the first that is impossible."""
    wrong = 0
    for seed in range(HISTORIES):
        history = drawn(specification, seed)
        text = violation("it", history, specification)
        assert (text is None) == brute(history, specification), history
        if text is not None:
            wrong += 1
            named = next(each for each in history if f" of rank {each.rank} ({each.line})" in text)
            ends = sorted((each.end_s, at) for at, each in enumerate(history) if each.end_s is not None)
            last = ends.index((named.end_s, history.index(named)))
            assert not brute(without_later_ends(history, ends[last]), specification), text
            assert last == 0 or brute(without_later_ends(history, ends[last - 1]), specification), text
    assert HISTORIES / 20 < wrong < HISTORIES * 0.9


def counted(ranks, each, wrong=()):
    """Return operations of a ticket counter with many concurrent ones; `wrong` tickets were drawn as the one before."""
    draw, taken = random.Random(1), []
    for rank in range(ranks):
        clock = 0.0
        for _ in range(each):
            begin, effect, end = (
                clock + draw.random(),
                clock + 1.0 + draw.random(),
                clock + 2.0 + draw.random(),
            )
            taken.append((effect, rank, begin, end))
            clock = end
    history = [
        Operation(rank, rank, "ticket", "take", (), begin, f"a.py:{rank}", ticket - (ticket in wrong), end)
        for ticket, (_, rank, begin, end) in enumerate(sorted(taken))
    ]
    return sorted(history, key=lambda each: each.begin_s)


def test_many_operations_take_few_steps(monkeypatch):
    """12 ranks with 20 operations, right and wrong."""
    for limit in ("MOST", "SOME"):
        monkeypatch.setattr(linearizability, limit, 500)
    assert violation("ticket", counted(12, 20), Ticket) is None
    text = violation("ticket", counted(12, 20, wrong={120}), Ticket)
    assert "→ 119 of rank" in text
    assert len(text.splitlines()) <= 12


def test_many_readers_take_few_steps(monkeypatch):
    """Reads have no order among each other: of 12 ranks that read 10 times during a write, the last read is too old."""
    for limit in ("MOST", "SOME"):
        monkeypatch.setattr(linearizability, limit, 500)
    history = [Operation(0, 0, "it", "write", (1,), 0.0, "a.py:1", None, 99.0)]
    for rank in range(1, 13):
        for turn in range(10):
            value = int(turn > rank % 3)
            history.append(
                Operation(rank, rank, "it", "read", (), turn + rank / 20, "a.py:2", value, turn + 3.5)
            )
    history = sorted(history, key=lambda each: each.begin_s)
    assert violation("it", history, Register) is None
    history[-1].result = 0
    assert "read() → 0 of rank 12 (a.py:2); Register allows only 1" in violation("it", history, Register)


def test_a_lost_update_is_seen_at_a_glance():
    """Both that drew the ticket, their lines and times, the state before, and what would have been right."""
    history = [
        Operation(0, 0, "ticket", "take", (), 0.0, "a.py:9", 0, 1.0),
        Operation(1, 1, "ticket", "take", (), 2.0, "a.py:9", 1, 3.5),
        Operation(2, 2, "ticket", "take", (), 2.5, "a.py:9", 1, 4.0),
        Operation(3, 3, "ticket", "take", (), 3.75, "a.py:9"),
    ]
    assert violation("ticket", history, Ticket) == (
        "ticket is not linearizable: take() → 1 of rank 2 (a.py:9); Ticket allows only 2 or 3\n"
        "  rank    operation   begin   end      at\n"
        "  rank 0  take() → 0  0 s     1 s      a.py:9\n"
        "  rank 1  take() → 1  2 s     3.5 s    a.py:9  concurrent, conflicts\n"
        "  rank 2  take() → 1  2.5 s   4 s      a.py:9  ← not possible\n"
        "  rank 3  take()      3.75 s  pending  a.py:9  concurrent\n"
        "  state of Ticket before it: next=1"
    )


def test_a_state_is_shown_without_addresses():
    """The attributes of the specification, or its repr; a specification in its first state may have none."""

    class Item:
        def __repr__(self):
            return f"Item at {hex(id(self))}"

    class Holder:
        kept = None

        def hold(self):
            self.kept = Item()
            return 0

    one = Operation(0, 0, "it", "hold", (), 0.0, "a.py:1", 1, 1.0)
    assert violation("it", [one], Holder).endswith("before it: Holder()")
    first, later = dataclasses.replace(one, result=0), dataclasses.replace(one, begin_s=1.0)
    assert violation("it", [first, later], Holder).endswith("before it: kept=Item")


def test_a_call_that_raises_is_impossible():
    """An item that was never put in."""
    history = [Operation(0, 0, "queue", "get", (), 0.0, "a.py:1", 7, 1.0)]
    text = violation("queue", history, Queue)
    assert "get() → 7 of rank 0 (a.py:1); Queue raises IndexError: pop from empty list" in text


def test_too_many_orders_are_an_error(monkeypatch):
    """And no hang: thirty concurrent writes, and a value that nobody has written."""
    monkeypatch.setattr(linearizability, "MOST", 2000)
    history = [Operation(rank, rank, "it", "write", (rank,), 0.0, "a.py:1", None, 1.0) for rank in range(30)]
    history.append(Operation(30, 30, "it", "read", (), 0.5, "a.py:2", -1, 2.0))
    with pytest.raises(ParameterError, match="31 operations have more orders than 2,000 steps can try"):
        violation("it", history, Register)


def test_wrong_specifications_are_refused():
    """Without the method, with an argument that nobody gives, or with a state that cannot be copied."""

    class Picky:
        def __init__(self, needed):
            self.needed = needed

    class Uncopied:
        def __init__(self):
            self.rest = (each for each in ())

    history = [Operation(0, 0, "it", "read", (), 0.0, "a.py:1", 0, 1.0)]
    with pytest.raises(
        ParameterError, match=r"linearizable=Ticket\): no method 'read', which rank 0 .*a.py:1"
    ):
        violation("it", history, Ticket)
    with pytest.raises(ParameterError, match=r"=Picky\): give a class .*missing 1 required"):
        violation("it", history, Picky)
    with pytest.raises(ParameterError, match=r"can be pickled \(TypeError: .*generator"):
        violation("it", history, Uncopied)


def test_results_are_compared_as_numbers_and_lists():
    """Numpy's numbers and arrays, tuples, and NaN."""

    class Pair:
        def both(self):
            return 1, [float("nan")]

        def one(self):
            return np.float64(1)

    both = plain([np.int64(1), np.array([np.nan])])
    history = [
        Operation(0, 0, "it", "both", (), 0.0, "a.py:1", both, 1.0),
        Operation(0, 0, "it", "one", (), 1.0, "a.py:2", 1, 1.0),
    ]
    assert violation("it", history, Pair) is None


# ------------------------------------------------------------------------------------------------------------- runs


def operations(notes):
    """Return the fields of the recorded operations, by method."""
    assert len(notes.events) == len({fields.get("method", kind) for _, _, kind, fields in notes.events})
    return {fields["method"]: fields for _, _, kind, fields in notes.events if kind == "operation"}


def test_operations_are_recorded_at_their_ends():
    """With plain values, as they were: the arrays have changed since."""

    def main(comm):
        given = np.arange(2)
        with comm.record.operation("box", "put", given, "a", [np.int64(4)]) as call:
            comm.clock.sleep(1.5)
            given[:] = 9
            call.result = given
        given[:] = 8
        with comm.record.operation("box", "clear"):
            pass

    notes = Notes()
    simulate(main, Scenario(1, platform()), recorder=notes)
    first, second = operations(notes)["put"], operations(notes)["clear"]
    assert {name: plain(value) for name, value in first.items()} == {
        "object": "box", "method": "put", "arguments": [[0, 1], "a", [4]], "result": [9, 9],
        "begin_s": 0.0, "end_s": 1.5,
    }  # fmt: skip
    assert (second["result"], second["begin_s"], second["end_s"]) == (None, 1.5, 1.5)


def test_an_operation_without_an_end_is_pending():
    """After an exception; on a rank that dies in it; on one that waits when the run ends."""

    def main(comm):
        if comm.rank == 0:
            with comm.record.operation("it", "first"):
                comm.clock.sleep(5.0)
        elif comm.rank == 1:
            with (
                pytest.raises(SpawnsimError),
                comm.record.operation("it", "second"),
                comm.clock.deadline(1.0),
            ):
                comm.recv(source=0)
        else:
            with comm.record.operation("it", "third"):
                comm.recv(source=0)

    notes = Notes()
    with pytest.raises(SpawnsimError):
        simulate(main, Scenario(3, platform(), faults="crash:0@2s"), recorder=notes)
    found = {method: (each["result"], each["end_s"]) for method, each in operations(notes).items()}
    assert found == dict.fromkeys(("first", "second", "third"), (None, None))
