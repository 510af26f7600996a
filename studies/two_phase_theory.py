"""Theory as an oracle: two-phase optimizers on linear regression, second moments against live columns.

    spawnsim study two_phase_theory [--quick]

The question: does live training with an outer optimizer have the excess risk that theory predicts, and at which rate of
absent workers does the best outer momentum change?

arXiv 2603.26954 studies the same problem; its formulas were not available. This recursion is derived here, and holds in
any dimension. Inputs are Gaussian with covariance diag(λ), λᵢ = i^-1.5 in 20 dimensions, targets have Gaussian noise σ,
every sample is new. M workers make H = 8 steps of SGD (batch B = 4, rate γ) from the global weights; the outer
optimizer steps by η on the mean difference, with momentum β. All weights begin at 0, at a distance of 1 from the true
ones.

**The recursion**, by direction i, of V = E[E²], C = E[Eu], U = E[u²], with the error E of the global weights and the
momentum buffer u. In a step of a worker, v = E[e²] becomes (1 - 2γλ + γ²λ²(1 + 1/B)) v + γ²λ/B (Σⱼ λⱼvⱼ + σ²), because
fourth moments of Gaussian inputs are sums of products of second moments. With anything drawn before or elsewhere, e
correlates as a·E after H steps, a = (1 - γλ)^H; two workers as a²V. If K workers are present, and the sum of their
differences is s times their mean, Δ has E[ΔE] = E[s](1 - a)V, E[Δu] = E[s](1 - a)C and E[Δ²] = E[s²](1 - a)²V +
E[s²/K](v - a²V). Then u' = βu + Δ, and E' = E - η(Δ + βu') (Nesterov) or E - ηu' (heavy ball) are linear. Presence is
independent of all else, so that the averages over K are exact: s is 1 if the sum is divided by the number present (no
worker present: Δ = 0, and the momentum still moves the weights), or K/M if by the number of all workers. The excess
risk is Σ λV/2. Columns join after a first step, at the model of rank 0: the recursion begins with one worker's step.

**Live**: `OuterOptimizerPolicy` over columns, all experiments and seeds together. An absent rank has inputs and targets
of 0, and therefore the difference 0: division by all workers. Division by those present is simulated in plain numpy.
The mean over seeds is compared with theory at each round, at 95 % with Bonferroni's correction over all settings.

The finding: theory predicts live training, with any kind of outer step and with absent workers: all 332 means (39 of
them in numpy) are within their intervals, ± 3 % in the median. By theory, at the best learning rate and momentum,
Nesterov beats heavy ball and plain steps, except with 16 or 64 workers and only 12 rounds, where heavy ball is ahead.
If the outer learning rate is tuned too, absence hardly changes the best momentum: after 48 rounds it is 0.85 to 0.88
for 4, 16 and 64 workers, absent at a rate of 0, 0.4 or 0.8; the best learning rate more than doubles (division by all
workers) or falls by up to a third (by those present). At a fixed learning rate of 0.7, division by all raises the best
momentum from 0.84 to 0.86 without absence to 0.91 to 0.93 at 0.8; after 48 rounds the old one costs 10 % from an
absence of 0.26 (4 workers), 0.21 (16) or 0.10 (64) on; after 24 rounds never, from 0.73 or from 0.47. Live columns of
16 workers, absent at a rate of 0.8, confirm it: after 48 rounds their excess risk is 0.028 at the old momentum, 0.013
at the new. With division by those present the best momentum moves by at most 0.03 up to 0.8, and the old one costs at
most 4 %.
"""

import itertools
import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch

from spawnsim import columnar
from spawnsim.plots import style
from spawnsim.policies import OuterOptimizerPolicy
from spawnsim.random import WORLD, generator
from spawnsim.study import Context

D, BATCH, H, RATE, NOISE = 20, 4, 8, 0.1, 0.5
SPECTRUM = np.arange(1, D + 1) ** -1.5
LR, MOMENTUM, LONG, LEAST_LOSS = 0.7, 0.8, 48, 1.1
KINDS = {"plain": (0.0, False), "heavy ball": (MOMENTUM, False), "Nesterov": (MOMENTUM, True)}
BETAS, ABSENT = np.arange(100) / 100, np.arange(96) / 100


