"""The decisions of a policy as pure functions and small frozen objects: when, who, from whom, how much.

Nothing here knows a communicator, a model or torch, so all of it is tested without any.
"""
