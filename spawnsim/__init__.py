"""spawnsim: policies that average and replace models across ranks, on virtual clusters and on real ones.

Names are loaded on first use: `import spawnsim` brings neither torch nor MPI nor pyplot.

The floors, top to bottom (imports point down only; `lint-imports` holds it):

    cli
    study · report
    plots · testing · run
    record
    policies | workloads | real | virtual     (siblings: none imports another)
    comm
    errors · random · units
"""

from __future__ import annotations

__version__ = "0.1.0"
