"""The costs of a cluster: network, collectives, computation, faults, and the platform files that describe them.

Data and formulas: no ranks and no kernel. The virtual backend, training over columns and predictions all use them.
"""
