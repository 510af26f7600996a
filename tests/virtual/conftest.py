"""What tests of unmodified torch.distributed programs share."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import spawnsim


@pytest.fixture
def torch_program(tmp_path: Path, capfd: Any) -> Any:
    """Run a text behind a head, or a file; return the run and the lines that it has printed, sorted."""

    def run(head: str, text: str | Path, ranks: int, *argv: str, **how: Any) -> tuple[Any, list[str]]:
        file = text
        if isinstance(text, str):
            file = tmp_path / "program.py"
            file.write_text(head + text)
        capfd.readouterr()
        before = dict(os.environ)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns of what is old
                found = spawnsim.run(file, ranks=ranks, argv=argv, options={"prefix": False}, **how)
        finally:
            assert dict(os.environ) == before
            assert not dist.is_initialized()
        return found, sorted(capfd.readouterr().out.splitlines())

    return run
