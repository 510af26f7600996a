"""The exact mean after finitely many rounds with few neighbours, for any number of ranks: Base-(k+1) graphs.

    spawnsim study base_graph [--quick]

Each rank holds a number. The study checks every number of ranks and every degree, and `GossipPolicy` on live ranks.
"""

import math

import numpy as np
import torch

import spawnsim
from spawnsim.policies import GossipPolicy, graphs
from spawnsim.policies.rules.graphs import BaseGraph
from spawnsim.study import Context

DEGREES, LIVE = (1, 2, 3, 4), (25, 100)


def study(context: Context) -> None:
    """Check all numbers of ranks up to 1,024; state the claim."""
    sizes = range(2, 257 if context.quick else 1025)
    rows = []
    for degree in DEGREES:
        graph, worst, longest, busiest = BaseGraph(degree), 0.0, 0.0, 0
        for size in sizes:
            values = np.random.default_rng(size).normal(size=size)
            mean, rounds = values.mean(), graph.rounds(size)
            for round_ in range(len(rounds)):
                mixing = graphs.mixing(graph, size, round_)
                values = mixing(values)
                busiest = max(busiest, int(np.bincount(mixing.receivers).max()) - 1)
            worst = max(worst, float(np.abs(values - mean).max()))
            longest = max(longest, len(rounds) - (2 * math.log(size, degree + 1) + 2))
        live = max(spread(graph, ranks) for ranks in LIVE)
        rows.append({"degree": degree, "error": worst, "beyond": longest, "busiest": busiest, "live": live})
        context.say(
            f"k = {degree}: off by {worst:.1e} at most, {live:.1e} on live ranks, {busiest} neighbours at most"
        )
    context.save_table(rows, "errors")
    one_peer = np.arange(25.0)
    for round_ in range(25):
        one_peer = graphs.mixing(graphs.one_peer_exponential, 25, round_)(one_peer)
    context.claim(
        "The Base-(k+1) graph reaches the exact mean after finitely many rounds with at most k neighbours, for any "
        "number of ranks; one-peer exponential graphs do so only for powers of two",
        source="arXiv 2305.11420, theorem 1",
        checks={
            "exact": max(row["error"] for row in rows) < 1e-12 and max(row["live"] for row in rows) < 1e-12,
            "k neighbours": all(row["busiest"] <= row["degree"] for row in rows),
            "within 2 log n + 2 rounds": max(row["beyond"] for row in rows) < 1e-9,
            "the one-peer graph is not": float(np.ptp(one_peer)) > 1e-9,
        },
        found=f"every number of ranks from 2 to {sizes[-1]:,}, k from 1 to 4: off by "
        f"{max(row['error'] for row in rows):.0e} at most; 25 and 100 live ranks by "
        f"{max(row['live'] for row in rows):.0e}; one-peer exponential on 25 ranks "
        f"after 25 rounds by {np.ptp(one_peer):.0e}",
    )


def spread(graph, ranks):
    """Return the distance of live models from the mean after the graph's rounds."""

    def main(comm):
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, float(comm.rank))
        optimizer, policy = torch.optim.SGD(model.parameters(), lr=0.1), GossipPolicy(graph=graph)
        for iteration in range(len(graph.rounds(ranks))):
            policy(iteration, model, optimizer, group=comm)
        comm.record(weight=model.weight.item())

    return float(np.abs(spawnsim.run(main, ranks=ranks).table["weight"] - (ranks - 1) / 2).max())
