"""The master: it knows who is in which group, and decides after failures. It is not on the data path.

`core` decides, without I/O; `server` is the core on the network; `journal` is what outlives it; `thread` runs it in any
process (`serve`), `actor` as a detached Ray actor, and ``python -m master_actor`` as a program of its own. No tensor
ever passes through here.
"""

from master_actor.thread import serve
from ray_pccl.control.endpoint import Endpoint

__all__ = ["Endpoint", "serve"]
