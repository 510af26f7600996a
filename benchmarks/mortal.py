"""The program that `real_kills.py` kills: it trains a small model under a policy, and recovers from deaths if allowed.

Each rank leaves a file for every stage that it reaches: the file name is the stage, its content is the process id.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

# The innermost launcher first, as mpiexec inherits torchrun's.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK")
RANK = next((os.environ[name] for name in RANKS if name in os.environ), "0")
MARKS = os.environ.get("MORTAL_MARKS", "")


def reach(stage: str) -> None:
    """Record that this rank has reached a stage."""
    if MARKS:
        draft = Path(MARKS) / f".{stage}-{RANK}"
        draft.write_text(str(os.getpid()))
        draft.rename(Path(MARKS) / f"{stage}-{RANK}")


reach("import")
faulthandler.register(signal.SIGUSR2, all_threads=True)  # to see where a rank hangs

import torch  # noqa: E402

from spawnsim.errors import RankFailed, Revoked, Timeout  # noqa: E402
from spawnsim.policies import (  # noqa: E402
    AsyncModelAveragePolicy,
    AsyncSelectiveAveragingPolicy,
    AsyncServerPolicy,
    AverageAllPolicy,
    DecentralizedAveragingPolicy,
    DecoupledDiLoCoPolicy,
    EASGDPolicy,
    EDiTPolicy,
    GossipPolicy,
    NoLoCoPolicy,
    OneRoundLatePolicy,
    OneSidedSelectiveAveragingPolicy,
    OuterOptimizerPolicy,
    PopulationBasedTrainingPolicy,
    ServerOptions,
    ServerRule,
    SPARTAPolicy,
    StreamingDiLoCoPolicy,
    WAGMAPolicy,
    Windows,
    Wiring,
    graphs,
)

POLICIES = {
    "average_all": lambda: AverageAllPolicy(2), "papa": lambda: AverageAllPolicy(2, momentum=0.99),
    "selective": lambda: AsyncSelectiveAveragingPolicy(
        None, 2, 0.3, cooldown=0, wiring=Wiring(deadline=1.0, shutdown_timeout_s=2.0)
    ),
    "one_sided": lambda: OneSidedSelectiveAveragingPolicy(
        None, None, 2, replacement_mode="worst_ratio", replacement_ratio=0.3, cooldown=0,
        windows=Windows(deadline=1.0, board_timeout_s=1.0, shutdown_timeout_s=2.0),
    ),
    "groups": lambda: DecentralizedAveragingPolicy(
        2, target_group_size=2, min_matchmaking_time=0.3, request_timeout=0.1, allreduce_timeout=1.0,
        step_timeout=1.0, shutdown_timeout=1.0,
    ),
    "by_clock": lambda: AsyncModelAveragePolicy("all", 100, 0, patience_s=1.0),
    "papa_by_clock": lambda: AsyncModelAveragePolicy("all", 100, 0, share=0.01, patience_s=1.0),
    "ad_psgd": lambda: AsyncModelAveragePolicy("random", 30, 0, patience_s=1.0),
    "gossip": lambda: GossipPolicy(2),
    "push_sum": lambda: GossipPolicy(2, graph=graphs.one_peer_exponential, push_sum=True, delay=1),
    "wagma": lambda: WAGMAPolicy(2, group_size=2, sync_every=3, patience_s=1.0),
    "server": lambda: AsyncServerPolicy(ServerOptions(ServerRule(0.5, 0.9)), steps=2, patience_s=1.0),
    "fedavg": lambda: OuterOptimizerPolicy.fedavg(2), "bmuf": lambda: OuterOptimizerPolicy.bmuf(2),
    "slowmo": lambda: OuterOptimizerPolicy.slowmo(2), "diloco": lambda: OuterOptimizerPolicy.diloco(2),
    "muloco": lambda: OuterOptimizerPolicy.muloco(2), "sparseloco": lambda: OuterOptimizerPolicy.sparseloco(2),
    "demo": lambda: OuterOptimizerPolicy.demo(0.01),
    "streaming": lambda: StreamingDiLoCoPolicy(4, fragments=2),
    "eager": lambda: OneRoundLatePolicy.eager(2), "co2": lambda: OneRoundLatePolicy.co2(2),
    "decoupled": lambda: DecoupledDiLoCoPolicy(4, fragments=2),
    "edit": lambda: EDiTPolicy(2), "noloco": lambda: NoLoCoPolicy(2), "easgd": lambda: EASGDPolicy(2),
    "sparta": lambda: SPARTAPolicy(2), "population": lambda: PopulationBasedTrainingPolicy(2),
}  # fmt: skip
FAILED = (RankFailed, Revoked, Timeout)
torch.optim.SGD([torch.zeros(1)])  # the first optimizer loads the compiler: 1.3 s of processor time per rank


class Plain(torch.nn.Module):
    """Three tensors of two dtypes, one of them above any eager threshold."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((60_000,), float(value)))
        self.bias = torch.nn.Parameter(torch.full((7,), float(value)))
        self.register_buffer("seen", torch.full((3,), value))


def main(comm, policy="average_all", iterations=30, meet=4):
    reach("begin")
    averager, model = POLICIES[policy](), Plain(comm.rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group, iteration = comm, 0
    while iteration < iterations:
        try:
            if iteration == 0:
                group.Barrier()
            if iteration == iterations // 3:
                reach("loop")
            with comm.compute(0.02):
                time.sleep(0.02)
            metric = float((comm.rank * 7 + iteration) % 5)
            model, optimizer, _ = averager(iteration, model, optimizer, local_metric=metric, group=group)
            if iteration % meet == 0:
                group.Barrier()
            comm.record(iteration=iteration, size=group.size)
            iteration += 1
        except FAILED as error:
            reach("recovery")
            comm.record.event("caught", error=repr(error)[:400])
            found = group.recover(iteration)
            group, iteration = found.comm, found.step
    reach("shutdown")
    averager.shutdown()
    numbers = torch.cat([each.detach().double().reshape(-1) for each in model.state_dict().values()])
    comm.record.event("done", whole=bool((numbers >= -1e-6).all() and (numbers <= comm.size).all()))
    reach("end")


reach("join")
