"""Runs for other eyes: an HTML page for people (`page`), Chrome/Perfetto JSON for trace viewers (`trace`).

This floor knows finished runs and the figures below it; it must not know how runs are made.
"""
