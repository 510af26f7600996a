"""Policies on ranks that die, for real and on virtual ranks alike: `main(comm, case=…, at=victim)`, or several in turn.

Rank r's first model is r in every number, so any mixture lies between 0 and the number of ranks. The iteration in which
the victim dies is drawn.
"""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace

import torch
from survivors import FAILED, die, in_turn, real

from spawnsim.policies import (
    AsyncSelectiveAveragingPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    OneSidedSelectiveAveragingPolicy,
    Windows,
    Wiring,
)

ITERATIONS, MEET_EVERY = 24, 4
TEMPO = {"deadline": 0.5, "shutdown_timeout_s": 1.0}


class Mixed(torch.nn.Module):
    """Tensors of three dtypes, small and large: several sums to one averaging."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((60_000,), value))
        self.bias = torch.nn.Parameter(torch.full((7,), value))
        self.log_z = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))
        self.register_buffer("seen", torch.full((3,), int(value)))


def model_of(value):
    """Return a model of one number, and what policies see of an optimizer: torch's own takes seconds to load."""
    model = Mixed(float(value))
    return model, SimpleNamespace(param_groups=[{"params": list(model.parameters())}], state={})


POLICIES = {
    "average_all": lambda: AverageAllPolicy(2),
    "selective": lambda: AsyncSelectiveAveragingPolicy(None, 2, 0.3, cooldown=0, wiring=Wiring(**TEMPO)),
    "one_sided": lambda: OneSidedSelectiveAveragingPolicy(
        None, None, 2, replacement_mode="worst_ratio", replacement_ratio=0.3, cooldown=0,
        windows=Windows(deadline=0.5, board_timeout_s=0.5, shutdown_timeout_s=1.0),
    ),
    "groups": lambda: DecentralizedAveragingPolicy(
        2, target_group_size=2, min_matchmaking_time=0.2, request_timeout=0.1, allreduce_timeout=0.5, step_timeout=0.5
    ),
}  # fmt: skip


def main(comm, case="average_all", at=0):
    """Run one of the cases, or several."""
    in_turn(comm, CASES, case, at)


def outlive(policy, comm, victim):
    """Train until all iterations are over, whoever dies."""
    when = random.Random(int(victim)).randrange(2, ITERATIONS - 8)
    return train(
        comm, policy(), lambda iteration: iteration == when and comm.rank == int(victim) and die(comm)
    )


def train(comm, policy, act):
    """Take all iterations with a policy; all meet now and then, and recover from a death."""
    model, optimizer = model_of(comm.rank)
    group, iteration, rank, busy = comm, 0, comm.rank, 0
    while iteration < ITERATIONS:
        try:
            act(iteration)
            with comm.compute(0.01):
                pass
            comm.clock.sleep(0.005)
            metric = float((rank * 7 + iteration) % 5)
            model, optimizer, info = policy(iteration, model, optimizer, local_metric=metric, group=group)
            after = group.size < comm.size
            busy += after and bool(info["averaged_this_iteration"] or info["is_replaced"] or info["bytes"])
            if iteration % MEET_EVERY == 0:
                group.Barrier()
            iteration += 1
        except FAILED:
            found = group.recover(iteration)
            group, iteration = found.comm, found.step
    policy.shutdown()
    numbers = torch.cat([t.detach().double().reshape(-1) for t in model.state_dict().values()])
    whole = bool((numbers >= 0).all() and (numbers <= comm.size).all())
    comm.record(size=group.size, iteration=iteration, whole=whole, busy=busy)
    return group


def unchanged(comm, before=0):
    """A rank dies before, or between, the sums of an averaging: the others' models are what they were."""
    policy, victim = AverageAllPolicy(1), 2
    model, optimizer = model_of(comm.rank)
    model, optimizer, _ = policy(0, model, optimizer, group=comm)  # the first one checks and builds buffers
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(comm.rank)
    was = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if comm.rank == victim:
        _die_in_sum(comm, before)
    try:
        policy(1, model, optimizer, group=comm)
        ended = "averaged"
    except FAILED as error:
        ended = type(error).__name__
    same = all(torch.equal(tensor, was[name]) for name, tensor in model.state_dict().items())
    found = comm.recover(1)
    model, optimizer, info = policy(1, model, optimizer, group=found.comm)
    found.comm.record(
        size=found.comm.size, ended=ended, same=same, averaged=bool(info["averaged_this_iteration"]),
        mean=float(model.log_z.detach()), first=float(model.weight.detach()[0]),
    )  # fmt: skip
    found.comm.Barrier()
    return found.comm


def _die_in_sum(comm, number):
    """Let this rank die as it comes to its sum of this number."""
    if not real(comm):
        if number == 0:
            die(comm)
        return
    sums = iter(range(100))
    theirs = comm.Allreduce

    def dying(*args):
        if next(sums) == number:
            die(comm)
        theirs(*args)

    comm.Allreduce = dying


def donor(comm):
    """Ranks die while they give: whoever waits for their snapshot goes on without."""
    policy = AsyncSelectiveAveragingPolicy(
        None, 2, 0.3, cooldown=0, wiring=Wiring(part_nbytes=20_000, **TEMPO)
    )

    def act(iteration):
        exchange = policy._exchange
        if comm.rank != 1 or exchange is None or not real(comm):
            return
        sends = exchange.endpoint.send_packed

        def send(to, message):
            if message.size > 10_000:
                sends(to, message)
                die(comm)
            return sends(to, message)

        exchange.endpoint.send_packed = send

    return train(comm, policy, act)


CASES = {
    **{name: partial(outlive, policy) for name, policy in POLICIES.items()},
    "before": unchanged,
    "between": lambda comm: unchanged(comm, 1),
    "later": lambda comm: unchanged(comm, 2),
    "donor": donor,
}
