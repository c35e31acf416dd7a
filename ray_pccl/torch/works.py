"""A collective under way, as torch sees it: a `dist.Work` with a real future."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ray_pccl.torch.backend_errors import TimeoutBackendError

NO_TIMEOUT = timedelta(0)
"""What torch passes for a wait without a limit."""


class PCCLWork(dist.Work):
    """One call of a process group. Dropping it, or not waiting for it, changes nothing for anyone.

    `wait` raises what the call failed with. A future's `wait` and `value` raise a `RuntimeError` that quotes it: torch
    carries no other error through C++.
    """

    def __init__(self, results: list[torch.Tensor], about: str) -> None:
        super().__init__()
        self._results = results
        self._about = about
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._futures: list[Future[Any]] = []
        self.source = -1
        """Of a receive: the rank that sent."""

    def run(
        self, function: Callable[[], None], explain: Callable[[BaseException], BaseException]
    ) -> Callable[[], None] | None:
        """Runs the call, keeps what it raises, as `explain` says it, and wakes who waits.

        If there are futures, what completes them is returned: their callbacks run in the thread that calls it.
        """
        error: BaseException | None = None
        try:
            function()
        except BaseException as raised:
            error = explain(raised)
        with self._lock:
            self._error = error
            self._ended.set()
            return self._complete if self._futures else None

    def _complete(self) -> None:
        for future in self._futures:
            future.set_result(self._results)
        self._futures.clear()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns when the result is there, or raises why there is none."""
        seconds = timeout.total_seconds()
        if not self._ended.wait(seconds if seconds > 0 else None):
            raise TimeoutBackendError(f"{self._about} has not ended within {seconds:g} s; it goes on", calls={})
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """The same as `wait`: there is no stream to wait on."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Any:
        """Why it failed, if it has."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote, once it has ended."""
        self.wait()
        return self._results

    def get_future(self) -> Future[Any]:
        """A future of the tensors that it writes."""
        root: Future[Any] = Future()
        # C++ takes a Python future with an exception for one with a result: only a callback can make it fail there.
        future = root.then(self._value)
        with self._lock:
            if not self._ended.is_set():
                self._futures.append(root)
                return future
        root.set_result(self._results)
        return future

    def _value(self, future: Future[Any]) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def source_rank(self) -> int:
        """Of a receive: the rank that sent."""
        return self.source

    _source_rank = source_rank


class EndedWork(dist.Work):
    """A call that blocked, and ended well."""

    def __init__(self, results: list[torch.Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """There is nothing to wait for."""
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def is_completed(self) -> bool:
        """It has ended."""
        return True

    def is_success(self) -> bool:
        """It has ended well."""
        return True

    def exception(self) -> Any:
        """It did not fail."""
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that it wrote."""
        return self._results

    def get_future(self) -> Future[Any]:
        """A future that has the tensors already."""
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future