@dataclass(frozen=True)
class Outer:
    """An outer optimizer over M workers, some of which are absent; lr and momentum may be arrays."""

    workers: int
    lr: object = 1.0
    momentum: object = 0.0
    nesterov: bool = False
    absent: float = 0.0  # probability, for each worker and round
    divisor: str = (
        "all"  # the sum of differences is divided by the number of "all" workers, or of those "present"
    )

    def moments(self):
        """Return E[s], E[s²] and E[s²/K]: with K workers present, the sum over them is s times their mean."""
        count = np.arange(self.workers + 1)
        ways = np.array([math.comb(self.workers, int(each)) for each in count], float)
        chance = ways * (1 - self.absent) ** count * self.absent ** (self.workers - count)
        scale = count / self.workers if self.divisor == "all" else (count > 0).astype(float)
        return chance @ scale, chance @ scale**2, chance @ (scale**2 / np.maximum(count, 1))


def worker(steps):
    """Return K and k: after some steps of SGD, a worker's E[e²] by direction is K @ V + k."""
    shrink = 1 - 2 * RATE * SPECTRUM + RATE**2 * SPECTRUM**2 * (1 + 1 / BATCH)
    step = np.diag(shrink) + RATE**2 / BATCH * np.outer(SPECTRUM, SPECTRUM)
    noise = RATE**2 / BATCH * SPECTRUM * NOISE**2
    matrix, shift = np.eye(D), np.zeros(D)
    for _ in range(steps):
        matrix, shift = step @ matrix, step @ shift + noise
    return matrix, shift


def predicted(outer, rounds):
    """Return the expected excess risk after 0, 1, ... rounds; lr and momentum give further axes."""
    lr, beta = np.broadcast_arrays(outer.lr, outer.momentum)
    lr, beta = lr[..., None], beta[..., None]
    new, old = (1 + beta, beta**2) if outer.nesterov else (1.0, beta)  # the step is lr (new Δ + old u)
    first, second, own = outer.moments()
    kept = (1 - RATE * SPECTRUM) ** H
    matrix, shift = worker(H)
    start, more = worker(1)
    v = np.broadcast_to(start @ np.ones(D) + more, np.broadcast_shapes(lr.shape, (D,)))
    c = u = np.zeros_like(v)  # E[E u], E[u²]
    found = [v @ SPECTRUM / 2]
    with np.errstate(over="ignore", invalid="ignore"):  # settings that diverge
        for _ in range(rounds):
            dd = second * (1 - kept) ** 2 * v + own * (v @ matrix.T + shift - kept**2 * v)
            de, du = first * (1 - kept) * v, first * (1 - kept) * c
            v, c, u = (
                v + lr**2 * (new**2 * dd + old**2 * u + 2 * new * old * du) - 2 * lr * (new * de + old * c),
                beta * c + de - lr * (new * beta * du + new * dd + old * beta * u + old * du),
                beta**2 * u + 2 * beta * du + dd,
            )
            found.append(v @ SPECTRUM / 2)
    return np.array(found)


def sampled(outer, rounds, lives, seed):
    """Return the excess risks (rounds + 1, lives) of independent lives, by plain numpy."""
    draw = generator(seed, WORLD, "two_phase.lives")
    root, heavy = np.sqrt(SPECTRUM), not outer.nesterov

    def trained(error, steps):
        for _ in range(steps):
            x = root * draw.standard_normal((*error.shape[:-1], BATCH, D))
            wrong = (x @ error[..., None])[..., 0] - NOISE * draw.standard_normal(x.shape[:-1])
            error = error - RATE / BATCH * (wrong[..., None, :] @ x)[..., 0, :]
        return error

    error, buffer = trained(np.full((lives, D), -1.0), 1), np.zeros((lives, D))
    found = [error**2 @ SPECTRUM / 2]
    for _ in range(rounds):
        moved = error[:, None] - trained(np.repeat(error[:, None], outer.workers, 1), H)
        present = draw.random((lives, outer.workers)) >= outer.absent
        count = outer.workers if outer.divisor == "all" else np.maximum(present.sum(1), 1)[:, None]
        mean = (moved * present[..., None]).sum(1) / count
        buffer = outer.momentum * buffer + mean
        error = error - outer.lr * (buffer if heavy else mean + outer.momentum * buffer)
        found.append(error**2 @ SPECTRUM / 2)
    return np.array(found)


def loss(model, x, y):
    """Return half the mean squared error of a batch."""
    return (model(x)[:, 0] - y).square().mean() / 2


