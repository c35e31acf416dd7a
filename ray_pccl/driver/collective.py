"""`@ray_pccl.collective`: a method whose value stays where it was made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ray_pccl.driver import internals
from ray_pccl.driver.claims import Claim, local_owner
from ray_pccl.driver.objects import keep_for
from ray_pccl.errors import UsageError

_F = TypeVar("_F", bound=Callable[..., Any])
_CLAIM = "_ray_pccl_claim"
"""The hidden argument with which the caller says who waits for the value."""


def collective(method: _F) -> _F:
    """Keeps what an actor's method returns inside the actor: its ObjectRef carries a ticket, not the tensors.

    The value is a tensor (numpy, torch or CuPy), or a nest of dicts, lists, tuples, named tuples and dataclasses of
    them; other leaves travel as usual. Pass the ref on like any other: a method of the same actor gets the very same
    tensors, with no copy; any other process a copy, fetched over ray_pccl's own connections; `ray.get` in the driver
    works, too. The tensors are freed with the last ref. They are not copied: change them in place, and who looks
    later sees the change.

    Works on plain and on ``async`` methods, alone or together with ``@ray.method(...)``. Several values are one tuple:
    with ``num_returns`` they go through Ray's own store.
    """
    if not callable(method) or inspect.isclass(method):
        raise UsageError(f"@ray_pccl.collective decorates a method of an actor, not {method!r}")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise UsageError(f"@ray_pccl.collective: {method.__qualname__} is a generator; return a list instead")
    if inspect.iscoroutinefunction(method):

        async def keep_awaited(*args: Any, _ray_pccl_claim: Claim | None = None, **kwargs: Any) -> Any:
            value = await method(*args, **kwargs)
            return value if _ray_pccl_claim is None else keep_for(_ray_pccl_claim, value)

        return _dressed(keep_awaited, method)  # type: ignore[no-any-return]

    def keep(*args: Any, _ray_pccl_claim: Claim | None = None, **kwargs: Any) -> Any:
        value = method(*args, **kwargs)
        return value if _ray_pccl_claim is None else keep_for(_ray_pccl_claim, value)

    return _dressed(keep, method)  # type: ignore[no-any-return]


def _dressed(wrapper: Any, method: Any) -> Any:
    """The wrapper with all that is said of the method: and, for Ray, with the hidden argument."""
    functools.update_wrapper(wrapper, method)
    del wrapper.__wrapped__  # Ray would call that one
    signature = inspect.signature(method)
    parameters = list(signature.parameters.values())
    last = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters.insert(last, inspect.Parameter(_CLAIM, inspect.Parameter.KEYWORD_ONLY, default=None))
    wrapper.__signature__ = signature.replace(parameters=parameters)
    wrapper.__ray_invocation_decorator__ = _claiming
    return wrapper


def _claiming(invocation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What Ray calls a method with, in the process of the caller: the call takes a claim along."""

    @functools.wraps(invocation)
    def invoke(args: Any, kwargs: Any) -> Any:
        if not internals.ask_for_two(invocation):
            return invocation(args, kwargs)  # several returns: each of them goes through Ray's own store
        owner = local_owner()
        claim = owner.claim()
        try:
            value, anchor = invocation(args, {**kwargs, _CLAIM: claim})
        except BaseException:
            owner.end(claim.number, "")
            raise
        owner.bind(claim, anchor, value.task_id().actor_id().hex())
        return value

    return invoke
