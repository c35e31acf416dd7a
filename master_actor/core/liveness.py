"""Who is alive, from every sign there is: connections, beats, and what sentinels see.

The table in `docs/design/membership.md` ("When is a peer dead?") is this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_pccl.control.messages import ProcessState
from ray_pccl.settings import Settings

SENTINEL_PATIENCE_S = 5.0
"""How long after a peer's connection its sentinel may take to say that it watches."""


@dataclass(slots=True)
class Pulse:
    """What is known of one connected peer."""

    host: str
    watched: bool
    connected: float
    heard: float
    seen: bool = False
    """Whether a sentinel has ever said something about its process."""
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

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.peers: dict[str, Pulse] = {}
        self.hosts: dict[str, Host] = {}
        self._processes: dict[str, dict[str, ProcessState]] = {}

    def connected(self, peer_id: str, host: str, *, watched: bool, now: float) -> None:
        """A peer has a connection, perhaps a new one."""
        seen = self._processes.get(host, {}).get(peer_id)
        self.peers[peer_id] = pulse = Pulse(host, watched, now, now, seen=seen is not None)
        self.hosts.setdefault(host, Host(now)).heard = now
        if seen is ProcessState.STOPPED:
            pulse.stopped_since = now

    def disconnected(self, peer_id: str) -> bool:
        """A peer's connection is gone. True if that is as certain as its death gets.

        Where a sentinel watches, only its word is: a connection may also be closed by what lies in between.
        """
        pulse = self.peers.pop(peer_id, None)
        if pulse is None:
            return False
        self._forget_idle_host(pulse.host)
        return not pulse.watched

    def heard(self, peer_id: str, now: float) -> None:
        """A peer gave a sign of life."""
        pulse = self.peers.get(peer_id)
        if pulse is not None:
            pulse.heard = now
            self.hosts[pulse.host].heard = now
            if pulse.stopped_since is not None:
                # It ran since, too briefly for its sentinel to see: two short freezes are not a long one.
                pulse.stopped_since = now

    def sentinel_heard(self, host: str, now: float) -> None:
        """The sentinel of a host gave a sign of life."""
        entry = self.hosts.setdefault(host, Host(now))
        entry.heard = now
        entry.sentinel = True

    def sentinel_gone(self, host: str, now: float) -> None:
        """A sentinel's connection closed: its peers' own beats have to do until there is another."""
        self._processes.pop(host, None)
        for pulse in self.peers.values():
            if pulse.host == host:
                pulse.stopped_since = None
                pulse.seen, pulse.connected = False, now  # another one has as long to come as the first
        if host in self.hosts:
            self.hosts[host].sentinel = False
            self._forget_idle_host(host)

    def seen(self, host: str, peer_id: str, state: ProcessState, now: float) -> None:
        """A sentinel saw a peer's process."""
        states = self._processes.setdefault(host, {})
        states[peer_id] = state
        if state in (ProcessState.EXITING, ProcessState.RELEASED):
            del states[peer_id]
        pulse = self.peers.get(peer_id)
        if pulse is not None:
            pulse.seen = state is not ProcessState.RELEASED
            pulse.stopped_since = now if state is ProcessState.STOPPED else None

    def silence(self, peer_id: str, now: float) -> float:
        """For how long a connected peer was not heard."""
        pulse = self.peers.get(peer_id)
        return 0.0 if pulse is None else max(0.0, now - pulse.heard)

    def tick(self, now: float) -> list[Verdict]:
        """Those who are dead by now."""
        verdicts = []
        for peer_id, pulse in self.peers.items():
            reason = self._reason(pulse, now)
            if reason is not None:
                verdicts.append(Verdict(peer_id, reason))
        return verdicts

    def _reason(self, pulse: Pulse, now: float) -> str | None:
        short, long = self._settings.heartbeat_timeout_s, self._settings.stall_timeout_s
        host = self.hosts[pulse.host]
        if pulse.stopped_since is not None and now - pulse.stopped_since >= short:
            return f"its process was stopped (SIGSTOP) for {short:g} s"
        # A sentinel that does not come in time can't be counted on.
        watched = pulse.watched and (pulse.seen or now - pulse.connected < SENTINEL_PATIENCE_S)
        if not watched and now - pulse.heard >= short:
            return f"no heartbeat for {short:g} s, and no sentinel watches its process"
        if host.sentinel and now - host.heard >= short:
            return f"nothing was heard from its host {pulse.host} for {short:g} s: lost, frozen or cut off"
        if now - pulse.heard >= long:
            return f"its process runs, but its heartbeat thread was silent for {long:g} s: a deadlocked GIL?"
        return None

    def _forget_idle_host(self, host: str) -> None:
        if not self.hosts[host].sentinel and not any(pulse.host == host for pulse in self.peers.values()):
            del self.hosts[host]
