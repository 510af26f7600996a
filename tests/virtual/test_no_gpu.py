"""Programs written for GPUs: one line says how they run on virtual ranks, and nccl works without warnings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from spawnsim import cli
from spawnsim.errors import RankError, UnsupportedError
from spawnsim.record import Recorder
from spawnsim.scenario import Scenario
from spawnsim.virtual.scripts import run_program

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
HEAD = (
    "import os\nimport torch\nimport torch.distributed as dist\n"
    "from torch.nn.parallel import DistributedDataParallel\n"
    "rank, model = int(os.environ['RANK']), torch.nn.Linear(2, 2)\n"
)


def _run(folder: Path, text: str) -> None:
    path = folder / "program.py"
    path.write_text(HEAD + text)
    run_program(path, [], Scenario(2), recorder=Recorder(), carrier="threads", prefix=False)


@pytest.mark.parametrize(
    "call",
    [
        "model.cuda()", "model.to('cuda')", "model.to(rank)", "torch.ones(1).cuda(rank)", "torch.ones(1).to('cuda')",
        "torch.zeros(2, device='cuda')", "torch.randn(2, device=f'cuda:{rank}')", "torch.cuda.set_device(rank)",
        "torch.cuda.current_device()", "torch.cuda.Stream()", "torch.cuda.Event()", "torch.ones(2).pin_memory()",
        "torch.set_default_device('cuda'); torch.zeros(2)",
        "dist.init_process_group('nccl'); DistributedDataParallel(model, device_ids=[rank])",
        "dist.init_process_group('nccl', device_id=torch.device('cuda', rank))",
    ],
)  # fmt: skip
def test_a_gpu_that_is_asked_for_is_refused_with_the_remedy(tmp_path: Path, call: str) -> None:
    """Whatever torch says to it."""
    with pytest.raises(UnsupportedError) as caught:
        _run(tmp_path, call)
    text = str(caught.value)
    assert text.startswith("rank 0 asked for a GPU at 0 s (program.py:6") or "6.4e-05 s" in text
    assert "virtual ranks have CPU tensors" in text
    assert "`device = 'cuda' if torch.cuda.is_available() else 'cpu'`, and no device_ids" in text


def test_the_remedy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without torch's traceback."""
    path = tmp_path / "program.py"
    path.write_text(HEAD + "model.cuda()")
    assert cli.main(["run", str(path), "--ranks", "2"]) == 1
    assert len([line for line in capsys.readouterr().err.splitlines() if "note:" not in line]) == 1


def test_an_error_that_the_program_handles_stays_torchs(tmp_path: Path) -> None:
    """Programs try a GPU, and go on without."""
    _run(tmp_path, "try:\n    model.cuda()\nexcept AssertionError:\n    model.cpu()\n")
    with pytest.raises(RankError, match="no GPU for me"):
        _run(tmp_path, "raise RuntimeError('no GPU for me')")


def test_nccl_is_taken_without_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`get_backend()` is what was asked for."""
    _run(tmp_path, "dist.init_process_group('nccl')\nprint(dist.get_backend(), dist.new_group().size())\n")
    captured = capsys.readouterr()
    assert captured.out == "nccl 2\n" * 2
    assert "Warning" not in captured.err
    assert "RANK" not in os.environ
