"""Fuzzing: run a program under many seeds, fault plans, delays and event orders, until it fails.

`cases` draws cases, `checks` checks the invariants of their runs, `campaign` runs many in parallel, and `shrinking`
reduces a failing case.
"""
