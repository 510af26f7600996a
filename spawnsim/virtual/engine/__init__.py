"""The simulation engine: how virtual time runs, what a rank owns, how messages travel, meet and match.

It knows tasks, times, messages and NICs; it must not know buffers or communicators' calls.
"""
