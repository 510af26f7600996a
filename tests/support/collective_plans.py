"""Collectives to test with: named plans on plain networks, and random calls."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from spawnsim.models.collectives import ALGORITHMS, CollectivePlan, Planner, Selection
from spawnsim.models.network import BandwidthTrace, Changing, Hockney, LogGP, Nodes, Switch, Tcp
from spawnsim.models.network.changing import PoissonFlows

SIZES = (2, 3, 5, 8, 16, 64, 1000)
ALPHA, BANDWIDTH, GAMMA = 1e-5, 1.25e9, 1e-10
BETA = 1 / BANDWIDTH
NAMED = [(operation, name) for operation, known in ALGORITHMS.items() for name in known]
NAMED += [
    ("bcast", "chain"),
    ("allreduce", "two_level"),
    ("allreduce", "two_level:ring"),
    ("allreduce", "double_tree"),
]


def switch(overlap=True, gamma=GAMMA, alpha=ALPHA, bandwidth=BANDWIDTH):
    """Return one switch of Hockney links."""
    return Switch(Hockney(alpha, bandwidth, overlap=overlap), gamma_s_per_B=gamma)


def plan(network, operation, name, size, nbytes, root=0, **options) -> CollectivePlan:
    """Return the plan of a named algorithm."""
    selection = Selection(fixed=((operation, name),), **options)
    return Planner(network, selection).plan(operation, size, nbytes, root)


def makespan(network, operation, name, size, nbytes, **options):
    """Return when the last rank leaves if all arrive at 0."""
    return plan(network, operation, name, size, nbytes, **options).finish(np.zeros(size), network).times.max()


UNSTEADY = ((0.0, BANDWIDTH, ALPHA), (1e-4, BANDWIDTH / 3, 2 * ALPHA), (3e-4, 0.0, ALPHA), (1e-3, 2e9, ALPHA))
NETWORKS = [
    switch(), switch(overlap=False), Switch(LogGP(2.5e-6, 1.5e-6, 4e-6, 6e-9), gamma_s_per_B=1e-10),
    Nodes(Hockney(1e-6, 1e10), LogGP(1e-5, 1e-6, 2e-6, 1e-9), 4, gamma_s_per_B=1e-10),
    Switch(Hockney(1e-5, 1e9), gamma_s_per_B=1e-10, gamma_beyond=(1000, 3e-10)),
    Switch(Hockney(1e-5, 1e9), gamma_s_per_B=1e-10, gamma_of=(("bfloat16", 3e-10),)),
    Switch(LogGP(2.5e-6, 1.5e-6, 4e-6, 6e-9), collective_rendezvous=True, eager_bytes=900),
    Nodes(Hockney(1e-6, 1e10), LogGP(1e-5, 1e-6, 2e-6, 1e-9), 4, collective_rendezvous=True, eager_bytes=2000),
    Switch(Tcp(1e-5, 1e9, initial_window=2)),
    Switch(Changing(Hockney(ALPHA, BANDWIDTH), BandwidthTrace(UNSTEADY, 5e-3))),
    Nodes(Hockney(1e-6, 1e10), Changing(LogGP(1e-5, 1e-6, 2e-6, 1e-9), None, (PoissonFlows(300, 2e-3),)), 4),
]  # fmt: skip


@st.composite
def calls(draw):
    """Draw a collective: who, when, what, how."""
    operation, name = draw(st.sampled_from(NAMED))
    size = draw(st.integers(1, 20))
    if name == "scatter_doubling":
        size = 1 << draw(st.integers(0, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    nbytes = draw(st.sampled_from([0, 1, 7, 1000, 300_000]))
    blocked = (
        operation in ("gather", "scatter", "allgather", "alltoall", "reduce_scatter") and name != "bruck"
    )
    if blocked and draw(st.booleans()):
        nbytes = rng.integers(0, 5000, (size, size) if operation == "alltoall" else size)
    root = draw(st.integers(0, size - 1)) if operation in ("bcast", "reduce", "gather", "scatter") else 0
    ranks = rng.permutation(40)[:size]
    arrivals = rng.choice([0.0, 1e-4, 1e-2]) * rng.random(size) + rng.choice([0.0, 100.0])
    network = draw(st.sampled_from(NETWORKS))
    selection = Selection(fixed=((operation, name),), segment_bytes=50_000)
    dtype = draw(st.sampled_from(["", "bfloat16"]))
    return (
        Planner(network, selection).plan(operation, size, nbytes, root, ranks=ranks, dtype=dtype),
        network,
        arrivals,
        ranks,
    )
