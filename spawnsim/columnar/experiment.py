"""An experiment over columns: a policy, its ranks, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spawnsim import random
from spawnsim.columnar.durations import STREAMS, Streams
from spawnsim.columnar.models import Quality
from spawnsim.columnar.records import Round
from spawnsim.columnar.training import Training
from spawnsim.errors import ParameterError, UnsupportedError
from spawnsim.models.faults import Crash, FaultPlan, Pause, SlowDown
from spawnsim.models.network.cost import Floats
from spawnsim.models.platform import load_platform
from spawnsim.policies import SpawnPolicy
from spawnsim.record.recorder import document
from spawnsim.scenario import available_B

if TYPE_CHECKING:
    from spawnsim.models.compute import ComputeModel
    from spawnsim.models.platform import Platform

SAMPLE = 256  # ranks whose rows are kept
LEAST_B = 500  # bytes that a rank takes
OnRound = Callable[[Round], None]
CIRCUMSTANCES = (
    "ranks", "iterations", "model_nbytes", "platform", "stragglers", "faults", "seed", "compute", "streams", "mtbf_s",
    "detection_s", "sample",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run over columns.

    Args:
        policy: a policy with the same parameters as on virtual ranks; the run does not change it.
        ranks: number of ranks.
        iterations: number of iterations of each rank.
        model_nbytes: size of one model on the wire; None (only with `training`): the size of the trained model.
        quality: numbers in place of models; None: `RandomWalk()`.
        training: models that train, instead of `quality`.
        platform: name, TOML file or object; None: the default platform.
        stragglers: a specification such as "lognormal:0.3", or an object; None: the platform's.
        faults: a fault plan of crashes, pauses and slow-downs; None: no faults.
        mtbf_s: mean time between failures of one rank, in seconds: it dies for good at a random time; None: never.
        detection_s: seconds that the living ranks wait, after all have arrived, when they find that a rank has died.
        seed: seed of every random stream, at least 0.
        compute: compute time of a rank in an iteration; None: the platform's.
        streams: "ranks": the draws of an ordinary run; "bulk": draws for all ranks at once, faster for a million ranks.
        sample: number of ranks, evenly spaced, that have rows and replacement events in the run.
        on_round: called with each round; not for rounds before the checkpoint of a resumed run.
        out: run folder to write.
        overwrite: whether a run in `out` may be overwritten.
        checkpoint_every: save the models in `out` each time after so many iterations, at the next turn; None: never.
        resume: continue from the newest checkpoint in `out`; without one, start.

    Raises:
        ParameterError: a parameter is invalid.
    """

    policy: SpawnPolicy
    ranks: int
    iterations: int
    model_nbytes: int | None = None
    quality: Quality | None = None
    training: Training | None = None
    platform: Any = None
    stragglers: Any = None
    faults: Any = None
    mtbf_s: float | None = None
    detection_s: float = 0.0
    seed: int = 0
    compute: Any = None
    streams: Streams = "ranks"
    sample: int = SAMPLE
    on_round: OnRound | None = None
    out: str | Path | None = None
    overwrite: bool = False
    checkpoint_every: int | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("iterations", 1), ("seed", 0), ("sample", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ParameterError(f"{name}={value!r}: give an integer of at least {least}")
        if self.ranks * LEAST_B > available_B():
            raise ParameterError(
                f"ranks={self.ranks:,}: columns take about {LEAST_B} bytes a rank, "
                f"{self.ranks * LEAST_B / 1e9:,.0f} GB, and {available_B() / 1e9:,.1f} GB are available: give fewer"
            )
        if self.streams not in STREAMS:
            raise ParameterError(f"streams={self.streams!r}: choose one of {', '.join(STREAMS)}")
        if self.training is not None and not isinstance(self.training, Training):
            raise ParameterError(f"training={self.training!r}: give a spawnsim.columnar.Training")
        if self.training is not None and self.quality is not None:
            raise ParameterError("quality and training: give one, numbers or models")
        every = self.checkpoint_every
        if every is not None and (type(every) is not int or every < 1):
            raise ParameterError(f"checkpoint_every={every!r}: give an integer of at least 1")
        if (every or self.resume) and (self.training is None or self.out is None):
            raise ParameterError(
                "columnar: checkpoints keep models that train in the run folder: give both, or neither "
                "checkpoint_every nor resume"
            )
        if self.mtbf_s is not None and not self.mtbf_s > 0:
            raise ParameterError(f"mtbf_s={self.mtbf_s!r}: give seconds above 0, of one rank")
        if not self.detection_s >= 0:
            raise ParameterError(f"detection_s={self.detection_s!r}: give seconds of at least 0")

    def parts(self) -> tuple[Platform, FaultPlan, ComputeModel]:
        platform = load_platform(self.platform)
        platform.check(self.ranks)
        if platform.cores is not None and platform.crowded(self.ranks):
            raise UnsupportedError(
                f"columnar: {self.ranks} ranks share {platform.cores.count} cores of a node: the end of a block "
                "then depends on all other ranks; run it on virtual ranks, or leave cores out of the platform"
            )
        if platform.network.gamma_of:
            raise UnsupportedError(
                "columnar: reductions with a speed for each dtype have no form over columns: give one speed, or run it "
                "on virtual ranks"
            )
        plan = FaultPlan.parse(self.faults, seed=self.seed, ranks=self.ranks, network=platform.network)
        plan.check(self.ranks)
        other = [fault.kind for fault in plan.faults if not isinstance(fault, (Crash, Pause, SlowDown))]
        if other:
            raise UnsupportedError(
                f"columnar: a fault of kind {other[0]!r} affects single messages, or restarts a program: columns "
                "support crash, pause and slow; run it on virtual ranks"
            )
        return platform, plan, platform.compute_model(self.compute, self.stragglers)

    def deaths_s(self, plan: FaultPlan) -> Floats:
        """Return the time of death of each rank; inf: never."""
        deaths_s = np.full(self.ranks, np.inf)
        if self.mtbf_s is not None:
            stream = random.generator(self.seed, random.WORLD, "columnar.deaths")
            deaths_s = self.mtbf_s * stream.standard_exponential(self.ranks)
        for fault in plan.faults:
            if isinstance(fault, Crash):
                deaths_s[fault.rank] = min(deaths_s[fault.rank], fault.at_s)
        return deaths_s

    def described(self) -> dict[str, Any]:
        return {name: document(getattr(self, name)) for name in CIRCUMSTANCES}
