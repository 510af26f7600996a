"""How many examples a property is tried on: few in each run of the suite, more where somebody looks for a defect.

SPAWNSIM_EFFORT=10 pytest tests/virtual/engine/test_matching.py
"""

import os

from hypothesis import settings

EFFORT = float(os.environ.get("SPAWNSIM_EFFORT", "1"))


def tried(examples: int) -> settings:
    """Return settings for so many examples at an effort of 1."""
    return settings(max_examples=max(1, round(examples * EFFORT)), deadline=None)
