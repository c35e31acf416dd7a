"""The faults that a test can inject, each undone by nothing but what the product does, or by its own opposite."""

from __future__ import annotations

import signal

from ray_pccl.testing.groups import PeerStarter
from ray_pccl.testing.master import MasterProcess
from ray_pccl.testing.ownership import send_signal
from ray_pccl.testing.peers import PeerProcess
from ray_pccl.testing.relay import Relay


class Faults:
    """Does harm to peers, to the master and to the wires between them.

    A peer is a `PeerProcess` or a pid. Signals may also be sent to the pid of a Ray actor, if it runs in a Ray that a
    fixture started; a process that no fixture started gets none (`PermissionError`).
    """

    def __init__(self, master: MasterProcess, peers: PeerStarter) -> None:
        self._master = master
        self._peers = peers

    def kill(self, peer: PeerProcess | int) -> None:
        """SIGKILL: returns when the process is gone; it has said nothing to anyone."""
        send_signal(_pid(peer), signal.SIGKILL)

    def stop(self, peer: PeerProcess | int) -> None:
        """SIGSTOP: the process freezes; its connections stay."""
        send_signal(_pid(peer), signal.SIGSTOP)

    def resume(self, peer: PeerProcess | int) -> None:
        """SIGCONT: a stopped process goes on."""
        send_signal(_pid(peer), signal.SIGCONT)

    def cut(self, peer: PeerProcess | int) -> None:
        """Breaks the peer's control connection: it is taken for dead, dials again at once, and finds itself evicted."""
        self._peers.find(peer).cut()

    def kill_master(self, *, restart: bool = True) -> None:
        """SIGKILL of the master. With `restart` it is started again, on its journal, and listens when this returns."""
        self._master.kill()
        if restart:
            self._master.start()

    def start_master(self) -> None:
        """Starts the killed master again, on its journal, port and key; it listens when this returns."""
        self._master.start()

    def delay(self, seconds: float, peer: PeerProcess | int | None = None) -> None:
        """Delays each message between the peer and the master, both ways; without a peer, all of them, also later ones.

        Only for peers that were started with ``relay=True``. 0 ends it.
        """
        if peer is not None:
            self._relay(peer).delay(seconds)
            return
        self._peers.delay_s = seconds
        for started in self._peers.peers:
            if started.relay is not None and started.alive:
                started.relay.delay(seconds)

    def partition(self, peer: PeerProcess | int) -> None:
        """Lets nothing through between the peer and the master, and closes nothing: neither side is told.

        Only for peers that were started with ``relay=True``.
        """
        self._relay(peer).partition()

    def heal(self, peer: PeerProcess | int, *, reset: bool = False) -> None:
        """Ends a partition. What was held back arrives, as TCP sends it again; with `reset` the connections break."""
        self._relay(peer).heal(reset=reset)

    def _relay(self, peer: PeerProcess | int) -> Relay:
        relay = self._peers.find(peer).relay
        if relay is None:
            raise ValueError(f"{peer!r} has no relay: start it with peer_group(n, relay=True)")
        return relay


def _pid(peer: PeerProcess | int) -> int:
    return peer.pid if isinstance(peer, PeerProcess) else peer
