"""The order of the ring: which peer sends to which.

`ordering` finds it from a matrix of bandwidths (`exact` for few, `heuristic` for many), `solving` does so in a process
of its own, `types`, `progress` and `plot` show the outcome to users; all of these are pure. `probing` measures the way
to another peer. Nothing here knows the master, or imports Ray.
"""
