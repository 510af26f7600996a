"""What every test stands on: quiet threads, no display, and temporary run folders."""

from __future__ import annotations

import os

# Before torch or numpy is imported: a pool of threads per rank would only fight over the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
