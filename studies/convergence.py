"""Convergence of the policies over seeds: median over ranks, then over seeds, with intervals.

spawnsim study convergence [--quick] [--jobs N]
"""

from spawnsim.plots import convergence, diversity, series
from spawnsim.study import Context

POLICIES = ("none", "average", "selective")
CLUSTER = {"platform": "ethernet-10g", "stragglers": "lognormal:0.3", "compute": "10 ms"}


def study(context: Context) -> None:
    """Run policies × seeds, draw curves over seeds, print final accuracies with their intervals over seeds."""
    learning = {
        "policy": POLICIES,
        "iterations": [40 if context.quick else 200],
        "alpha": [1.0],
        "judge": ["accuracy"],
    }
    ranks, seeds = (16, range(2)) if context.quick else (128, context.seeds(range(7)))
    grid = context.grid("digits.py", ranks=[ranks], seeds=seeds, over=learning, **CLUSTER)
    results = context.sweep(grid)
    runs = [each.run for each in results]
    for name in ("accuracy", "loss"):
        context.save(convergence.figure(runs, name), f"convergence-{name}")
    context.save(diversity.figure(runs), "diversity")
    context.save_table([final(policy, results) for policy in POLICIES], "final")
    for policy in POLICIES:
        found = final(policy, results)
        context.say(
            "{policy:10} accuracy {median:.3f} ({kind}: {low:.3f} to {high:.3f}, {seeds} seeds)".format(
                **found
            )
        )


def final(policy, results):
    """Return the final accuracy: median over ranks per seed, then median and interval over seeds."""
    runs = [each.run for each in results if each.cell.parameters["policy"] == policy]
    ends = [series.spread_at_end(run.table, "accuracy")[1] for run in runs]
    return {"policy": policy, "seeds": len(runs)} | series.over_seeds(ends)._asdict()
