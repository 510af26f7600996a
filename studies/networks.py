"""Does the network model decide the ranking? Three ways to exchange on six platforms, each under two models.

    spawnsim study networks [--quick]

The question: which way of exchanging is the fastest, and does the answer depend on the model of a message's cost?

The method: timing alone, 16 ranks, an exchange in each iteration of 10 ms, models of 10 kB to 100 MB. Averaging by a
ring moves the fewest bytes, by recursive doubling sends the fewest messages; selective replacement (a fifth of the
ranks) never waits. Five presets, and a stack that costs a processor 150 µs per message. Under Hockney (α, β) a
message costs only its wire. Under LogGP the same α is split: 40 % of it, but at most 20 µs, is spent by the processor
at each end (for the heavy stack 150 µs in addition to the wire), and the next message waits for as long.

The finding: hardly. The ranking is the same in 17 of 18 cases. Selective replacement is first, as no rank waits (not
even for a model that travels for longer than the run); only 10 kB over NVLink are averaged as fast as ranks are
compared. Doubling comes before the ring for small models, the ring first for large ones; over NVLink doubling is
first for all. The model decides where messages cost the processor much and the size is near that border: 1 MB over
the heavy stack, where the ring's many messages cost more than its bytes save, which Hockney cannot show. A ranking
reported there under only one model is a property of the model.
"""

from dataclasses import replace

import numpy as np

import spawnsim
from spawnsim import AsyncSelectiveAveragingPolicy, AverageAllPolicy
from spawnsim.models.collectives.catalogue import Selection
from spawnsim.models.network import LogGP
from spawnsim.models.platform import load_platform
from spawnsim.plots import style
from spawnsim.study import Context
from spawnsim.workloads.mlp import without_data

HEAVY = "10 Gbit/s, heavy stack"
PLATFORMS = ("gigabit", "cloud-spot", "ethernet-10g", HEAVY, "infiniband-ndr", "nvlink-ib")
MODELS = ("Hockney", "LogGP")
WAYS = {"average, ring": "ring", "average, doubling": "recursive_doubling", "selective": "ring"}
SIZES = {"10 kB": 2_500, "1 MB": 250_000, "100 MB": 25_000_000}
ITERATIONS, STEP_S = 12, 0.01


def study(context: Context) -> None:
    """Run all ways on all platforms under both models; rank the ways, and draw the table."""
    ranks = 8 if context.quick else 16
    sizes = dict([*SIZES.items()][:2]) if context.quick else SIZES
    rows = []
    for name in PLATFORMS:
        for size, parameters in sizes.items():
            for model in MODELS:
                took = {way: milliseconds(way, platform(name, model, way), ranks, parameters) for way in WAYS}
                rows.append(
                    {"platform": name, "size": size, "model": model, "ms": took, "ranking": ranking(took)}
                )
                text = " < ".join(f"{way} {took[way]:.2f} ms" for way in rows[-1]["ranking"])
                context.say(f"{name:24}{size:7} {model:8} {text}")
    context.save_table(rows, "ranking")
    context.save(figure(rows, ranks), "ranking")
    differ = decided_by_model(rows)
    context.say(
        f"the model decides the ranking in {len(differ)} of {len(rows) // 2}: {', '.join(differ) or 'none'}"
    )


def platform(name, model, way):
    """Return a preset under a model of messages, with an algorithm for averages."""
    found = load_platform("ethernet-10g" if name == HEAVY else name)
    network = found.network
    links = ["link"] if hasattr(network, "link") else ["intra", "inter"]
    if model == "LogGP":
        network = replace(
            network, **{each: split(getattr(network, each), heavy=name == HEAVY) for each in links}
        )
    return replace(found, network=network, collectives=Selection(fixed=(("allreduce", WAYS[way]),)))


def split(link, heavy):
    """Return the LogGP twin of a Hockney link."""
    own_s = 150e-6 if heavy else min(0.4 * link.latency_s, 20e-6)
    wire_s = link.latency_s if heavy else link.latency_s - 2 * own_s
    return LogGP(wire_s, own_s, own_s, 1 / link.bandwidth_Bps)


def milliseconds(way, where, ranks, parameters):
    """Return the mean time of an iteration beyond computing, over ranks and iterations."""

    def main(comm):
        model, optimizer = without_data(parameters)
        if way == "selective":
            policy = AsyncSelectiveAveragingPolicy(None, 1, 0.2, cooldown=0)
        else:
            policy = AverageAllPolicy(1)
        for iteration in range(ITERATIONS):
            with comm.compute(STEP_S):
                pass
            policy(iteration, model, optimizer, float(comm.rng("metric").normal()), comm)
        comm.record(seconds=comm.clock.now() / ITERATIONS - STEP_S)
        policy.shutdown()

    run = spawnsim.run(main, ranks=ranks, platform=where, seed=7, deadline_s=1e6)
    return 1e3 * float(run.table["seconds"].mean())


def ranking(took):
    """Return the ways from the fastest to the slowest; within 1 % in the order of `WAYS`."""
    least = min(took.values())
    # Times that are equal except for rounding must not make a ranking.
    ratios = {way: max(each, 1e-6) / max(least, 1e-6) for way, each in took.items()}
    return sorted(took, key=lambda way: (round(np.log(ratios[way]) / 0.01), [*WAYS].index(way)))


def decided_by_model(rows):
    """Return the platforms and sizes whose ranking differs under the second model."""
    pairs = {}
    for row in rows:
        pairs.setdefault(f"{row['platform']}, {row['size']}", []).append(row["ranking"])
    return [name for name, (first, second) in pairs.items() if first != second]


def title(rows):
    """Return the table's title: whether both models rank the ways equally."""
    count = len(decided_by_model(rows))
    if not count:
        return "Both network models rank alike"
    return f"The network model decides the ranking in {count} of {len(rows) // 2} cases"


def figure(rows, ranks):
    """Draw a table: milliseconds beyond computing, a row per platform and size, the fastest dark."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys((row["platform"], row["size"]) for row in rows))
    known = {(row["platform"], row["size"], row["model"]): row for row in rows}
    marked = set(decided_by_model(rows))
    with style.talk():
        drawn = Figure(figsize=(11, 1.9 + 0.36 * len(names)))
        axes = drawn.subplots(1, len(MODELS), sharey=True)
        for ax, model in zip(axes, MODELS, strict=True):
            values = np.array([[known[*name, model]["ms"][way] for way in WAYS] for name in names])
            # Colours show the place, not the time: the times of platforms differ by five powers of ten.
            places = np.array([[known[*name, model]["ranking"].index(way) for way in WAYS] for name in names])
            ax.imshow(places, cmap="Blues_r", vmin=-0.6, vmax=2.6, aspect="auto")
            for (down, across), value in np.ndenumerate(values):
                text = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
                ax.text(across, down, text, ha="center", va="center", fontsize=10,
                        color="white" if places[down, across] == 0 else "#333333")  # fmt: skip
            ax.set_xticks(range(len(WAYS)), WAYS, fontsize=10)
            ax.set_title(model)
            ax.grid(visible=False)
        labels = [f"{'* ' if f'{name}, {size}' in marked else ''}{name}, {size}" for name, size in names]
        axes[0].set_yticks(range(len(names)), labels, fontsize=10)
        caption = (
            f"milliseconds of an iteration beyond computing; dark: the quickest · {ranks} virtual ranks, an exchange "
            "in each iteration; selective does not wait for models · *: ranked otherwise under the other model"
        )
        return style.frame(drawn, title(rows), caption)
