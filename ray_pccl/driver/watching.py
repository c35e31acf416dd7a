"""What becomes of the hidden calls: whose actor is gone, and what the user sees in the place of Ray's own error."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from ray_pccl.driver import internals
from ray_pccl.driver.errors import ActorLostError, actor_lost

log = logging.getLogger("ray_pccl.driver")

Loss = Callable[[str], None]
_LOST = (RayActorError, NodeDiedError, WorkerCrashedError)
_LOOK_S = 0.02
"""How often to look: a look takes the interpreter away from who waits for the results."""
_REMEMBERED = 10_000


class Followed(NamedTuple):
    """A result that is not there yet."""

    result: Any
    actor_id: str
    on_loss: Loss
    """Called with the reason if the actor itself was lost."""
    given: Any = None
    """What the actor needs for it: held until then."""


class Watch:
    """Follows results until they are there, and no longer, so that it keeps none alive."""

    def __init__(self) -> None:
        self._new: collections.deque[Followed] = collections.deque()
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pending: dict[Any, Followed] = {}
        internals.in_background.holds_refs(self._let_go)
        self._actor_of: collections.OrderedDict[str, str] = collections.OrderedDict()
        """The actor of each result that is not there yet, and of the last ones that failed."""

    def follow(self, results: Sequence[Followed]) -> None:
        """Watches over results of actors."""
        internals.translate_errors(self._translate)
        with self._lock:
            for each in results:
                self._actor_of[each.result.hex()] = each.actor_id
            while len(self._actor_of) > _REMEMBERED:
                self._actor_of.popitem(last=False)
            self._new.extend(results)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="ray_pccl-watch", daemon=True)
                self._thread.start()
        self._wanted.set()

    def _translate(self, object_id: str, error: BaseException) -> BaseException:
        actor_id = self._actor_of.get(object_id)
        if actor_id is None or not isinstance(error, _LOST) or isinstance(error, ActorLostError):
            return error
        return actor_lost(actor_id, " ".join(str(error).split()))

    def _run(self) -> None:
        while True:
            if not self._pending:
                self._wanted.wait()
            self._wanted.clear()
            time.sleep(_LOOK_S)
            try:
                with internals.in_background():
                    self._take_on(self._pending)
                    self._look(self._pending)
            except internals.RayGoneError:
                continue  # `_let_go` was called, or is about to be
            except Exception as error:  # whatever Ray raises
                # What is pending stays so: to let go of what its calls were given would free values that they name.
                log.warning("the results of collectives could not be watched: %s", error)

    def _let_go(self) -> None:
        """Ray is shut down: nothing is left to watch."""
        self._new.clear()
        self._pending.clear()
        self._actor_of.clear()

    def _take_on(self, pending: dict[Any, Followed]) -> None:
        # A method of its own: what it has in its hands is let go when it returns, and not at the next call.
        while self._new:
            followed = self._new.popleft()
            pending[followed.result] = followed

    def _look(self, pending: dict[Any, Followed]) -> None:
        if not pending:
            return
        refs = list(pending)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        for result in done:
            self._end(pending.pop(result))

    def _end(self, followed: Followed) -> None:
        try:
            error = internals.error_in(followed.result)
            if error is None:
                self._actor_of.pop(followed.result.hex(), None)
            elif (reason := _loss_of(followed.actor_id, error)) is not None:
                followed.on_loss(reason)
        except Exception as trouble:  # of this one alone
            log.warning("what became of a call could not be seen: %s", trouble)


def _loss_of(actor_id: str, error: BaseException) -> str | None:
    """Why this actor is gone, if the error says so; errors about others, and of the user's own, do not."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ActorLostError):
        return str(cause) if cause.details.get("actor_id") == actor_id else None
    return str(cause) if isinstance(cause, _LOST) and isinstance(cause, RayError) else None
