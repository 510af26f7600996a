"""From 8 to 4,096 ranks: the cost of waiting for the slowest, the cost of the network, and what each policy avoids.

    spawnsim study scaling [--quick]

The question: how long does an iteration take as ranks are added, (a) if steps are noisy and the network is fast, (b)
if steps are even and 100 MB travel over 10 Gbit/s?

The method: timing alone, models without memory. (a) Steps with a mean of 1 s, under five kinds of noise. Synchronous
rounds (average after each step, after 10) over columns, 100 iterations. Their makespan per iteration is compared with
the expectation of the largest of N draws: H_N for exponential steps, Γ(N + 1) for Pareto, an integral for the others,
with Erlang's distribution for ten steps. Policies that wait for one other rank or never wait run on ordinary virtual
ranks, 20 iterations, up to 512 ranks (selective replacement: 4,096). (b) One exchange in 10 steps of 1 s, under two
network models.

The finding: the closed forms hold at every number of ranks. Waiting for all after each step costs the factor H_N, 8.9
at 4,096 ranks, after every 10 steps 2.6; under Pareto's tail 25 and 6.6. Gossip with one peer costs 2.0 to 2.6 (each
rank waits for one that has waited). Policies that never wait keep the pace of the mean step, whatever the number of
ranks. If a few ranks are permanently slower, rarer rounds do not help. The time of an average of 100 MB grows from
0.15 to 0.17 s and no further; gossip takes 0.04 s; a replacement is sent in parallel with training, and takes none of
the mean rank's time. Both network models agree, as few messages are sent.
"""

import math

import numpy as np
import torch

import spawnsim
from spawnsim import columnar
from spawnsim.models.network import Hockney, LogGP, Switch
from spawnsim.plots import style
from spawnsim.policies import (
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    GossipPolicy,
    graphs,
)
from spawnsim.study import Context
from spawnsim.workloads.mlp import without_data

SIZES = (8, 64, 512, 4096)
NOISES = {
    "exponential:1": "exponential",
    "lognormal:0.3": "lognormal, σ 0.3",
    "pareto:2.5": "Pareto, tail 2.5",
    "bimodal:0.01,10": "1 step in 100 is 10 × as long",
    "slow:0.02,5": "1 rank in 50 is 5 × slower, always",
}
FIRST = "exponential:1"  # all policies run under this noise; under other noise only policies over columns
WAITING = {"average, each step": 1, "average, each 10 steps": 10}  # for all ranks; steps between rounds
LIVE = {
    "gossip, one peer": (lambda: GossipPolicy(graph=graphs.one_peer_exponential), 512),
    "average by the clock": (lambda: AsyncModelAveragePolicy(sync_interval_ms=10_000, background=True), 64),
    "selective": (lambda: AsyncSelectiveAveragingPolicy(None, 10, 0.2, cooldown=0), 4096),
}  # and the largest number of ranks
QUICK = Switch(Hockney(1e-6, 1e12))
NETWORKS = {"Hockney": Switch(Hockney(2e-5, 1.18e9)), "LogGP": Switch(LogGP(2e-5, 5e-6, 5e-6, 1 / 1.18e9))}
PARAMETERS = 25_000_000


