"""A program for virtual and real ranks alike: average three times in groups, print the values and the groups."""

import json
import os
import sys

import numpy as np
import torch

from spawnsim.policies.averaging import DecentralizedAverager, Exponential, Grid, RandomGroups

RULES = {"grid": Grid(), "random": RandomGroups(2), "exponential": Exponential(), "dynamic": None}

CASES = [("grid", "none"), ("random", "uniform8"), ("exponential", "float16"), ("dynamic", "none")]


def main(comm, folder=""):
    """Average by each rule; write what came out to a file of this rank."""
    found = [once(comm, rule, compression, tag) for tag, (rule, compression) in enumerate(CASES, 7101)]
    with open(os.path.join(folder, f"{comm.Get_rank()}.json"), "w") as file:
        json.dump(found, file)


def once(comm, rule, compression, tag):
    """Return the groups and the values after the rounds of one rule."""
    values = [
        torch.from_numpy(np.random.default_rng(comm.Get_rank()).normal(size=1000)),
        torch.arange(5) * comm.Get_rank(),
    ]
    comm.Barrier()  # the search has a time limit: nobody comes late to it
    averager = DecentralizedAverager(
        values, comm, start=False, prefix="p", matchmaking=RULES[rule],
        min_matchmaking_time=2.0 if rule == "dynamic" else 10.0,
        request_timeout=1.5, part_size_bytes=1000, compression=compression, tag=tag,
    )  # fmt: skip
    groups = [
        sorted(averager.step(gather=comm.Get_rank()) or {}) for _ in range(1 if rule == "dynamic" else 3)
    ]
    averager.serve(0.2)
    averager.shutdown()
    return {"groups": groups, "values": [value.tolist() for value in values]}


if __name__ == "__main__":
    from spawnsim.real.mpi import guarded, world

    ranks = world(seed=7)
    with guarded(ranks):
        main(ranks, *sys.argv[1:])
