"""What goes wrong when nodes meet, in torch's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.rendezvous import api

from ray_pccl.errors import (
    MasterError,
    OperationTimeoutError,
    PCCLError,
    RendezvousClosedError,
    RendezvousTimeoutError,
    StoreTimeoutError,
    TooFewPeersError,
)
from ray_pccl.torch.store import StoreUnavailableError


@contextmanager
def as_rendezvous_errors(run_id: str) -> Iterator[None]:
    """Around what a handler does for a run: torch's agents know torch's errors. The cause is ours."""
    try:
        yield
    except RendezvousClosedError as error:
        text = f"{error}. A run id names one run: give the next one another --rdzv-id than {run_id!r}"
        raise api.RendezvousClosedError(text) from error
    except (RendezvousTimeoutError, OperationTimeoutError, TooFewPeersError, StoreTimeoutError) as error:
        raise api.RendezvousTimeoutError(str(error)) from error
    except (MasterError, StoreUnavailableError) as error:
        raise api.RendezvousConnectionError(str(error)) from error
    except PCCLError as error:
        raise api.RendezvousError(str(error)) from error
    except OSError as error:  # a host that has no address, above all
        raise api.RendezvousConnectionError(str(error)) from error
