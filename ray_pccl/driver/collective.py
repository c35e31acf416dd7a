"""`@ray_pccl.collective`: a method whose value stays where it was made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ray_pccl.driver.objects import local_store
from ray_pccl.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])


def collective(method: _F) -> _F:
    """Keeps what an actor's method returns inside the actor: its ObjectRef carries a ticket, not the tensors.

    The value is a tensor (numpy, torch or CuPy), or a nest of dicts, lists, tuples, named tuples and dataclasses of
    them; other leaves travel as usual. Pass the ref on like any other: a method of the same actor gets the very same
    tensors, with no copy; any other process a copy, fetched over ray_pccl's own connections; `ray.get` in the driver
    works, too. The tensors are freed with the last ref. They are not copied: change them in place, and who looks
    later sees the change.

    Works on plain and on ``async`` methods, alone or under ``@ray.method(...)``.
    """
    if not callable(method) or inspect.isclass(method):
        raise UsageError(f"@ray_pccl.collective decorates a method of an actor, not {method!r}")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise UsageError(f"@ray_pccl.collective: {method.__qualname__} is a generator; return a list instead")
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def keep_awaited(*args: Any, **kwargs: Any) -> Any:
            return local_store().keep(await method(*args, **kwargs))

        return keep_awaited  # type: ignore[return-value]

    @functools.wraps(method)
    def keep(*args: Any, **kwargs: Any) -> Any:
        return local_store().keep(method(*args, **kwargs))

    return keep  # type: ignore[return-value]
