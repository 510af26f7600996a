"""Coverage of cases: the calls in which each kind of fault has struck, the states of policies, and what is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from spawnsim.models.faults.events import KINDS, LinkFault, Partition
from spawnsim.units import text_table

BETWEEN = "between calls"
# A computation can slow down, and a reading of the clock can be wrong: no other call. A restart strikes no call.
ONLY_IN = {"slow": {"compute"}, "skew": {"now"}, "restart": set[str]()}
LOCAL = {"compute", "now", "sleep"}  # send nothing, so that no fault of a link can strike
SHOWN = 40  # pairs of fault and call, and states
DEADLY = {"crash", "restart"}
# When a state of a policy was reached. A member of the policy's group has died: before the exchange, or during it.
BEFORE, AFTER, WITH_DEAD = "before deaths", "after a death", "with a dead member"
RECOVERED = "recovered"  # a state of the program: the group continues without its dead members


@dataclass
class Reached:
    """The coverage of some cases.

    Attributes:
        drawn: for each kind of fault, the number of cases in which it was planned.
        fired: for each kind and call, how often it has struck.
        calls: the calls that the program makes without faults.
        states: for each state of policies, and when, how often it was reached.
        possible: the states that the program's policies declare.
    """

    drawn: Counter[str] = field(default_factory=Counter)
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: set[str] = field(default_factory=set)
    states: Counter[tuple[str, str]] = field(default_factory=Counter)
    possible: set[str] = field(default_factory=set)

    def gather(self, other: Reached) -> None:
        self.drawn.update(other.drawn)
        self.fired.update(other.fired)
        self.states.update(other.states)
        self.calls |= other.calls
        self.possible |= other.possible

    def kinds(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for (kind, _), times in self.fired.items():
            kinds[kind] += times
        return kinds

    def missed(self) -> dict[str, list[str]]:
        """Return, for each planned kind of fault, the calls in which it could have struck and never did."""
        calls = self.calls | {call for kind, call in self.fired if kind not in ONLY_IN}
        calls -= {"", BETWEEN}
        missed = {}
        for kind in sorted(self.drawn):
            by_link = issubclass(KINDS[kind], (LinkFault, Partition))
            possible = calls & ONLY_IN.get(kind, calls - LOCAL if by_link else calls)
            missed[kind] = sorted(call for call in possible if not self.fired[kind, call])
        return {kind: never for kind, never in missed.items() if never}

    def times(self, state: str) -> int:
        """Return how often a state was reached, whenever."""
        return sum(self.states[state, when] for when in (BEFORE, AFTER, WITH_DEAD))

    def missed_states(self) -> list[str]:
        """Return the possible states that were never reached, or not after the deaths that were planned."""
        missed = []
        for state in sorted(self.possible):
            if not self.times(state):
                missed.append(state)
            elif DEADLY & set(self.drawn) and state != RECOVERED:
                missed += [f"{state} {when}" for when in (AFTER, WITH_DEAD) if not self.states[state, when]]
        return missed

    def document(self) -> dict[str, Any]:
        """Return the coverage as JSON values."""
        return {
            "drawn": dict(sorted(self.drawn.items())),
            "fired": [[*pair, times] for pair, times in sorted(self.fired.items())],
            "never": self.missed(),
            "states": [[*state, times] for state, times in sorted(self.states.items())],
            "states_never": self.missed_states(),
        }

    def report(self) -> list[str]:
        """Return the coverage as paragraphs."""
        kinds = self.kinds()
        rows = [(kind, f"{self.drawn[kind]:,}", f"{kinds[kind]:,}") for kind in sorted(self.drawn | kinds)]
        parts = [text_table(("fault", "cases with it", "times it struck"), rows)] if rows else []
        unproved = [kind for kind in sorted(self.drawn) if not kinds[kind]]
        if unproved:
            parts.append(f"never took effect, so nothing is known about it: {', '.join(unproved)}")
        ordered = sorted(self.fired.items(), key=lambda each: (-each[1], each[0]))
        parts.append(
            _listed("fault × call", [f"{kind} × {call or 'an event'} {n:,}" for (kind, call), n in ordered])
        )
        never = [
            f"{kind} × {', '.join(calls)}" for kind, calls in self.missed().items() if kind not in unproved
        ]
        parts.append(f"never reached: {'; '.join(never)}" if never else "")
        states = [
            f"{name} {self.times(name):,} ({self.states[name, AFTER]:,}, {self.states[name, WITH_DEAD]:,})"
            for name in sorted({state for state, _ in self.states})
        ]
        parts.append(_listed(f"policy states (of those, {AFTER}, {WITH_DEAD})", states))
        parts.append(_listed("policy states never reached", self.missed_states()))
        return [part for part in parts if part]


def _listed(title: str, items: list[str]) -> str:
    return f"{title}: {', '.join(items[:SHOWN])}" + " …" * (len(items) > SHOWN) if items else ""
