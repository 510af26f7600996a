"""Fuzzing: a program under many seeds, fault plans, delays and orders of simultaneous events, until something breaks.

`cases` says what is drawn, `checks` what must hold, `campaign` carries cases out side by side, and `shrinking` makes a
case that fails small.
"""
