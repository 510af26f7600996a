"""Data races of one-sided programs: two conflicting accesses to one byte that nothing orders (`spawnsim run --races`).

`accesses` decides whether two accesses conflict, `memory` keeps those to exposed memory and finds local stores,
`detector` follows the calls, and `loads` shows it the loads and stores in the program's own file.
"""
