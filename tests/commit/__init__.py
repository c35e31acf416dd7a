"""The commit protocol under a scheduler that chooses every step: which peer moves, which message arrives, who dies.

The real `Ledger`, `Membership`, master core and `agree` run here. Read `plan.py` (what a life is made of), `links.py`
and `boards.py` (the two ways in which a data plane commits), `peer.py` and `world.py` (processes, connections, faults),
`answers.py` (what must hold). `bugs.py` breaks each of the rules once, and the tests demand that this is noticed.
"""
