"""Chaos: real processes that run operations while peers, links and the master are killed under them.

A `peer` runs what the `workload` says and writes down what every operation gave it; an `arena` holds a master and its
peers; `faults` strike them; the `checker` reads what the living, the dead and the evicted have written, and says what
can't be. A `campaign` is many groups of that, and `soak` runs one for as long as it is told. `bugs` switches the commit
off, to see that the checker notices.
"""
