"""Everything of Ray that is used here and is not public, in one place. Tried with Ray 2.60.

* A hook that is called when the last reference to an object of this process, wherever it was passed, is gone.
* A second return of a call, which its caller does not see, and its ref inside the actor (see `claims`).
* Background threads that are out of Ray before it is shut down: Ray ends a process that calls it later.
* Waiting in an actor's event loop from `__ray_call__`, which is no coroutine itself.
* Whether a result is an error, without fetching it; and another error in the place of Ray's.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

_PYTHON, _RAW = b"PYTHON", b"RAW"
_SECOND = (2).to_bytes(4, "little")
_IS_THERE = b"\x12\x08\x12\x06PYTHON"
"""Ray's `GetObjectStatusReply` with an empty object: who is told this along with a ref does not ask its owner."""


def _worker() -> Any:
    return ray._private.worker.global_worker


class RayGoneError(Exception):
    """Ray is shut down in this process, or about to be."""


class _Gate:
    """Who is in Ray, or holds refs of its, behind the user's back.

    `ray.shutdown()` lets nobody else in, and waits until all are out: to ask Ray for something, or to let go of a ref,
    while it shuts down would end the process.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False
        self._guarded = False
        self._holders: list[Callable[[], None]] = []

    def holds_refs(self, let_go: Callable[[], None]) -> None:
        """Has `let_go` called before Ray is shut down, when nobody is inside."""
        self._holders.append(let_go)

    def start(self, target: Callable[..., None], name: str, *args: Any) -> None:
        """Runs a function in a thread that counts as inside until it ends: it must end soon once `is_closing`."""
        with self._changed:
            self._guard()
            if self._closed:
                return
            self._inside += 1
        threading.Thread(target=self._run, args=(target, args), name=name, daemon=True).start()

    def _run(self, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        try:
            target(*args)
        finally:
            del target, args
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._changed:
            self._guard()
            if self._closed or not ray.is_initialized():
                raise RayGoneError("Ray is shut down in this process")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _guard(self) -> None:
        if self._guarded:
            return
        self._guarded = True
        module = ray._private.worker
        disconnect = module.disconnect

        @functools.wraps(disconnect)
        def leave_first(*args: Any, **kwargs: Any) -> Any:
            with self._changed:
                self._closed = True
                self._changed.wait_for(lambda: not self._inside, SHUTDOWN_S)
            for let_go in list(self._holders):
                let_go()
            return disconnect(*args, **kwargs)  # type: ignore[no-untyped-call]

        connect = module.connect

        @functools.wraps(connect)
        def come_back(*args: Any, **kwargs: Any) -> Any:
            connected = connect(*args, **kwargs)
            self._closed = False
            return connected

        module.disconnect, module.connect = leave_first, come_back


SHUTDOWN_S = 10.0
in_background = _Gate()
"""``with in_background():`` around what a thread of ours asks of Ray. It raises `RayGoneError`; it must be short."""


def on_out_of_scope(ref: Any, call: Callable[[bytes], None]) -> bool:
    """Has `call` called, in a thread of Ray's, when nobody holds this object of our own any more.

    False if that is so already.
    """
    return bool(_worker().core_worker.add_object_out_of_scope_callback(ref, call))


def own_address() -> bytes:
    """This process, as the owner of objects."""
    _, address, _ = _worker().core_worker.serialize_object_ref(ray.put(None))
    return bytes(address)


def ask_for_two(invocation: Callable[..., Any]) -> bool:
    """Has a call of a method return two objects, if it was to return one. Whether it was.

    `invocation` is what Ray hands to a method's ``__ray_invocation_decorator__``: a closure, made for this call.
    """
    names, cells = invocation.__code__.co_freevars, invocation.__closure__ or ()
    cell = dict(zip(names, cells, strict=True)).get("num_returns")
    if cell is None or cell.cell_contents not in (None, 1):
        return False
    cell.cell_contents = 2
    return True


def second_return(owner: bytes) -> Any:
    """The ref of the second object that the present task returns, to be passed on. `owner` is who called it."""
    from ray._private.serialization import _object_ref_deserializer

    task_id = ray.get_runtime_context().get_task_id()
    assert task_id is not None
    return _object_ref_deserializer(bytes.fromhex(task_id) + _SECOND, "", owner, _IS_THERE, None)  # type: ignore[no-untyped-call]


def second_if_ready(ref: Any) -> bytes:
    """The bytes that the call of a ref of our own has returned as its second object; none if it has not, or failed."""
    second: Any = ray.ObjectRef(ref.task_id().binary() + _SECOND)
    try:
        ((data, metadata, _),) = _worker().core_worker.get_objects([second], 0)
    except GetTimeoutError:
        return b""
    return bytes(data) if metadata == _RAW and data is not None else b""


def is_async_actor() -> bool:
    """Whether this process is an actor with an event loop."""
    return bool(_worker().core_worker.current_actor_is_asyncio())


def runs_calls_in_order() -> bool:
    """Whether this process is an actor with one thread, in which no call overtakes another of the same caller."""
    core_worker = _worker().core_worker
    return not core_worker.current_actor_is_asyncio() and core_worker.current_actor_max_concurrency() <= 1


_in_loop: contextvars.ContextVar[bool] = contextvars.ContextVar("ray_pccl in the event loop", default=False)


def run_in_event_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a `__ray_call__` of an async actor has to return for this to be run. See `await_calls`.

    The first call of a process may have overtaken the one to join. It waits where Ray runs it, and is the only one that
    does: from now on calls begin in the event loop.
    """
    if _in_loop.get():
        return coroutine
    await_calls()
    from ray._raylet import PythonFunctionDescriptor  # type: ignore[attr-defined]

    where = PythonFunctionDescriptor("ray_pccl", "collective", "")
    return _worker().core_worker.run_async_func_or_coro_in_event_loop(coroutine, where, "", is_actor_task=True)


