"""The commit switched off, for a test of the test."""

from __future__ import annotations

from typing import Any

from ray_pccl.ring.linked import LinkedAttempt
from ray_pccl.ring.shared import PREPARED, SharedAttempt
from ray_pccl.ring.wire import Type

NO_COMMIT = "no commit"


def plant(name: str) -> None:
    """Breaks the product of this process in the named way; the empty name leaves it as it is."""
    if name:
        {NO_COMMIT: _without_commit}[name]()


def _without_commit() -> None:
    """Whoever has its own result returns it, whatever the others hold, and whoever has gone on without it."""
    tell, wait_all = LinkedAttempt._tell, SharedAttempt.wait_all

    def tell_and_believe(self: LinkedAttempt, type_: Type, *body: bytes) -> None:
        tell(self, type_, *body)
        if type_ is Type.PREPARED:
            self._heard.update(range(self.attempt.epoch.size))

    def wait_for_data_only(self: SharedAttempt, stage: int) -> Any:
        return iter(()) if stage == PREPARED else wait_all(self, stage)

    LinkedAttempt._tell = tell_and_believe  # type: ignore[method-assign]
    SharedAttempt.wait_all = wait_for_data_only  # type: ignore[method-assign]
    SharedAttempt._stands = lambda _self: True  # type: ignore[method-assign]
