"""A peer: what a process that takes part in a group runs.

`communicator` is what users hold; `membership` and `ledger` decide, without I/O; `connection` keeps one connection to
the master through losses, in a thread of its own; `events` tells callbacks; `store` is the group's key-value store;
`sentinel` is the tiny process that watches this host's peers, `watch` the peer's side of it. Tensors are moved by
`ray_pccl.ring`, not here.
"""
