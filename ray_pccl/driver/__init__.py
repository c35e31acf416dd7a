"""The driver's side: what is called where Ray is driven from. The only package that imports Ray when it is imported.

`master` starts, finds and stops the detached master actor.
"""
