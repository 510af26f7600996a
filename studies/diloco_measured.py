"""A measured cluster, predicted: DDP, LocalSGD and DiLoCo on four GPUs behind shaped links, from four measured points.

    spawnsim study diloco_measured [--quick]

`data/diloco_measured.csv` has 4 of 69 runs of the public data set Adnan082/diloco-measured (Apache-2.0): 4 nodes with
one L40S each, TCP, links shaped by `tc`, 30,846,720 float32 parameters, a blocking all-reduce of all of them after H
steps (DDP: the gradients, after each step). A platform is fitted to these points alone, and virtual ranks predict
all 69 runs. The fit has four numbers:

* `overhead_s`, the time of an exchange outside the wire: copies between GPU and host, additions, the outer step. It
  is assumed proportional to bytes: the platform stores it as the speed of reductions. Fitted to the links of 1 Gbit/s
  and above.
* `loss` and `lossless_rate`: below this rate, each halving of a link's rate costs another `loss` · ln 2 of the time
  on the wire. A shaper's queue holds a fixed number of milliseconds, so fewer bytes on a slow link, while TCP's
  window stays: the queue drops packets, and TCP waits and repeats. Fitted to the links below 1 Gbit/s. Two points
  cannot test this form; at the rates of the points it does not matter.
* `step_s`, the mean compute step according to the points' utilisation: compute over compute and exchanges. (Their
  median step is 0.7 % shorter; utilisation covers all steps, including the long ones.)

Not fitted, as all points have one size and one H: the latency, assumed to be 50 us (6 messages of a ring: 0.1 % at
most), and the headers of a packet of 9,001 bytes. (With packets of 1,500 bytes they would cost 4.6 %, and the
exchange at 1 Gbit/s took 1.8 % more than the bare bytes.)

`FIRST_S` is a term of its own for the first exchange of a run. Points have theirs among the warm-up steps, but with H
of 32 and above the warm-up has no exchange, so it counts, and with H of 128 it is the only one. It is measured on other
machines: 4 processes of gloo, 123 MB, links of 1 Gbit/s shaped by `tc` (benchmarks/shaped_gloo.py). In six starts the
first exchange took 4 to 33 ms more than the others, 12 ms in the median, of 1,494 ms. Connections are open by then, and
slow start costs nothing, since 10 segments exceed bandwidth times round trip. Buffers that a GPU's driver allocates at
first use are not in this term.

DDP is predicted as one all-reduce of all gradients. Its buckets change nothing, and a real step takes longer than
predicted: see docs/clusters.md.
"""

import csv
import math
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch

from spawnsim import AverageAllPolicy, PhantomArray
from spawnsim.comm import IN_PLACE
from spawnsim.models.collectives import Selection
from spawnsim.models.compute import Fixed
from spawnsim.models.network import Hockney, Switch
from spawnsim.models.platform import Platform, to_toml
from spawnsim.policies import OuterOptimizerPolicy
from spawnsim.policies.rules.cadence import Every
from spawnsim.study import Cell

RANKS, PARAMETERS = 4, 30_846_720
NBYTES = 4 * PARAMETERS
RING = 2 * (RANKS - 1) / RANKS  # share of the bytes that passes each link
ADDED = (RANKS - 1) / RANKS  # share of the bytes that each rank adds
GOODPUT = (9001 - 20 - 32) / (9001 + 14)  # IP, TCP with time stamps; `tc` also counts Ethernet's header
LATENCY_S = 50e-6
FIRST_S = 0.012  # in addition, for the first exchange of a run
LINKS_BPS = {"50m": 50e6 / 8, "200m": 200e6 / 8, "1g": 1e9 / 8, "5g": 5e9 / 8}
UNSHAPED_BPS = 9.53e9 / 8 / GOODPUT  # goodput between two nodes of one AWS placement group
H = (1, 8, 32, 128)
QUICK_H = (8,)
POLICIES = {
    "ddp": lambda h: None,
    "localsgd": lambda h: AverageAllPolicy(h, cadence=Every(h)),
    "diloco": OuterOptimizerPolicy.diloco,
}
REPEATS = {"ddp": 1, "localsgd": 1, "diloco": 3}


