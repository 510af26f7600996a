"""The virtual backend: a deterministic cluster in one process.

`spawnsim.virtual(...)` makes a test that runs on virtual ranks: see `spawnsim.fuzzing.pytest_plugin`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from spawnsim.virtual.cluster import Totals, simulate

__all__ = ["Totals", "simulate"]


class _Callable(ModuleType):
    # The decorator of tests has the name of this package, which an import of the package would otherwise hide.
    def __call__(self, *args: Any, **options: Any) -> Any:
        return import_module("spawnsim.fuzzing.pytest_plugin").virtual(*args, **options)


sys.modules[__name__].__class__ = _Callable
