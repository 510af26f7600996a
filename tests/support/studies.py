"""Studies as modules."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

STUDIES = Path(__file__).parents[2] / "studies"


def study_of(name: str) -> ModuleType:
    """Return the module of a study's file, newly loaded."""
    spec = importlib.util.spec_from_file_location(name, STUDIES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
