"""The decisions of a policy as pure functions and small frozen objects: when, which ranks, which donors, how much.

This package must not know communicators, models or torch, so its tests need none of them.
"""
