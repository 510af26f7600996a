"""The virtual backend: a deterministic cluster in one process."""

from spawnsim.virtual.cluster import Totals, simulate

__all__ = ["Totals", "simulate"]
