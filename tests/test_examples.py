"""Golden examples: each `.py` of docs/examples prints exactly its sibling `.out`, virtual time stamps and all."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "docs" / "examples").glob("*.py"))


# Programs of MPI or torchrun, and tests, are given to a command; others are run as they are.
COMMANDS = {
    "ddp.py": "-m spawnsim run ddp.py --ranks 8 --platform gigabit --quiet",
    "test_ring.py": "-m pytest -q test_ring.py",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_its_out_file_holds(example):
    """Set WRITE_GOLDEN=1 to rewrite the files, and read the difference before you commit it."""
    done = subprocess.run(
        [sys.executable, *COMMANDS.get(example.name, example.name).split()],
        cwd=example.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    golden, out = example.with_suffix(".out"), re.sub(r" in [0-9.]+s", "", done.stdout)  # pytest's own time
    if os.environ.get("WRITE_GOLDEN"):
        golden.write_text(out)
    assert done.returncode == 0, done.stderr
    assert out == golden.read_text()


def test_there_are_examples():
    """The glob above finds something."""
    assert len(EXAMPLES) >= 5
