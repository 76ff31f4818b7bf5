"""Which thresholds divide the classes of flows best, found out while training goes on.

Geryon (Wang et al., 2020), section III-C: in the first iterations different thresholds are used in
turn, the relationship between iteration time and threshold is fitted, and the threshold of the
minimum is kept.
"""
