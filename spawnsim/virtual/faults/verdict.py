"""What a fault plan says of one message.

This room knows one message's fate. It must not know faults or who asks.
"""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """What becomes of one message."""

    lost: bool = False
    delay_s: float = 0.0
    """Added to the time of arrival."""
    copies: int = 1
    """How often it is delivered; 1 is normal."""
    corrupt: bool = False
    """Whether its payload is damaged on the way."""
    resent: int = 0
    """How often it was sent again before it came through; only on a reliable connection."""

    def then(self, other: Verdict) -> Verdict:
        """Return both verdicts in one: any loss loses, delays add, copies multiply."""
        return Verdict(
            self.lost or other.lost,
            self.delay_s + other.delay_s,
            self.copies * other.copies,
            self.corrupt or other.corrupt,
        )

    def describe(self) -> str:
        """Return what happens to the message, such as "delayed+doubled"; nothing if it is simply delivered."""
        struck = {
            "lost": self.lost, "resent": self.resent, "corrupt": self.corrupt,
            "delayed": self.delay_s > 0.0 and not self.resent, "doubled": self.copies > 1,
        }  # fmt: skip
        return "+".join(name for name, is_so in struck.items() if is_so)


DELIVERED = Verdict()
LOST = Verdict(lost=True)
