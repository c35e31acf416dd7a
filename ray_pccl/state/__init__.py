"""Shared state: what all members of a group hold alike, and how newcomers get it.

`sharing`, `tensors` and `nests` are what users hold: a state, its tensors as bytes, and where they are in modules and
optimisers. `rows`, `election`, `mismatch` and `pieces` decide, without I/O: what members tell each other, whose content
counts, where states differ, which piece comes from whom. `hashing` names contents; `supplying` and `pulling` move them;
`rounds` is where members meet, `syncing` what they do there, and `storing` writes. Nothing here imports Ray, or torch
before its user did.
"""