def study(context: Context) -> None:
    """Time all policies at all sizes; draw both figures; state the claim."""
    sizes = SIZES[:3] if context.quick else SIZES
    seeds = context.seeds(range(1, 6))
    noise = waiting(sizes, seeds, 60 if context.quick else 100) + free(
        sizes[:2] if context.quick else sizes, seeds[:3]
    )
    context.save_table(noise, "noise")
    context.save(noise_figure(noise, sizes), "noise")
    moved = [row for network in NETWORKS for row in exchanges(network, sizes[:2] if context.quick else sizes)]
    context.save_table(moved, "network")
    context.save(network_figure(moved), "network")
    for row in noise + moved:
        context.say(
            "  ".join(f"{value:.3f}" if isinstance(value, float) else f"{value}" for value in row.values())
        )

    known = [row for row in noise if row["expected"] is not None]
    apart = [abs(row["took"] / row["expected"] - 1) for row in known]
    inside = [
        abs(row["took"] - row["expected"]) <= max(3.3 * row["error"], 1e-4 * row["expected"]) for row in known
    ]
    most = sizes[-1]
    last = {row["policy"]: row["took"] for row in noise if (row["noise"], row["ranks"]) == (FIRST, most)}
    alone = [row["took"] for row in noise if row["policy"] == "selective"]
    context.claim(
        "A synchronous round of N ranks lasts as long as the largest of N draws: H_N steps if these are exponential; "
        "a rank that never waits keeps the pace of the mean step",
        source="arXiv 1512.02673 (H_N), 1404.1328 (Pareto)",
        checks={
            "closed forms within 99.9 % intervals": float(np.mean(inside)) > 0.97,
            "the pace of the mean step": max(abs(each - 1) for each in alone) < 0.1,
        },
        found=f"{sum(inside)} of {len(inside)} makespans within their intervals ({sizes[0]} to {most:,} ranks, "
        f"{len(NOISES)} kinds of noise, {len(seeds)} seeds; off by {100 * float(np.median(apart)):.1f} % in the "
        f"median, {100 * max(apart):.0f} % at most); at {most:,} ranks, exponential: "
        + ", ".join(f"{policy} {took:.2f}" for policy, took in last.items()) + " mean steps an iteration",
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- noise
def waiting(sizes, seeds, iterations):
    """Return a row per kind of noise, policy over columns and number of ranks."""
    rows = []
    for noise in NOISES:
        for policy, every in WAITING.items():
            for ranks in sizes:
                rounds = (
                    np.array([round_lengths(every, noise, ranks, (seed, iterations)) for seed in seeds])
                    / every
                )
                rows.append({
                    "noise": noise, "policy": policy, "ranks": ranks, "took": float(rounds.mean()),
                    "expected": expected(noise, every, ranks), "error": error(noise, ranks, rounds),
                })  # fmt: skip
    return rows


def round_lengths(every, noise, ranks, drawn):
    """Return the length of each round of an average, in mean steps."""
    seed, iterations = drawn
    left = []
    columnar.run(
        AverageAllPolicy(every), ranks=ranks, iterations=iterations, model_nbytes=4, platform=QUICK, stragglers=noise,
        compute=1.0, seed=seed, streams="bulk", on_round=lambda done: left.append(float(done.left_s.max())),
    )  # fmt: skip
    return np.diff(left)  # without the first round: an average is due in the first iteration already


def error(noise, ranks, rounds):
    """Return the standard error of a mean makespan; the exact one if the slow ranks are drawn once for all rounds."""
    if noise.startswith("slow"):
        share, factor = (float(each) for each in noise.partition(":")[2].split(","))
        none = (1 - share) ** ranks
        return (factor - 1) * math.sqrt(none * (1 - none) / len(rounds))
    return float(rounds.std(ddof=1) / math.sqrt(rounds.size))


def expected(noise, every, ranks):
    """Return the expectation of the largest of N means of `every` steps; None without a closed form."""
    kind, _, text = noise.partition(":")
    numbers = [float(each) for each in text.split(",")]
    if kind == "slow":
        share, factor = numbers
        return 1 + (factor - 1) * (1 - (1 - share) ** ranks)  # the same ranks are slow in each step
    if every > 1:
        return (
            largest(lambda x: torch.special.gammainc(torch.tensor(float(every)), x * every), ranks)
            if (noise == FIRST)
            else None
        )
    if kind == "exponential":
        return 1 - numbers[0] + numbers[0] * sum(1 / each for each in range(1, ranks + 1))
    if kind == "pareto":
        shape = 1 / numbers[0]
        logs = math.lgamma(1 - shape) + math.lgamma(ranks + 1) - math.lgamma(ranks + 1 - shape)
        return (1 - shape) * math.exp(logs)
    if kind == "bimodal":
        share, factor = numbers
        return 1 + (factor - 1) * (1 - (1 - share) ** ranks)
    (sigma,) = numbers
    return largest(lambda x: torch.special.ndtr((x.log() + sigma**2 / 2) / sigma), ranks)


def largest(chance, ranks):
    """Return ∫ 1 − F(x)^N dx over x > 0, for noise of mean 1 that hardly exceeds 30."""
    at = torch.linspace(1e-9, 30, 300_001, dtype=torch.float64)
    return float(torch.trapezoid(1 - chance(at) ** ranks, at))


def free(sizes, seeds):
    """Return a row per policy on ordinary ranks and number of ranks, under the first kind of noise."""
    rows = []
    for policy, (make, most) in LIVE.items():
        for ranks in (size for size in sizes if size <= most):
            took = np.array(
                [seconds(make, ranks, QUICK, (seed, FIRST, 1)) for seed in seeds[: 3 if ranks <= 64 else 1]]
            )
            rows.append({
                "noise": FIRST, "policy": policy, "ranks": ranks, "took": float(took.mean()), "expected": None,
                "error": float(np.ptp(took)) / 2,
            })  # fmt: skip
    return rows


def seconds(make, ranks, network, drawn):
    """Return the mean rank's seconds per iteration, in steps of 1 s."""
    (seed, noise, parameters), iterations = drawn, 20

    def main(comm):
        (model, optimizer), policy = without_data(parameters), make()
        luck = comm.rng("metric").random(iterations)
        for iteration in range(iterations):
            with comm.compute(1.0):
                pass
            policy(iteration, model, optimizer, float(luck[iteration]), comm)
        comm.record(seconds=comm.clock.now() / iterations)
        policy.shutdown()

    run = spawnsim.run(main, ranks=ranks, platform=network, stragglers=noise, seed=seed, deadline_s=1e7)
    return float(run.table["seconds"].mean())


# ----------------------------------------------------------------------------------------------------------- network
def exchanges(network, sizes):
    """Return a row per policy and number of ranks: seconds beyond computing for one exchange, even steps."""
    rows = []
    for ranks in sizes:
        left = []
        columnar.run(
            AverageAllPolicy(10), ranks=ranks, iterations=20, model_nbytes=4 * PARAMETERS, platform=NETWORKS[network],
            stragglers=None, compute=1.0, on_round=lambda done, left=left: left.append(done),
        )  # fmt: skip
        took = float((left[-1].left_s - left[-1].entered_s).mean())
        rows.append({"network": network, "policy": "average", "ranks": ranks, "exchange_s": took})
        for policy, make in (
            ("gossip, one peer", lambda: GossipPolicy(10, graph=graphs.one_peer_exponential)),
            ("selective", LIVE["selective"][0]),
        ):
            if ranks <= 64:
                beyond = 20 * (seconds(make, ranks, NETWORKS[network], (1, None, PARAMETERS)) - 1) / 2
                rows.append({"network": network, "policy": policy, "ranks": ranks, "exchange_s": beyond})
    return rows


# ----------------------------------------------------------------------------------------------------------- figures
def noise_figure(rows, sizes):
    """Draw mean steps per iteration over the number of ranks, per noise: marks are measured, lines closed forms."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(13, 7.2))
        axes = drawn.subplots(2, 3).ravel()
        looks = style.looks([*WAITING, *LIVE])
        line = np.unique(np.geomspace(sizes[0], sizes[-1], 40).round().astype(int))
        for ax, (noise, name) in zip(axes, NOISES.items(), strict=False):
            for policy, look in looks.items():
                mine = [row for row in rows if (row["noise"], row["policy"]) == (noise, policy)]
                if not mine:
                    continue
                every = WAITING.get(policy)
                known = every is not None and mine[0]["expected"] is not None
                if known:
                    ax.plot(
                        line, [expected(noise, every, int(n)) for n in line], color=look.colour, linewidth=1.6
                    )
                ax.plot(
                    [row["ranks"] for row in mine], [row["took"] for row in mine], look.marker if known else
                    look.marker + ":", color=look.colour, markersize=7, label=policy,
                )  # fmt: skip
            ax.set_title(name, fontsize=12)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
            ax.set_ylim(0)
        axes[-1].set_axis_off()
        handles, names = axes[0].get_legend_handles_labels()
        axes[-1].legend(handles, names, loc="center left", frameon=False)
        for ax in axes[2:5]:
            ax.set_xlabel("ranks")
        for ax in (axes[0], axes[3]):
            ax.set_ylabel("mean steps an iteration")
        caption = "marks: virtual ranks, a quick network · lines: expectation of the largest of N draws · timing alone"
        return style.frame(drawn, "Waiting for the slowest of N: as the closed forms say", caption)


def network_figure(rows):
    """Draw the seconds of an exchange over the number of ranks, with a panel for each network model."""
    from matplotlib.figure import Figure

    with style.talk():
        drawn = Figure(figsize=(11, 4.8))
        axes = drawn.subplots(1, len(NETWORKS), sharey=True)
        looks = style.looks(["average", "selective", "gossip, one peer"])
        for ax, network in zip(axes, NETWORKS, strict=True):
            for policy, look in looks.items():
                mine = [row for row in rows if (row["network"], row["policy"]) == (network, policy)]
                ax.plot(
                    [row["ranks"] for row in mine], [row["exchange_s"] for row in mine], marker=look.marker,
                    color=look.colour, linestyle=look.dashes, label=policy,
                )  # fmt: skip
            ax.set_title(network)
            ax.set_xscale("log", base=2)
            ax.set_xlabel("ranks")
            sizes = sorted({row["ranks"] for row in rows})
            ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes[0].set_ylim(0)
        axes[0].set_ylabel("seconds per exchange, mean rank")
        axes[0].legend(frameon=False)
        caption = "models of 100 MB · 10 Gbit/s · even steps · selective: a fifth of the ranks replaced · timing alone"
        return style.frame(drawn, "What an exchange costs the mean rank", caption)
