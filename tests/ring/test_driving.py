"""How waits on shared memory pass: spinning first, or asleep at once beside threads that compute."""

from __future__ import annotations

import threading
from typing import Any

from ray_pccl.ring import driving


class Memory:
    """Notes when a wait sleeps."""

    def __init__(self) -> None:
        self.bell = self
        self.slept = 0

    def now(self) -> int:
        return 0

    def wait(self, seen: int, timeout: float) -> None:
        self.slept += 1

    def doze(self, *, asleep: bool) -> None:
        pass


def _looks_before_sleep(*, patient: bool) -> int:
    found: list[int] = []

    def look() -> None:
        if patient:
            driving.wait_patiently()
        memory: Any = Memory()
        pause, looks = driving.Pause(memory, 1), 0
        while not memory.slept:
            pause()
            looks += 1
        found.append(looks)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def test_a_patient_thread_sleeps_at_once_and_others_spin_first() -> None:
    assert _looks_before_sleep(patient=True) == 2  # it says so, looks once more, and sleeps
    assert _looks_before_sleep(patient=False) > driving.SPINS
