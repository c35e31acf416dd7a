"""Who is alive, from every sign there is: connections, beats, and what sentinels see.

The table in `docs/design/membership.md` ("When is a peer dead?") is this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_pccl.control.messages import ProcessState
from ray_pccl.settings import Settings


@dataclass(slots=True)
class Pulse:
    """What is known of one connected peer."""

    host: str
    watched: bool
    heard: float
    stopped_since: float | None = None


@dataclass(slots=True)
class Host:
    """What is known of one host. `heard`: the last sign of life of any process on it."""

    heard: float
    sentinel: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A peer that is taken for dead; not for certain, or its sentinel would have said so."""

    peer_id: str
    reason: str


class Liveness:
    """Keeps the signs of life, and tells who has given none for too long."""

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._ticked = now
        self.peers: dict[str, Pulse] = {}
        self.hosts: dict[str, Host] = {}
        self._processes: dict[str, dict[str, ProcessState]] = {}

    def connected(self, peer_id: str, host: str, *, watched: bool, now: float) -> None:
        """A peer has a connection, perhaps a new one."""
        self.peers[peer_id] = pulse = Pulse(host, watched, now)
        self.hosts.setdefault(host, Host(now)).heard = now
        if self._processes.get(host, {}).get(peer_id) is ProcessState.STOPPED:
            pulse.stopped_since = now

    def disconnected(self, peer_id: str) -> bool:
        """A peer's connection is gone. True if its process can't be running any more, as far as anyone can tell."""
        pulse = self.peers.pop(peer_id, None)
        if pulse is None:
            return False
        seen = self._processes.get(pulse.host, {}).get(peer_id)
        self._forget_idle_host(pulse.host)
        return seen in (None, ProcessState.EXITING)

    def heard(self, peer_id: str, now: float) -> None:
        """A peer gave a sign of life."""
        pulse = self.peers.get(peer_id)
        if pulse is not None:
            pulse.heard = now
            self.hosts[pulse.host].heard = now

    def sentinel_heard(self, host: str, now: float) -> None:
        """The sentinel of a host gave a sign of life."""
        entry = self.hosts.setdefault(host, Host(now))
        entry.heard = now
        entry.sentinel = True

    def sentinel_gone(self, host: str) -> None:
        """A sentinel's connection closed: its peers' own beats have to do until there is another."""
        self._processes.pop(host, None)
        if host in self.hosts:
            self.hosts[host].sentinel = False
            self._forget_idle_host(host)

    def seen(self, host: str, peer_id: str, state: ProcessState, now: float) -> None:
        """A sentinel saw a peer's process."""
        states = self._processes.setdefault(host, {})
        states[peer_id] = state
        if state is ProcessState.EXITING:
            del states[peer_id]
        pulse = self.peers.get(peer_id)
        if pulse is not None:
            pulse.stopped_since = now if state is ProcessState.STOPPED else None

    def tick(self, now: float) -> list[Verdict]:
        """Those who are dead by now."""
        self._excuse_own_delay(now)
        verdicts = []
        for peer_id, pulse in self.peers.items():
            reason = self._reason(pulse, now)
            if reason is not None:
                verdicts.append(Verdict(peer_id, reason))
        return verdicts

    def _excuse_own_delay(self, now: float) -> None:
        delay = now - self._ticked
        self._ticked = now
        if delay < self._settings.heartbeat_timeout_s / 2:
            return
        for pulse in self.peers.values():
            pulse.heard = min(now, pulse.heard + delay)
            if pulse.stopped_since is not None:
                pulse.stopped_since = min(now, pulse.stopped_since + delay)
        for host in self.hosts.values():
            host.heard = min(now, host.heard + delay)

    def _reason(self, pulse: Pulse, now: float) -> str | None:
        short, long = self._settings.heartbeat_timeout_s, self._settings.stall_timeout_s
        host = self.hosts[pulse.host]
        if pulse.stopped_since is not None and now - pulse.stopped_since >= short:
            return f"its process was stopped (SIGSTOP) for {short:g} s"
        if not pulse.watched and now - pulse.heard >= short:
            return f"no heartbeat for {short:g} s, and no sentinel watches its process"
        if host.sentinel and now - host.heard >= short:
            return f"nothing was heard from its host {pulse.host} for {short:g} s: lost, frozen or cut off"
        if now - pulse.heard >= long:
            return f"its process runs, but its heartbeat thread was silent for {long:g} s: a deadlocked GIL?"
        return None

    def _forget_idle_host(self, host: str) -> None:
        if not self.hosts[host].sentinel and not any(pulse.host == host for pulse in self.peers.values()):
            del self.hosts[host]
