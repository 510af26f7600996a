"""The simulation engine: how virtual time runs, what a rank owns, how messages travel, meet and match.

The engine imports nothing of buffers or communicators' calls.
"""
