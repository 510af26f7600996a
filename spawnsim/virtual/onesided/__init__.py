"""One-sided communication: windows, epochs, accesses, and when a target serves them."""

from spawnsim.virtual.onesided.window import Win

__all__ = ["Win"]
