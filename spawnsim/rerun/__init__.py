"""A recorded run on virtual ranks, run again from its folder: to compare it, or to stop in the middle and inspect it.

`again` repeats a folder's run, `divergence` compares two runs event by event, `debugger` stops one.
"""

from spawnsim.rerun.again import Again
from spawnsim.rerun.divergence import Verdict, verify

__all__ = ["Again", "Verdict", "verify"]
