"""The order of the ring: which peer sends to which.

`ordering` finds it from a matrix of bandwidths (`exact` for few, `heuristic` for many), `solving` does so in a process
of its own, `types` and `plot` show the outcome to users. Pure: no sockets, no master, and no Ray.
"""