def training(absent):
    """Return how models train; in each round after iteration 0, a rank is absent with this probability.

    An absent rank's inputs and targets are 0: it does not move, and its difference is 0.
    """

    def build(rng):
        model = torch.nn.Linear(D, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=RATE)

    def data(rng, rank, size):
        draw, round_draw = rng("two_phase.batches"), rng("two_phase.present")
        root, noise = np.sqrt(SPECTRUM).astype(np.float32), np.float32(NOISE)
        for round_ in itertools.count():
            present = np.float32(round_ == 0 or round_draw.random() >= absent)
            for _ in range(H if round_ else 1):
                x = root * draw.standard_normal((BATCH, D), dtype=np.float32)
                y = x.sum(1) + noise * draw.standard_normal(BATCH, dtype=np.float32)  # the true weights are 1
                yield torch.from_numpy(present * x), torch.from_numpy(present * y)

    return columnar.Training(build, loss, data)


def trained(outers, rounds, seeds):
    """Return for each outer optimizer the excess risks (rounds + 1, seeds) of live columns."""
    risks = [np.empty((rounds + 1, len(mine))) for mine in seeds]
    experiments = []
    for outer, own, mine in zip(outers, risks, seeds, strict=True):
        how = training(outer.absent)
        for place, seed in enumerate(mine):

            def keep(done, own=own, how=how, place=place):
                error = how.model(0).weight.detach().numpy()[0].astype(float) - 1
                own[done.iteration // H, place] = error**2 @ SPECTRUM / 2

            policy = OuterOptimizerPolicy(H, lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
            experiments.append(columnar.Experiment(
                policy=policy, ranks=outer.workers, iterations=H * rounds + 1, training=how, seed=seed, sample=1,
                on_round=keep,
            ))  # fmt: skip
    columnar.run_all(experiments)
    return risks


def study(context: Context) -> None:
    """Compare theory with live columns, then find the best outer momentum when workers are absent."""
    rounds = 4 if context.quick else 12
    outers = [
        Outer(workers, LR, momentum, nesterov)
        for workers in ((1, 4) if context.quick else (1, 4, 16, 64))
        for momentum, nesterov in KINDS.values()
    ]
    rates = (0.5,) if context.quick else (0.2, 0.5, 0.8)
    outers += [Outer(4 if context.quick else 16, LR, MOMENTUM, True, rate) for rate in rates]
    seeds = [list(range(1, 1 + seeds_of(context, outer.workers))) for outer in outers]
    cells = list(zip(outers, trained(outers, rounds, seeds), strict=True))
    lives = 200 if context.quick else 1000
    present = [replace(outer, divisor="present") for outer in outers if outer.absent]
    cells += [(outer, sampled(outer, rounds, lives, seed=1)) for outer in present]
    moved = best_momentum(ABSENT[::10] if context.quick else ABSENT)
    long = confirming(context, moved)
    rows = judged([*cells, *long])
    for row in rows:
        line = (
            "{workers:3} workers, {kind:10} {momentum:.2f}, absent {absent:.1f} (divided by {divisor}): "
            "{inside} of {checks} rounds inside, at most {most:.1f} of {limit:.1f} standard errors off; "
            "intervals ± {half:.0%}"
        )
        context.say(line.format(**row))
    context.save_table(rows, "oracle")
    context.save_table(moved, "momentum")
    state_oracle(context, rows)
    state_acceleration(context)
    state_momentum(context, moved, long)
    context.save(figure(rows, moved), "two_phase_theory")


def seeds_of(context, workers):
    """Return how many seeds a setting has: fewer with many workers, whose excess risk varies less."""
    return context.repeats or (32 if context.quick else {1: 256, 4: 128, 16: 64, 64: 32}[workers])


def judged(cells):
    """Return a row for each setting: means over seeds, with intervals by Bonferroni over all rounds and settings."""
    checks, rows = sum(len(samples) for _, samples in cells), []
    z = NormalDist().inv_cdf(1 - 0.05 / 2 / checks)
    for outer, samples in cells:
        count = samples.shape[1]
        limit = z + (z**3 + z) / (4 * (count - 1))  # Student's t, first order
        mean, error = samples.mean(1), samples.std(1, ddof=1) / math.sqrt(count)
        theory = predicted(outer, len(samples) - 1)
        off = np.abs(mean - theory) / error
        rows.append({
            "workers": outer.workers, "absent": outer.absent, "divisor": outer.divisor, "seeds": count,
            "kind": "plain" if not outer.momentum else "Nesterov" if outer.nesterov else "heavy ball",
            "momentum": outer.momentum,
            "inside": int((off <= limit).sum()), "checks": len(off), "most": float(off.max()), "limit": limit,
            "half": float(np.median(limit * error / theory)),
            "theory": theory.tolist(), "mean": mean.tolist(), "interval": (limit * error).tolist(),
        })  # fmt: skip
    return rows


def best_momentum(rates):
    """Return the best Nesterov momentum by workers, divisor, rounds and rate of absence, and the loss of the first."""
    rows = []
    for workers, divisor in itertools.product((4, 16, 64), ("all", "present")):
        first = {}
        for absent in rates.tolist():
            risks = predicted(Outer(workers, LR, BETAS, True, absent, divisor), LONG)
            for rounds in (LONG // 2, LONG):
                own = risks[rounds]
                place = int(np.nanargmin(own))
                kept = own[first.setdefault(rounds, place)] / own[place]
                rows.append({"workers": workers, "divisor": divisor, "rounds": rounds, "absent": absent,
                             "best": float(BETAS[place]), "kept": float(kept)})  # fmt: skip
    return rows


def tuned(outer, *rounds):
    """Return the least excess risk over the outer learning rate and momentum after some rounds, and where it is."""
    lrs = np.geomspace(0.2, 5, 40)
    betas = BETAS if outer.momentum else BETAS[:1]
    found, risks = [], predicted(replace(outer, lr=lrs[:, None], momentum=betas), max(rounds))
    for each in rounds:
        lr, beta = np.unravel_index(np.nanargmin(risks[each]), risks[each].shape)
        found.append((float(risks[each][lr, beta]), float(lrs[lr]), float(betas[beta])))
    return found


def state_oracle(context, rows):
    """State whether theory predicts live training."""
    full = [row for row in rows if not row["absent"]]
    held = {
        kind: all(row["inside"] == row["checks"] for row in full if row["kind"] == kind) for kind in KINDS
    }
    parts = {
        f"absent workers, divided by {divisor}": all(
            row["inside"] == row["checks"] for row in rows if row["absent"] and row["divisor"] == divisor
        )
        for divisor in ("all", "present")
    }
    context.claim(
        "A linear recursion of second moments gives the excess risk of two-phase optimizers on linear regression",
        source="this project's derivation, for the problem of arXiv 2603.26954",
        checks=held | parts,
        found=f"{sum(row['inside'] for row in rows)} of {sum(row['checks'] for row in rows)} means within their "
        f"intervals (95 %, Bonferroni; ± {np.median([row['half'] for row in rows]):.0%} in the median): "
        f"{', '.join(map(str, sorted({row['workers'] for row in full})))} workers, {D} dimensions, {H} inner steps",
    )


def state_acceleration(context):
    """State which outer step is best if its learning rate and momentum are tuned, by theory."""
    checks, told, ends = {}, [], (12, 24, LONG)
    for workers in (1, 16, 64):
        best = [tuned(Outer(workers, LR, momentum, nesterov), *ends) for momentum, nesterov in KINDS.values()]
        for rounds, (plain, *_), (heavy, *_), (nesterov, *_) in zip(ends, *best, strict=True):
            checks[f"{workers} workers, {rounds} rounds"] = nesterov < heavy < plain
            told.append(f"{plain / heavy:.1f} and {plain / nesterov:.1f}")
    context.claim(
        "Outer momentum accelerates, and most as Nesterov momentum",
        source="arXiv 2603.26954, abstract",
        checks=checks,
        found="the excess risk of plain outer steps is so many times heavy ball's and Nesterov's, each at its best "
        f"learning rate and momentum, for 1, 16, 64 workers, 12, 24, {LONG} rounds each: {'; '.join(told)}; theory "
        "alone",
    )


def confirming(context, moved):
    """Return live columns of 16 workers, absent at a rate of 0.8: the best momentum without absence, and with it."""
    count, rounds = (16, 4) if context.quick else (context.repeats or 64, LONG)
    at = {row["absent"]: row["best"] for row in moved if key_of(row) == (16, "all", LONG)}
    outers = [Outer(16, LR, at[absent], True, 0.8) for absent in (0.0, 0.8)]
    return list(zip(outers, trained(outers, rounds, [range(1, 1 + count)] * 2), strict=True))


def key_of(row):
    """Return the setting of a row of `best_momentum`, apart from the rate of absence."""
    return row["workers"], row["divisor"], row["rounds"]


def state_momentum(context, moved, long):
    """State at which rate of absence the best momentum changes, and whether live columns confirm it."""
    changes = {}
    for row in (row for row in moved if row["kept"] >= LEAST_LOSS):
        changes.setdefault(key_of(row), row["absent"])
    for key in dict.fromkeys(map(key_of, moved)):
        places = [
            f"{row['best']:.2f}"
            for row in moved
            if key_of(row) == key and row["absent"] in (0, 0.2, 0.4, 0.6, 0.8)
        ]
        context.say(
            f"{key[0]:3} workers, divided by {key[1]}, {key[2]} rounds: best momentum {', '.join(places)} at absence "
            f"0, 0.2 ... 0.8; that without absence costs {LEAST_LOSS - 1:.0%} from {changes.get(key, 'no rate')} on"
        )
    (old, before), (new, after) = long
    gain = before[-1] - after[-1]
    error = gain.std(ddof=1) / math.sqrt(len(gain))
    both = [
        tuned(Outer(workers, LR, MOMENTUM, True, rate, divisor), LONG)[0][2]
        for workers, divisor, rate in itertools.product((4, 16, 64), ("all", "present"), (0, 0.4, 0.8))
    ]
    rates = {
        divisor: [changes.get((workers, divisor, LONG), math.inf) for workers in (4, 16, 64)]
        for divisor in ("all", "present")
    }
    context.claim(
        "If workers are absent, the best outer momentum rises where the sum of differences is divided by the number of "
        "all workers, and stays where it is divided by the number present",
        source="this project's own question",
        checks={
            "all: that without absence costs 10 % below 0.8": max(rates["all"]) < 0.8,
            "present: it costs less than 10 % up to 0.8": min(rates["present"]) > 0.8,
            "live: the new one is better at 0.8": bool(gain.mean() > 1.96 * error),
        },
        found=f"{LONG} rounds, outer learning rate {LR}, 4, 16, 64 workers: the best momentum without absence costs "
        f"10 % from {listed(rates['all'])} on (all), {listed(rates['present'])} (present); live, 16 workers, 0.8, all: "
        f"excess risk {before[-1].mean():.4f} at {old.momentum:.2f}, {after[-1].mean():.4f} at {new.momentum:.2f} "
        f"({len(gain)} seeds); if the learning rate is tuned too, the best is {min(both):.2f} to {max(both):.2f} at 0, "
        "0.4, 0.8 (all, present)",
    )


def listed(rates):
    """Return rates as text."""
    return ", ".join("never" if each == math.inf else f"{each:g}" for each in rates)


def figure(rows, moved):
    """Draw theory against live columns, and the best momentum against the rate of absence."""
    from matplotlib.figure import Figure

    looks = style.looks(["1", "4", "16", "64"])
    with style.talk():
        drawn = Figure(figsize=(11, 8))
        axes = drawn.subplots(2, 2).flat
        for kind, ax in zip(KINDS, axes, strict=False):
            for row in (row for row in rows if row["kind"] == kind and not row["absent"]):
                look, at = looks[str(row["workers"])], range(row["checks"])
                ax.plot(at, row["theory"], color=look.colour, linewidth=1.2, label=f"M = {row['workers']}")
                ax.errorbar(
                    at, row["mean"], row["interval"], fmt=look.marker, color=look.colour, markersize=4
                )
            ax.set_yscale("log")
            ax.set_title(kind if kind == "plain" else f"{kind}, momentum {MOMENTUM}", loc="left")
            ax.set_xlabel("rounds")
            ax.set_ylabel("excess risk")
        axes = drawn.axes
        axes[0].legend(frameon=False)
        for workers, divisor in itertools.product((4, 16, 64), ("all", "present")):
            mine = [row for row in moved if key_of(row) == (workers, divisor, LONG)]
            axes[3].plot(
                [row["absent"] for row in mine], [row["best"] for row in mine], color=looks[str(workers)].colour,
                linestyle="-" if divisor == "all" else ":", label=f"M = {workers}, divided by {divisor}",
            )  # fmt: skip
        axes[3].set_title(f"Nesterov, {LONG} rounds", loc="left")
        axes[3].set_xlabel("probability that a worker is absent")
        axes[3].set_ylabel("best outer momentum")
        axes[3].set_ylim(bottom=0.7)
        axes[3].legend(frameon=False, fontsize=8, ncols=2)
        caption = (
            f"lines: theory · marks: live columns, 95 % intervals with Bonferroni's correction · {D} dimensions, {H} "
            f"inner steps, outer learning rate {LR}"
        )
        return style.frame(
            drawn, "Two-phase optimizers on linear regression: theory and live training", caption
        )
