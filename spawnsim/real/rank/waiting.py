"""How a real rank waits: bounded, quick at first, and out of the way of ranks that compute.

Knows a test function and a limit; knows neither MPI nor torch. A wait goes through three gears: spin (a message
that is nearly here costs no switch), yield the core (ranks may outnumber cores), then sleep for about 2 % of the
time waited so far, at most `NAP_S`, so that a long wait leaves its core to those who compute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPINS = 200  # tests before the first look at the clock: about 60 us
YIELD_S = 2e-3  # from then on, this long, yield the core between two tests
NAP_S = 3e-4  # longest sleep between two tests
NAP_SHARE = 0.02  # a nap is at most this share of the wait so far, so it adds at most that to the latency

_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


def wait_until(done: Callable[[], bool], limit_s: float) -> bool:
    """Call `done` until it returns true; return False if `limit_s` seconds pass before that."""
    for _ in range(SPINS):
        if done():
            return True
    begin = time.perf_counter()
    while not done():
        waited = time.perf_counter() - begin
        if waited > limit_s:
            return done()
        if waited < YIELD_S:
            _yield()
        else:
            time.sleep(min(NAP_S, NAP_SHARE * waited))
    return True
