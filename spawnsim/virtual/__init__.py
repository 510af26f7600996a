"""The virtual backend: a deterministic cluster in one process."""

from spawnsim.virtual.cluster import Setting, Totals, simulate

__all__ = ["Setting", "Totals", "simulate"]
