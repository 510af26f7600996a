"""How much bandwidth do DiLoCo and its streaming form need? Compute utilisation against bandwidth, timing alone.

    spawnsim study streaming_diloco [--quick]

Two replicas of a model without memory (torch's meta device) train over one link of 30 ms. The step times of the three
sizes are the paper's values for its simulation (Douillard et al. 2025, arXiv 2501.18512, as quoted by others; not
read in the paper itself). Utilisation is computing time over elapsed time, in the steady state. Data-parallel
averages float32 weights after each step without overlap, which the paper's version has: its figure is an upper bound
of the need.
"""

import numpy as np
import torch

import spawnsim
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.plots import style
from spawnsim.policies import AverageAllPolicy, OuterOptimizerPolicy, StreamingDiLoCoPolicy
from spawnsim.study import Context

SIZES = {"1 B": (1e9, 0.1), "10 B": (1e10, 0.8), "100 B": (1e11, 4.9)}  # parameters, seconds per step
EVERY, FRAGMENTS, OVERLAP, LATENCY_S = 100, 20, 5, 0.03
POLICIES = {
    "data parallel": lambda: AverageAllPolicy(1),
    "DiLoCo": lambda: OuterOptimizerPolicy.diloco(EVERY),
    "streaming": lambda: StreamingDiLoCoPolicy(EVERY, fragments=FRAGMENTS, overlap=OVERLAP),
}
NETWORKS = {
    "Hockney": lambda rate: Switch(Hockney(LATENCY_S, rate)),
    "LogGP": lambda rate: Switch(LogGP(LATENCY_S, 1e-4, 1e-4, 1 / rate)),
}
WANTED, RATES = 0.95, (1e7, 1e12)  # bit/s


def study(context: Context) -> None:
    """Sweep bandwidths; find the bandwidth at which each policy reaches 95 %; draw the curves and state the claim."""
    sizes = ["1 B", "100 B"] if context.quick else [*SIZES]
    networks = ["Hockney"] if context.quick else [*NETWORKS]
    rates = np.geomspace(*RATES, 11 if context.quick else 16)
    rows, needs = [], {}
    for network in networks:
        for size in sizes:
            for policy in POLICIES:
                curve = [utilisation(policy, SIZES[size], NETWORKS[network](rate / 8)) for rate in rates]
                needs[network, size, policy] = need(rates, curve)
                rows += [
                    {"network": network, "size": size, "policy": policy, "bit_s": rate, "utilisation": used}
                    for rate, used in zip(rates, curve, strict=True)
                ]
                context.say(
                    f"{network:8}{size:>6} {policy:14} 95 % at {1e-9 * needs[network, size, policy]:.3g} Gbit/s"
                )
    context.save_table(rows, "utilisation")
    context.save(figure(rows, networks[0], sizes), "utilisation")
    streamed = [1e-9 * needs[n, s, "streaming"] for n in networks for s in sizes]
    parallel = [1e-9 * needs[n, s, "data parallel"] for n in networks for s in sizes]
    whole = [1e-9 * needs[n, s, "DiLoCo"] for n in networks for s in sizes]
    context.claim(
        "Streaming DiLoCo reaches 95 % utilisation at 1 to 5 Gbit/s for 1, 10 and 100 billion parameters; data "
        "parallel needs 100 to 300 Gbit/s",
        source="arXiv 2501.18512, Fig. 4",
        checks={
            "streaming at 5 Gbit/s or less": max(streamed) <= 5,
            "data parallel at 100 to 300 Gbit/s": min(parallel) >= 100 and max(parallel) <= 300,
            "at least 20 times less": min(p / s for p, s in zip(parallel, streamed, strict=True)) >= 20,
            "less than DiLoCo as a whole": all(s < w for s, w in zip(streamed, whole, strict=True)),
        },
        found=f"95 % at {span(streamed)} Gbit/s streamed, {span(whole)} as a whole, {span(parallel)} data parallel "
        f"without overlap ({', '.join(networks)}; {', '.join(sizes)}; H {EVERY}, P {FRAGMENTS}, τ {OVERLAP}, 4 bits, "
        "2 replicas)",
    )


def utilisation(policy, size, network):
    """Return computing over elapsed time in the second of two rounds, or the last four of six steps."""
    count, step_s = size

    def main(comm):
        # Half precision for training; differences travel as float32, or in four bits.
        layers = [
            torch.nn.Linear(1000, int(count / 1000 / FRAGMENTS), bias=False, device="meta")
            for _ in range(FRAGMENTS)
        ]
        model = torch.nn.Sequential(*layers).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        chosen = POLICIES[policy]()
        rounds, steps = (2, EVERY) if policy != "data parallel" else (3, 2)
        for iteration in range(rounds * steps + 1):
            if iteration == steps + 1:
                began_s = comm.clock.now()
            with comm.compute(step_s):
                pass
            model, optimizer, _ = chosen(iteration, model, optimizer, None, comm)
        comm.record(used=(rounds - 1) * steps * step_s / (comm.clock.now() - began_s))
        chosen.shutdown()

    return float(np.mean(spawnsim.run(main, ranks=2, platform=network, deadline_s=1e9).table["used"]))


def need(rates, curve):
    """Return the rate at which utilisation reaches 95 %, interpolated between two rates in logarithms."""
    above = next((place for place, used in enumerate(curve) if used >= WANTED), None)
    if above is None:
        return float("inf")
    if above == 0:
        return float(rates[0])
    low, high = curve[above - 1], curve[above]
    share = (WANTED - low) / (high - low)
    return float(np.exp(np.log(rates[above - 1]) + share * np.log(rates[above] / rates[above - 1])))


def span(values):
    """Return the least and the largest of some numbers as text."""
    more = f"more than {1e-9 * RATES[1]:,.0f}"
    ends = [more if value == np.inf else f"{value:.3g}" for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def figure(rows, network, sizes):
    """Draw curves of utilisation, with a colour per policy and a line style per size."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(9, 5))
        ax = drawn.add_subplot()
        looks = style.looks(list(POLICIES))
        for policy in POLICIES:
            for size, dash in zip(sizes, ("-", "--", ":"), strict=False):
                mine = [
                    row
                    for row in rows
                    if (row["network"], row["policy"], row["size"]) == (network, policy, size)
                ]
                rates = [1e-9 * row["bit_s"] for row in mine]
                used = [100 * row["utilisation"] for row in mine]
                ax.semilogx(rates, used, dash, color=looks[policy].colour, label=f"{policy}, {size}")
        ax.axhline(100 * WANTED, color="grey", lw=1)
        ax.set_xlabel("bandwidth (Gbit/s)")
        ax.set_ylabel("compute utilisation (%)")
        ax.legend(frameon=False, fontsize="small")
        caption = (
            f"2 virtual replicas · {network} · H {EVERY}, P {FRAGMENTS}, τ {OVERLAP}, 4 bits · timing alone"
        )
        return style.frame(drawn, "Streaming needs a fraction of the bandwidth", caption)
