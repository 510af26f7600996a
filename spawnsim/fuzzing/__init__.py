"""Fuzzing: a program under many seeds, fault plans, delays and orders of simultaneous events, until something breaks.

`cases` says what is drawn, `checks` what must hold, `campaign` carries cases out side by side, `shrinking` makes a
case that fails small, `pytest_plugin` brings all of it to tests. Nothing is imported here: pytest loads the plugin in
every project.
"""
