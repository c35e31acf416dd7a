"""Every knob, in one frozen dataclass.

Each setting may be given to the constructor or as an environment variable: ``heartbeat_timeout_s`` is
``RAY_PCCL_HEARTBEAT_TIMEOUT_S``. What must be the same for a whole group (`Settings.shared`) is the master's: peers
take it over when they connect, so that no peer beats more slowly than the master expects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ray_pccl.errors import SettingsError

PREFIX = "RAY_PCCL_"
LONGEST_S = 1e7
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _setting(default: Any, low: float, high: float, *, shared: bool = False) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "shared": shared})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long to wait for what. Durations end in ``_s`` (seconds) or ``_ms`` (milliseconds)."""

    # Failure detection: the master's word, the same for all of its peers.
    heartbeat_interval_ms: float = _setting(250.0, 1, 60_000, shared=True)
    """How often a peer and its host's sentinel beat."""
    heartbeat_timeout_s: float = _setting(1.0, 0.05, 3600, shared=True)
    """A host that is silent, or a process that is stopped, for this long is dead."""
    stall_timeout_s: float = _setting(30.0, 0.05, 86_400, shared=True)
    """A peer whose process runs but whose Python beats nothing (a deadlocked GIL) for this long is dead."""
    answer_timeout_s: float = _setting(5.0, 0.05, 3600, shared=True)
    """A peer that does not answer the master's question after a death for this long is evicted."""
    register_grace_s: float = _setting(3.0, 0.1, 3600, shared=True)
    """How long a restarted master waits for the members it knows. Longer than `reconnect_cap_ms`."""
    reconnect_cap_ms: float = _setting(500.0, 1, 60_000, shared=True)
    """The longest pause between two attempts to reach a lost master."""
    master_lease_s: float = _setting(60.0, 0.1, 86_400, shared=True)
    """How long collectives go on without any word from the master."""
    sentinel_interval_ms: float = _setting(5.0, 1, 1000, shared=True)
    """How often the sentinel looks at the processes of its host."""

    probe_ms: float = _setting(300.0, 20, 2000, shared=True)
    """How long ``optimize_topology()`` measures each direction of an edge."""
    probe_streams: float = _setting(4, 1, 8, shared=True)
    """How many connections it uses at once for that."""

    # A peer's own patience.
    master_timeout_s: float = _setting(90.0, 0.1, 86_400)
    """After this long without the master, calls that need it raise."""
    join_timeout_s: float = _setting(300.0, 0.01, 86_400)
    """How long ``connect()`` waits, and how long operations of a group below its minimum wait for newcomers."""
    last_call_s: float = _setting(0.5, 0.0, 3600)
    """How long a group with its minimum waits for one more before it forms."""
    op_timeout_s: float = _setting(300.0, 0.01, 86_400)
    """How long members may be in different calls before all get an error that says who is in which."""
    store_timeout_s: float = _setting(300.0, 0.0, 86_400)
    """How long ``store.get`` and ``store.wait`` wait for a key, unless told otherwise."""
    proactive_recovery: bool = True
    """Whether the master pushes news of deaths; off, a peer finds out when its own wait has lasted too long."""
    passive_timeout_s: float = _setting(30.0, 0.01, 3600)
    """With `proactive_recovery` off: how long a peer waits before it asks the master for news."""
    sentinel: bool = True
    """Whether this process is watched by its host's sentinel; off, its own heartbeat stands in."""

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if not spec.metadata:
                if not isinstance(value, bool):
                    raise SettingsError(f"setting {spec.name} must be True or False, not {value!r}")
                continue
            low, high = spec.metadata["low"], spec.metadata["high"]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not low <= value <= high:
                raise SettingsError(
                    f"setting {spec.name} must be a number from {low:g} to {high:g}, not {value!r} "
                    f"(environment variable {PREFIX}{spec.name.upper()})"
                )
        self._check_order("heartbeat_interval_ms", self.heartbeat_interval_ms / 1000, "heartbeat_timeout_s")
        self._check_order("reconnect_cap_ms", self.reconnect_cap_ms / 1000, "register_grace_s")
        self._check_order("heartbeat_timeout_s", self.heartbeat_timeout_s, "stall_timeout_s")
        self._check_order("heartbeat_timeout_s", self.heartbeat_timeout_s, "master_lease_s")

    def _check_order(self, small: str, seconds: float, large: str) -> None:
        if seconds >= getattr(self, large):
            raise SettingsError(
                f"setting {small}={getattr(self, small):g} must be shorter than {large}={getattr(self, large):g}"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **given: Any) -> Settings:
        """The settings of the environment, with `given` on top."""
        environ = os.environ if environ is None else environ
        known = {spec.name: spec for spec in fields(cls)}
        values: dict[str, Any] = {}
        for name, spec in known.items():
            text = environ.get(PREFIX + name.upper())
            if text is not None:
                values[name] = _parse(PREFIX + name.upper(), text, is_bool=not spec.metadata)
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise SettingsError(f"no such setting: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        return cls(**(values | given))

    def shared(self) -> dict[str, float]:
        """The settings that a whole group shares, as the master hands them out."""
        return {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.metadata.get("shared")}

    def with_shared(self, shared: Mapping[str, float]) -> Settings:
        """These settings, with the master's word on what is shared."""
        own = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return Settings(**(own | {name: value for name, value in shared.items() if name in own}))


def check_timeout(seconds: float, what: str) -> float:
    """A wait that a caller asked for: a finite number of seconds, 0 or more."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_S:
        raise SettingsError(f"{what} takes a timeout from 0 to {LONGEST_S:g} seconds, not {seconds!r}")
    return seconds


def _parse(variable: str, text: str, *, is_bool: bool) -> bool | float:
    if is_bool:
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise SettingsError(f"{variable}={text!r} must be one of 1, true, yes, on, 0, false, no, off")
        return word in _TRUE
    try:
        return float(text)
    except ValueError:
        raise SettingsError(f"{variable}={text!r} must be a number") from None
