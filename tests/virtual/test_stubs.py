"""`--stub NAME`: a tracker that is not installed; its scalars are recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spawnsim import cli
from spawnsim.errors import TRACKERS, ParameterError
from spawnsim.run import Run, run

SCRIPT = "from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n"


def _run(folder: Path, text: str, *stubs: str) -> Run:
    path = folder / "program.py"
    path.write_text(SCRIPT + text)
    return run(path, 2, options={"stubs": stubs, "prefix": False})


def _columns(found: Run, *names: str) -> list[list[float]]:
    return [np.asarray(found.table[name]).tolist() for name in names]


CALLS = {
    "wandb": "import wandb\nwandb.init(project='x')\nwandb.log({'loss': rank + 0.5}, step=3)",
    "trackio": "import trackio as t\nwith t.init() as run:\n    run.log({'loss': rank + 0.5, 'text': 'x'}, step=3)",
    "swanlab": "from swanlab import log\nlog({'loss': np.float32(rank + 0.5)}, 3)",
    "mlflow": "import mlflow\nwith mlflow.start_run():\n    mlflow.log_metric('loss', rank + 0.5, step=3)",
    "comet_ml": "from comet_ml import Experiment\nExperiment('key').log_metrics({'loss': rank + 0.5}, step=3)",
    "neptune": "import neptune\nneptune.init_run()['loss'].append(rank + 0.5, step=3)",
    "aim": "from aim import Run\nRun(repo='.').track(rank + 0.5, name='loss', step=3, context={'subset': 'a'})",
    "tensorboardX": "from tensorboardX import SummaryWriter\nSummaryWriter('x').add_scalar('loss', rank + 0.5, 3)",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter as W\nW().add_scalar('loss', rank + 0.5, 3)",
    "dvclive": "from dvclive import Live\nwith Live() as live:\n    live.log_metric('loss', rank + 0.5, step=3)",
    "clearml": "from clearml import Task as T\nT.init().get_logger().report_single_value('loss', rank + 0.5)",
}


@pytest.mark.parametrize("name", CALLS)
def test_scalars_are_rows_of_the_run(tmp_path: Path, name: str) -> None:
    """In the column of their name, with the step as `iteration`; other values are dropped."""
    found = _run(tmp_path, f"import numpy as np\n{CALLS[name]}\n", name)
    assert _columns(found, "loss") == [[0.5, 1.5]]
    if name != "clearml":
        assert _columns(found, "iteration") == [[3, 3]]
    assert "text" not in found.table


def test_calls_without_a_step_are_counted(tmp_path: Path) -> None:
    """On each rank, as in wandb: otherwise no figure could draw them."""
    found = _run(tmp_path, "import wandb\nfor i in range(3):\n    wandb.log({'loss': i + rank})\n", "wandb")
    assert _columns(found, "iteration", "loss") == [[0, 1, 2] * 2, [0, 1, 2, 1, 2, 3]]


def test_every_known_tracker_is_tried() -> None:
    """The error names those."""
    assert set(CALLS) == set(TRACKERS)


def test_a_stub_takes_every_use(tmp_path: Path) -> None:
    """And each rank has its own."""
    _run(
        tmp_path,
        """
import wandb
import wandb.sdk.data_types as types
from wandb.integration import anything

@wandb.decorator
def f(x):
    return x + 1

@wandb.decorator(1, key=2)
class Made(wandb.Callback):
    def __init__(self):
        super().__init__(3)

assert f(1) == 2 and Made().anything() is not None
run = wandb.init(config={"lr": 0.1, "depth": 2})
assert wandb.config.lr == run.config["lr"] == 0.1 and not hasattr(wandb.config, "width")
wandb.config.update({"width": 3}, allow_val_change=True)
assert run.config.width == 3
run.name, run.summary["best"] = f"{rank}", 3.0
assert run.name == str(rank) and run is not None and run
wandb.shared = getattr(wandb, "shared", None) or [rank]
for each in wandb.Api().runs("x"):
    raise AssertionError
with wandb.Artifact("model") as made:
    made.add_file("x")
wandb.log({"picture": wandb.Image([1]), "rank": 7, "deep": {"loss": 1.0}, "text": "a"})
wandb.log("no mapping", 1, 2, 3)
wandb.finish()
""",
        "wandb",
    )
    found = _run(
        tmp_path,
        "import wandb\nwandb.log({'rank': 7, 'deep': {'loss': 1.0}, 'p': wandb.Image(1)})\n",
        "wandb",
    )
    assert _columns(found, "logged/rank", "deep/loss") == [[7, 7], [1.0, 1.0]]
    assert "p" not in found.table


def test_the_option_is_named_where_a_tracker_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And it is repeatable."""
    path = tmp_path / "program.py"
    path.write_text(f"{SCRIPT}import wandb, neptune\nwandb.log(dict(loss=1.0))\nprint(neptune.x)\n")
    line = ["run", str(path), "--ranks", "2"]
    assert cli.main(line) == 1
    assert "No module named 'wandb'; install it, or give --stub wandb" in capsys.readouterr().err
    assert cli.main([*line, "--stub", "wandb", "--stub", "neptune", "--out", str(tmp_path / "out")]) == 0
    assert "[rank 0] <stub neptune.x>" in capsys.readouterr().out
    assert np.asarray(Run.load(tmp_path / "out").table["loss"]).tolist() == [1.0, 1.0]
    with pytest.raises(ParameterError, match="stub 'not-a-name': give the name of a module"):
        _run(tmp_path, "", "not-a-name")
