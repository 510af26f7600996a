"""Averaging in groups while ranks leave and join: group sizes, and how fast the ranks agree.

    spawnsim study groups [--quick] [--jobs N]
    spawnsim run studies/groups.py --ranks 1024 --platform ethernet-10g --straggler lognormal:0.3 --seed 7 --out runs/g

Every rank holds a few numbers and learns nothing, so that only agreement is visible. In each round a share of the
ranks leaves; these ranks return a round later, and take over the state of a peer.
"""

import math
from typing import Literal

import torch

from spawnsim.policies.averaging import DecentralizedAverager, Exponential, Grid, RandomGroups

STATIC = {"grid": lambda size: Grid(), "random": RandomGroups, "exponential": lambda size: Exponential()}


def main(
    comm,
    matchmaking: Literal["dynamic", "grid", "random", "exponential"] = "dynamic",
    group_size=16,
    rounds=5,
    leaving=0.05,
    period_s=5.0,
    numbers=8,
):
    """Average once per period; record the group's size, the wait, and the values."""
    values = torch.from_numpy(comm.rng("values").normal(size=numbers))
    averager = join(comm, values, matchmaking, group_size)
    for round_ in range(rounds):
        if round_ % 2 == 1 and comm.rng("leaving").random() < leaving:
            averager.shutdown(0.0)
            comm.clock.sleep(max((round_ + 1.2) * period_s - comm.clock.now(), 0.0))
            averager = join(comm, values, matchmaking, group_size)
            state = averager.load_state_from_peers(timeout=period_s / 2)
            if state is not None:
                values.copy_(state[1][0])
            comm.record(round=round_, rejoined=float(state is not None))
            continue
        with comm.compute(0.2 * period_s):
            pass
        began_s, start_s = comm.clock.now(), (round_ + 0.5) * period_s
        averager.round = round_
        gathered = averager.step(
            scheduled_time=start_s, timeout=max((round_ + 0.9) * period_s - began_s, 1e-3)
        )
        waited_s = comm.clock.now() - began_s
        late_s = comm.clock.now() - (round_ + 0.9) * period_s
        comm.record(
            round=round_, group_size=len(gathered or ()), wait_s=waited_s, late_s=late_s, value=float(values[0]),
            mean=float(values.mean()), whole=float(gathered is not None and gathered.complete),
        )  # fmt: skip
        averager.serve(max((round_ + 1) * period_s - comm.clock.now(), 0.0))
    averager.shutdown(0.0)


def join(comm, values, matchmaking, group_size):
    """Start averaging, with a separate group key."""
    width = max(math.ceil(math.log2(comm.Get_size() / group_size)), 0)
    bits = format(comm.Get_rank() * 2**width // comm.Get_size(), f"0{width}b") if width else ""
    return DecentralizedAverager(
        [values], comm, start=False, prefix="study", target_group_size=group_size, initial_group_bits=bits,
        matchmaking=None if matchmaking == "dynamic" else STATIC[matchmaking](group_size),
        min_matchmaking_time=1.0, request_timeout=0.5, sender_timeout=0.5, reducer_timeout=1.0,
    )  # fmt: skip


def study(context):
    """Run each matchmaking with and without ranks that leave; draw group sizes and contraction."""
    from spawnsim.plots import groups  # ranks that run `main` need no figures

    cells = context.grid(
        "groups.py", ranks=[64 if context.quick else 1024], seeds=[7],
        over={"matchmaking": ["dynamic", "grid", "random"], "leaving": [0.0, 0.05]},
        platform="ethernet-10g", stragglers="lognormal:0.3",
    )  # fmt: skip
    for result in context.sweep(cells):
        name = f"{result.cell.parameters['matchmaking']}-{result.cell.parameters['leaving']:g}"
        context.save(groups.figure(result.run, name), f"groups-{name}")
        found = groups.contraction(result.run.table)
        context.say(
            f"{name:14} variance after each round: " + ", ".join(f"{each:.2e}" for each in found.variance)
        )
