"""The driver's side: what is called where Ray is driven from. The only package that imports Ray when it is imported.

`master` starts, finds and stops the detached master actor. `creating` makes groups, `calls` and `groups` ask their
actors for collectives, `roster` and `watching` see who is in and who is lost. Inside the actors, `agent` does what was
asked, at the places that `seats` keeps, in the order of `lanes`; `reducing` takes nests of tensors (`trees`, `tensors`,
`memory`) to the communicator. Values stay where they were made: `collective` is the decorator, `objects` the store,
`claims` says how long, `desk` and `fetching` bring copies elsewhere. What is not public in Ray is in `internals`.
"""
