"""What every test stands on: quiet threads, no display, and no hurry."""

from __future__ import annotations

import os

# Before torch or numpy is imported: a pool of threads per rank would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

from hypothesis import settings

# An example that took long on a busy machine is no defect.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
