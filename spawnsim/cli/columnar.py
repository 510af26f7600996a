"""`spawnsim columnar POLICY`: a policy on very many ranks, each a row of arrays, with or without models that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spawnsim import columnar
from spawnsim.backends import BACKENDS
from spawnsim.cli import error_text, exit_code
from spawnsim.cli.declaring import (
    Command,
    Json,
    Out,
    Overwrite,
    PlatformName,
    Quiet,
    Ranks,
    Seed,
    Straggler,
    argument,
    flag,
    option,
)
from spawnsim.cli.run import print_result
from spawnsim.columnar.experiment import SAMPLE
from spawnsim.columnar.named import GRAPHS, ITERATIONS, MODEL, NONE, OF_METRIC, POLICIES, experiment
from spawnsim.columnar.shards import use_own_gpu
from spawnsim.errors import SpawnsimError
from spawnsim.options import parameters
from spawnsim.real.launch.launchers import detect_launcher, require_fit
from spawnsim.record.folder import named, require_own
from spawnsim.run.process_setup import stoppable

if TYPE_CHECKING:
    from spawnsim.comm import Comm
    from spawnsim.run import Run


@dataclass(kw_only=True)
class Columnar(Command):
    """Time a policy on up to millions of ranks, each a row of arrays. Ranks exchange numbers in place of
    models, or (--train) models that train. docs/columnar.md lists the supported policies and limits.
    """

    examples = (
        "spawnsim columnar average -n 1000000 --straggler lognormal:0.3 --set average_every=10",
        "spawnsim columnar selective -n 1000000 --set streams=bulk --set mtbf=50000h --set detection=30s",
    )
    policy: str = argument(
        f"{', '.join([NONE, *POLICIES])} (graphs: --set graph={', '.join(GRAPHS)}); or several in turn, such as "
        "selective+average",
        "POLICY",
        names=lambda: [NONE, *POLICIES],
    )
    ranks: Ranks
    model: str | None = option(
        f"size of one transmitted model, such as '2 GB'; default: {MODEL}, or the size of the --train model",
        "BYTES",
    )
    train: Path | None = option(
        "of Python, that defines build(rng), loss(model, *batch), data(rng, rank, size), perhaps score(model); or "
        "training(), which returns a columnar.Training",
        "FILE",
    )
    set: Sequence[str] = option(
        f"a parameter of the policy, or of training(); of the random walk of the metric: {', '.join(OF_METRIC)}; or "
        f"iterations={ITERATIONS}, "
        f"sample={SAMPLE} (ranks with rows and events), streams=ranks (draws of an ordinary run) or bulk (for all "
        "ranks at once), mtbf=50000h (mean time between failures of one rank), detection=30s (how long the other ranks "
        "wait until they notice a death; default: 0 s), checkpoint_every=10 (iterations); repeatable",
        "NAME=VALUE",
        default=(),
    )
    platform: PlatformName = None
    straggler: Straggler = None
    faults: str | None = option("crashes, pauses and slow-downs, such as crash:17@3.5s", "PLAN")
    compute: str | None = option("of an iteration, such as 10ms; default: the platform's", "S")
    seed: Seed = 0
    out: Out = None
    overwrite: Overwrite = False
    resume: bool = flag("continue from the newest checkpoint in --out DIR; without one, start")
    json: Json = False
    quiet: Quiet = False

    def __call__(self) -> int:
        with processes() as comm:
            run = self._run(comm)
            first = comm is None or comm.Get_rank() == 0
        if first:
            print_result(run, out=self.out, as_json=self.json, quiet=self.quiet)
        return 0

    def _run(self, comm: Comm | None) -> Run:
        if self.out is not None and not (self.overwrite or self.resume):
            require_own(named(self.out))
        asked = experiment(
            self.policy,
            parameters(self.set),
            file=self.train,
            model=self.model,
            ranks=self.ranks,
            platform=self.platform,
            stragglers=self.straggler,
            faults=self.faults,
            seed=self.seed,
            compute=self.compute,
            out=self.out,
            overwrite=self.overwrite,
            resume=self.resume,
        )
        with stoppable() if comm is None else nullcontext():
            return columnar.run_all([asked], comm=comm)[0]


@contextmanager
def processes() -> Iterator[Comm | None]:
    """Give the communicator of the processes that a launcher has started; None: this is the only one.

    An error in the block ends all of them, with one message.
    """
    here = detect_launcher()
    if here.size == 1:
        yield None
        return
    backend = BACKENDS["torch" if here.launcher == "torchrun" else "mpi"]
    if backend.launcher == "mpiexec":
        require_fit(here)
    loaded = backend.load()
    use_own_gpu()
    with loaded.guarded(loaded.world()) as comm:
        try:
            yield comm
        except SpawnsimError as error:
            comm.runtime.abort.end(error_text(error), status=exit_code(error), summary=str(error))