async def _await_call(actor: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`__ray_call__` as a coroutine."""
    _in_loop.set(True)
    result = function(actor, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def await_calls() -> None:
    """In an async actor: has Ray run `__ray_call__` in the event loop, where it may wait. Once is enough.

    To wait inside of it where Ray runs it, in a fiber, would leave Python frames on a stack that other calls share: two
    of them at a time end the process.
    """
    manager = _worker().function_actor_manager
    for table in (manager._function_execution_info, manager.execution_infos):
        for info in list(table.values()):
            executor: Any = getattr(info, "function", None)
            if getattr(executor, "name", "") == "__ray_call__":
                # In place: a call that is about to begin has this one in its hands already.
                cells = dict(zip(executor.__code__.co_freevars, executor.__closure__, strict=True))
                cells["method"].cell_contents = executor.method = _await_call


def error_in(ref: Any) -> BaseException | None:
    """Why a ready object is an error, or None. Fetches and makes nothing of an object that is none."""
    worker = _worker()
    try:
        ((data, metadata, _),) = worker.core_worker.get_objects([ref], 0)
    except GetTimeoutError:  # large, and in another node's store: no error of ours, nor of Ray's, is
        return None
    if metadata is None or metadata.split(b",")[0] == _PYTHON:
        return None
    value = worker.get_serialization_context()._deserialize_object(data, metadata, ref, None)
    return value if isinstance(value, BaseException) else None


def translate_errors(translate: Callable[[str, BaseException], BaseException]) -> None:
    """Has `translate` see every error that Ray is about to raise for an object, with the object's id. Once."""
    from ray._private.serialization import SerializationContext

    original = SerializationContext._deserialize_object
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def deserialize(self: Any, data: Any, metadata: Any, ref: Any, *rest: Any) -> Any:
        value = original(self, data, metadata, ref, *rest)
        if isinstance(value, ray.exceptions.RayError) and ref is not None:
            return translate(ref.hex(), value)
        return value

    SerializationContext._deserialize_object = deserialize  # type: ignore[assignment, method-assign]
