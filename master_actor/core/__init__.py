"""The master's decisions as pure state machines: events in, actions out, time as an argument.

`master` is the entrance; `group` the life of one group, with `phases` (its table), `rendezvous` (who waits),
`agreement` (what became of operations), `ring` (orders that avoid broken edges) and `store`; `liveness` judges who is
dead; `records` is what outlives a restart. No clock, no socket, no thread and no Ray lives here.
"""
