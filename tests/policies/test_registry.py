"""The registry of policies is `spawnsim.policies`: a new policy is a file of its own and a name there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spawnsim import policies

FOLDER = Path(policies.__file__).parent
LAYERS = {"base", "options", "averaging", "exchange", "state", "rules"}
FILES = {path.stem for path in FOLDER.glob("*.py")} - LAYERS - {"__init__"}
POLICIES = {name: getattr(policies, name) for name in policies.__all__ if name.endswith("Policy")}


def test_each_file_beside_the_layers_is_a_registered_policy() -> None:
    """And each registered policy says of itself what lists and fuzzing show, and keeps only promises that exist."""
    homes = {kind.__module__.rpartition(".")[2] for name, kind in POLICIES.items() if name != "SpawnPolicy"}
    assert homes == FILES
    for kind in POLICIES.values():
        assert (kind.__doc__ or "").partition("\n")[0].endswith(".")
        assert {"mean", "equal", "range", "progress"} >= set(kind.promises)
        assert len(kind.parameters()) == len(set(kind.parameters()))


@pytest.mark.parametrize("layer", sorted(LAYERS))
def test_no_layer_knows_a_policy(layer: str) -> None:
    """Layers import other layers alone; their order is the linter's."""
    paths = [FOLDER / f"{layer}.py"] if layer in ("base", "options") else (FOLDER / layer).glob("*.py")
    for path in paths:
        known = set(re.findall(r"spawnsim\.policies\.(\w+)", path.read_text(encoding="utf-8")))
        assert known & FILES == set(), path