def main(comm, algorithm: Literal["ddp", "localsgd", "diloco"] = "diloco", h=8, steps=150):
    """Train `steps` steps; record each step's compute time, and its wait in an exchange."""
    model = torch.nn.Linear(PARAMETERS, 1, bias=False, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = POLICIES[algorithm](h)
    if algorithm == "diloco":
        policy.attach(model, comm)  # ranks begin with one model, before the measurement
    gradients = PhantomArray(PARAMETERS, "float32")
    for step in range(steps):
        with comm.compute() as block:
            pass
        began_s = comm.clock.now()
        if policy is None:
            comm.Allreduce(IN_PLACE, gradients)
        else:  # a round ends with its last step: steps are counted from 1
            model, optimizer, _ = policy(step + 1, model, optimizer, group=comm)
        comm.record(step=step, computed_s=block.seconds, sync_s=comm.clock.now() - began_s)


@dataclass(frozen=True)
class Fit:
    """The fitted numbers; see above. Seconds, bytes per second."""

    overhead_s: float
    loss: float
    lossless_rate: float
    step_s: float

    def wire_s(self, rate_Bps):
        """Return the seconds for which a ring keeps links of this rate busy."""
        lost = self.loss * max(math.log(self.lossless_rate / rate_Bps), 0.0)
        return RING * NBYTES / (GOODPUT * rate_Bps) * (1.0 + lost)

    def platform(self, link, rate_Bps):
        """Return the cluster with links of this rate."""
        link_of = Hockney(LATENCY_S, RING * NBYTES / self.wire_s(rate_Bps))
        return Platform(
            f"l40s-{link}",
            Switch(link_of, gamma_s_per_B=self.overhead_s / (ADDED * NBYTES)),
            step=Fixed(self.step_s),
            collectives=Selection(fixed=(("allreduce", "ring"),)),
            description=f"4 nodes of one L40S, TCP, links of {8e-6 * rate_Bps:g} Mbit/s; fitted on measured exchanges",
        )


def fit(points):
    """Return the fit to points: rate of the link (bytes/s) -> (sync_s, step_s), of one or more fast links.

    With only one slow link, the rate at which losses begin is unknown: the slowest fast link's rate is used.
    """
    plain = Fit(0.0, 0.0, 1.0, 0.0)
    fast = sorted(rate for rate in points if rate >= LINKS_BPS["1g"])
    slow = sorted(set(points) - set(fast))
    # Least squares of relative errors: a constant overhead weighs most where exchanges are short.
    weights = {rate: points[rate][0] ** -2 for rate in fast}
    left = sum(weights[rate] * (points[rate][0] - plain.wire_s(rate)) for rate in fast)
    overhead_s = left / sum(weights.values()) - 6 * LATENCY_S
    lost = {rate: (points[rate][0] - overhead_s - 6 * LATENCY_S) / plain.wire_s(rate) - 1.0 for rate in slow}
    loss, lossless_rate = 0.0, fast[0]
    if len(slow) == 1:
        loss = lost[slow[0]] / math.log(fast[0] / slow[0])
    elif slow:
        loss = (lost[slow[0]] - lost[slow[1]]) / math.log(slow[1] / slow[0])
        lossless_rate = slow[1] * math.exp(lost[slow[1]] / loss)
    return Fit(overhead_s, loss, lossless_rate, median(step_s for _, step_s in points.values()))


def read_points(path):
    """Return the measurements: rate of the link -> (sync_s, step_s), and the rows."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    points = {}
    for row in rows:
        used, sync_s = float(row["utilisation"]), float(row["sync_ms"]) / 1e3
        computed_s = used / (1 - used) * int(row["outer_steps"]) * sync_s
        points[LINKS_BPS[row["link"]]] = sync_s, computed_s / (int(row["steps"]) - int(row["warmup"]))
    return points, rows


def window(h, link):
    """Return the steps of a run and its warm-up, as in the points of its link; longer if that has no exchange."""
    steps, warmup = (80, 8) if link == "50m" else (150, 10)
    return (steps, warmup) if steps >= h else (warmup + h, warmup)


def combinations(quick):
    """Yield each run's algorithm, H, link."""
    for algorithm in ("ddp", "localsgd", "diloco"):
        for h in (1,) if algorithm == "ddp" else QUICK_H if quick else H:
            yield from ((algorithm, h, link) for link in LINKS_BPS)
    yield "ddp", 1, "none"


def prediction(run, h, warmup):
    """Return the median exchange (s), the utilisation after the warm-up, and the utilisation of endless training."""
    table = run.table
    own = table["rank"] == 0
    after = own & (table["step"] >= warmup)
    computed_s, sync_s = table["computed_s"][after], table["sync_s"][after].copy()
    exchanges = (table["step"][after] + 1) % h == 0
    step_s, endless_s = median(computed_s), median(sync_s[exchanges])
    sync_s[table["step"][after] + 1 == h] += FIRST_S
    share = computed_s.sum() / (computed_s.sum() + sync_s.sum())
    return median(sync_s[exchanges]), share, h * step_s / (h * step_s + endless_s)


def leave_one_out(points):
    """Yield each rate, and the relative error of its exchange predicted from the other points."""
    for rate in points:
        others = fit({other: points[other] for other in points if other != rate})
        predicted_s = others.wire_s(rate) + others.overhead_s + 6 * LATENCY_S
        yield rate, predicted_s / points[rate][0] - 1.0


def study(context):
    """Fit, run, and write the table of predictions."""
    points, measured = read_points(context.file("data/diloco_measured.csv"))
    found = fit(points)
    context.say(
        f"fit: {1e3 * found.overhead_s:.1f} ms an exchange in addition to the wire; {1e3 * found.step_s:.2f} "
        f"ms a step; below {8e-6 * found.lossless_rate:.0f} Mbit/s {math.log(2) * found.loss:.1%} more for "
        "each halving"
    )
    for rate, error in leave_one_out(points):
        context.say(f"{8e-6 * rate:5.0f} Mbit/s left out: predicted {error:+.1%} off")
    wanted = list(combinations(context.quick))
    context.out.mkdir(parents=True, exist_ok=True)
    files = {}
    for link, rate in (*LINKS_BPS.items(), ("none", UNSHAPED_BPS)):
        files[link] = context.out / f"l40s-{link}.toml"
        files[link].write_text(to_toml(found.platform(link, rate)), encoding="utf-8")
    cells = [
        Cell(
            file=context.file("diloco_measured.py"),
            ranks=RANKS,
            parameters={"algorithm": algorithm, "h": h, "steps": window(h, link)[0]},
            world={"platform": str(files[link]), "deadline_s": 300.0},
        )
        for algorithm, h, link in wanted
    ]
    rows = []
    for (algorithm, h, link), result in zip(wanted, context.sweep(cells), strict=True):
        sync_s, used, endless = prediction(result.run, h, window(h, link)[1])
        values = (f"{1e3 * sync_s:.2f}", f"{used:.5f}", f"{endless:.5f}")
        rows += [
            (algorithm, h, link, repeat, *values)
            for repeat in range(1 if link == "none" else REPEATS[algorithm])
        ]
    path = context.out / "diloco_measured_predictions.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("algorithm", "H", "link", "repeat", "sync_ms", "utilisation", "utilisation_endless"))
        writer.writerows(rows)
    context.say(f"table: {path} ({len(rows)} runs)")
    judge(context, measured, {(row[0], str(row[1]), row[2]): row[4:] for row in rows})


def judge(context, measured, predicted):
    """Report how far the measured points are from their predictions."""
    for row in measured:
        sync_ms, used, _ = map(float, predicted[row["algorithm"], row["H"], row["link"]])
        errors = sync_ms / float(row["sync_ms"]) - 1.0, used / float(row["utilisation"]) - 1.0
        context.say(
            f"{row['algorithm']} H {row['H']} {row['link']:>4}: sync {errors[0]:+.1%}, utilisation {errors[1]:+.1%}"
        )
