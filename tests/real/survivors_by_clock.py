"""Averaging by the clock on ranks that die or stop, real and virtual ones alike: `main(comm, case=…, at=victim)`.

Rank r's first model is r in every number, so any mixture lies between 0 and the number of ranks.
"""

from __future__ import annotations

from survivors import FAILED, alive, die, in_turn, real, stop
from survivors_training import model_of

from spawnsim.policies import AsyncModelAveragePolicy

ITERATIONS, MEET_EVERY, AFTER = 60, 6, 5
PACE = {"sync_interval_ms": 40, "patience_s": 0.4}
ENOUGH_S, TOO_LATE_S = 1.0, 25.0  # when the victim acts; when the others give up waiting for averagings


def numbers(model):
    """Return all numbers of a model."""
    return [float(x) for tensor in model.state_dict().values() for x in tensor.double().reshape(-1)[:3]]


class Everybody:
    """Whether all ranks but the dead have had enough: each tells the others, and stays until it has heard from all."""

    def __init__(self, comm, dead):
        self.comm, self.told = comm, False
        self.others = sorted(set(range(comm.size)) - dead - {comm.rank})
        self.awaited = set(self.others)

    def had_enough(self, enough):
        """Tell the others, once; return whether all have."""
        if enough and not self.told:
            self.told = True
            for rank in self.others:
                self.comm.isend(None, dest=rank, tag=98)
        for rank in sorted(self.awaited):
            if self.comm.Iprobe(source=rank, tag=98):
                self.comm.recv(source=rank, tag=98)
                self.awaited.discard(rank)
        return self.told and not self.awaited


def goes_on(comm, victim, act, dead=()):
    """Train without any recovery while a rank does something; all that live average with each other afterwards."""
    policy, (model, optimizer) = AsyncModelAveragePolicy(**PACE), model_of(comm.rank)
    everybody, began_s, iteration, mark, acted = Everybody(comm, set(dead)), comm.clock.now(), 0, None, False
    while comm.clock.now() - began_s < TOO_LATE_S:
        with comm.compute(0.01):
            pass
        comm.clock.sleep(0.005)
        policy(iteration, model, optimizer, group=comm)
        iteration += 1
        passed_s = comm.clock.now() - began_s
        if comm.rank == victim and passed_s > ENOUGH_S and not acted:
            acted = True
            act(comm)
        if mark is None and passed_s > ENOUGH_S + 0.3:
            mark = policy.num_averagings
        if everybody.had_enough(mark is not None and policy.num_averagings - mark >= AFTER):
            break
    whole = all(0 <= x <= comm.size for x in numbers(model))
    comm.record(before=mark or 0, after=policy.num_averagings - (mark or 0), whole=whole)
    policy.shutdown()
    return alive(comm)


def dies(comm, at):
    """A rank dies; nobody recovers, and nobody need to."""
    return goes_on(comm, int(at), die, dead={int(at)})


def stops(comm, at):
    """A rank stands still for longer than the others are patient, and comes back."""
    return goes_on(comm, int(at), lambda comm: stop(comm, wake_s=1.5))


def recovers(comm, at, background=True, warmup_steps=0):
    """A rank dies, and the others recover, with a task that averages in the background; it goes on."""
    policy = AsyncModelAveragePolicy(**PACE, background=background, warmup_steps=warmup_steps)
    model, optimizer = model_of(comm.rank)
    group, iteration, rank, mark = comm, 0, comm.rank, None
    while iteration < ITERATIONS:
        try:
            if rank == int(at) and iteration == ITERATIONS // 3:
                die(comm)
            with policy.weights(), comm.compute(0.01):
                pass
            comm.clock.sleep(0.02)
            policy(iteration, model, optimizer, group=group)
            if iteration % MEET_EVERY == 0:
                group.Barrier()
            iteration += 1
        except FAILED:
            found = group.recover(iteration)
            group, iteration, mark = found.comm, found.step, policy.num_averagings
    whole = all(0 <= x <= comm.size for x in numbers(model))
    after = policy.num_averagings - (mark or 0)
    policy.shutdown()
    comm.record(size=group.size, iteration=iteration, recovered=mark is not None, after=after, whole=whole)
    return group


CASES = {each.__name__: each for each in (dies, stops, recovers)}


def main(comm, case="dies", at="0"):
    """Run one of the cases, or several."""
    assert real(comm) or case != "stops"
    in_turn(comm, CASES, case, at)
