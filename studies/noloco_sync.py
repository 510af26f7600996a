"""Pairs against a tree: the time of the exchange of an outer step as replicas are added. Timing alone.

    spawnsim study noloco_sync [--quick]

All replicas hold one model without memory, and begin a round together. NoLoCo's pairs exchange slow weights and
differences; DiLoCo's average is an Allreduce by a binomial tree (reduce, then broadcast).
"""

import numpy as np
import torch

import spawnsim
from spawnsim.models.collectives.catalogue import Selection
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.models.platform import Platform
from spawnsim.plots import style
from spawnsim.policies import NoLoCoPolicy, OuterOptimizerPolicy
from spawnsim.study import Context
from spawnsim.units import extent

PARAMETERS, RATE_BPS = 125_000_000, 1.25e9  # the smallest of the paper's models; 10 Gbit/s
NETWORKS = {
    "Hockney": Switch(Hockney(1e-3, RATE_BPS)),
    "LogGP": Switch(LogGP(1e-3, 1e-4, 1e-4, 1 / RATE_BPS)),
}
TREE = Selection(fixed=(("allreduce", "reduce_bcast"),))


def study(context: Context) -> None:
    """Time one round for increasing numbers of replicas; state the claim."""
    replicas = [2, 4, 16, 64, 256] if context.quick else [2, 4, 16, 64, 256, 1024]
    rows = []
    for network in NETWORKS:
        for ranks in replicas:
            tree, pairs = (seconds(policy, ranks, NETWORKS[network]) for policy in ("tree", "pairs"))
            rows.append({"network": network, "replicas": ranks, "tree_s": tree, "pairs_s": pairs})
            context.say(
                f"{network:8}{ranks:5} replicas: tree {tree:7.3f} s, pairs {pairs:6.3f} s, {tree / pairs:5.2f} times"
            )
    context.save_table(rows, "seconds")
    context.save(figure(rows), "seconds")
    gains = {
        network: np.array([row["tree_s"] / row["pairs_s"] for row in rows if row["network"] == network])
        for network in NETWORKS
    }
    logs = np.log2(replicas)
    fits = {network: float(np.corrcoef(logs, gain)[0, 1] ** 2) for network, gain in gains.items()}
    last = [float(gain[-1]) for gain in gains.values()]
    at = [float(gain[-1] / logs[-1]) for gain in gains.values()]
    context.claim(
        "Synchronising a pair is about 10 times faster than a tree all-reduce at about 1,000 replicas, and the gain "
        "grows as the logarithm of their number",
        source="arXiv 2506.10911, abstract",
        checks={
            "5 to 20 times at 1,024": all(5 <= 10 * each <= 20 for each in at),
            "a line in log n": min(fits.values()) > 0.98,
        },
        found=f"{extent(last, '.3g')} times at {replicas[-1]:,} replicas, {extent(at, '.2g')} "
        f"for each doubling; R² of a line in log n {min(fits.values()):.3f} ({', '.join(NETWORKS)}; 125 M parameters, "
        "10 Gbit/s)",
    )


def seconds(policy, ranks, network):
    """Return the time that the slowest replica waits in a round."""

    def main(comm):
        model = torch.nn.Linear(1000, PARAMETERS // 1000, bias=False, device="meta")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = NoLoCoPolicy(1) if policy == "pairs" else OuterOptimizerPolicy.diloco(1)
        chosen.attach(model, comm)
        comm.Barrier()
        _, _, info = chosen(1, model, optimizer, None, comm)
        comm.record(wait_s=info["wait_s"])
        chosen.shutdown()

    run = spawnsim.run(
        main, ranks=ranks, platform=Platform("wire", network, collectives=TREE), deadline_s=1e6
    )
    return float(np.max(run.table["wait_s"]))


def figure(rows):
    """Draw the seconds of a round against the number of replicas."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(9, 5))
        ax = drawn.add_subplot()
        names = {"tree_s": "tree all-reduce", "pairs_s": "random pairs"}
        looks = style.looks(list(names.values()))
        for network, dash in zip(NETWORKS, ("-", "--"), strict=True):
            mine = [row for row in rows if row["network"] == network]
            for key, name in names.items():
                ax.semilogx(
                    [row["replicas"] for row in mine], [row[key] for row in mine], dash,
                    base=2, color=looks[name].colour, label=f"{name}, {network}",
                )  # fmt: skip
        ax.set_xlabel("replicas")
        ax.set_ylabel("seconds of an outer step")
        ax.legend(frameon=False)
        return style.frame(
            drawn, "A pair does not wait for the tree", "125 M parameters · 10 Gbit/s · timing alone"
        )
