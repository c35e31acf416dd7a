"""``ray-pccl doctor``: is there anything about this cluster that will make collectives fail, or slow?

`probe` runs on each node and needs nothing but Python, so that it also runs where ray_pccl is missing; `collecting`
starts it there and makes `facts` of its answers; `checks` makes findings of facts, and does nothing else; `command`
shows them.
"""
