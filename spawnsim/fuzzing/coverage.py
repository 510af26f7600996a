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


@dataclass
class Reached:
    """The coverage of some cases.

    Attributes:
        drawn: for each kind of fault, the number of cases in which it was planned.
        fired: for each kind and call, how often it has struck.
        calls: the calls that the program makes without faults.
        states: for each state of policies, and whether a rank had died before, how often it was reached.
    """

    drawn: Counter[str] = field(default_factory=Counter)
    fired: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: set[str] = field(default_factory=set)
    states: Counter[tuple[str, bool]] = field(default_factory=Counter)

    def gather(self, other: Reached) -> None:
        self.drawn.update(other.drawn)
        self.fired.update(other.fired)
        self.states.update(other.states)
        self.calls |= other.calls

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

    def document(self) -> dict[str, Any]:
        """Return the coverage as JSON values."""
        return {
            "drawn": dict(sorted(self.drawn.items())),
            "fired": [[*pair, times] for pair, times in sorted(self.fired.items())],
            "never": self.missed(),
            "states": [[*state, times] for state, times in sorted(self.states.items())],
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
        names = sorted({state for state, _ in self.states})
        states = [
            f"{name} {self.states[name, False] + self.states[name, True]:,} ({self.states[name, True]:,})"
            for name in names
        ]
        parts.append(_listed("policy states (of those, after a death)", states))
        return [part for part in parts if part]


def _listed(title: str, items: list[str]) -> str:
    return f"{title}: {', '.join(items[:SHOWN])}" + " …" * (len(items) > SHOWN) if items else ""
