"""Fuzzing: a program under many seeds, fault plans, delays and orders of simultaneous events, until something breaks.

`cases` draws cases, `checks` holds their runs to invariants, `campaign` runs many in parallel, and `shrinking` makes a
failing case small.
"""
