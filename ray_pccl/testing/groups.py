"""Groups of peers, each in a process of its own, and what starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.settings import Settings
from ray_pccl.testing import peer_process
from ray_pccl.testing.ownership import Ownership
from ray_pccl.testing.peers import CALL_TIMEOUT_S, PeerProcess
from ray_pccl.testing.relay import Relay


class PeerGroup(Sequence[PeerProcess]):
    """Peers in the order they were started, the dead included."""

    def __init__(self, start: Callable[[Mapping[str, Any]], PeerProcess]) -> None:
        self._start = start
        self._peers: list[PeerProcess] = []

    def add(self, count: int = 1, *, connect: bool = True, **communicator: Any) -> list[PeerProcess]:
        """Starts more peers, with the group's arguments and these on top, and does not wait for them to be admitted.

        ``peer.joined`` is the future of each one's `connect()`. With ``connect=False`` they wait to be told to.
        """
        added = [self._start(communicator) for _ in range(count)]
        self._peers += added
        for peer in added:
            if connect:
                peer.connect()
        return added

    def call(self, name: str, /, *args: Any, timeout: float = CALL_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Calls a method of all living peers at the same time; their answers, in the group's order."""
        started = [(peer, peer.call_async(name, *args, **kwargs)) for peer in self._peers if peer.alive]
        return [peer.result_of(answer, timeout, f"{name}()") for peer, answer in started]

    def wait_epoch(self, epoch: int, timeout: float = 10.0) -> None:
        """Returns when all living peers are in this epoch or a later one."""
        living = [peer for peer in self._peers if peer.alive]
        started = [peer.ask(peer_process.wait_epoch, epoch, timeout) for peer in living]
        for peer, answer in zip(living, started, strict=True):
            peer.result_of(answer, timeout + CALL_TIMEOUT_S, "wait_epoch()")

    @overload
    def __getitem__(self, index: int) -> PeerProcess: ...
    @overload
    def __getitem__(self, index: slice) -> list[PeerProcess]: ...
    def __getitem__(self, index: int | slice) -> PeerProcess | list[PeerProcess]:
        return self._peers[index]

    def __len__(self) -> int:
        return len(self._peers)

    def __iter__(self) -> Iterator[PeerProcess]:
        return iter(self._peers)


class PeerStarter:
    """Starts groups of peers that connect to one master; the fixture `peer_group` is one."""

    def __init__(self, endpoint: Endpoint, ownership: Ownership) -> None:
        self._endpoint = endpoint
        self._ownership = ownership
        self.peers: list[PeerProcess] = []
        """Every peer that was started."""
        self.delay_s = 0.0
        """What the relays of peers yet to come delay messages by."""

    def __call__(
        self,
        count: int,
        *,
        relay: bool = False,
        connect: bool = True,
        timeout: float = CALL_TIMEOUT_S,
        environment: Mapping[str, str] | None = None,
        **communicator: Any,
    ) -> PeerGroup:
        """Starts `count` peers and returns when they are a group.

        Args:
            count: How many, and the ``min_world_size`` if none is given. With 0 the group is empty: `add` starts peers.
            relay: Put a relay between each peer and the master, so that `faults` can delay and hold back messages. Such
                peers run without the sentinel: it dials the address that a peer gives it, and would tell the master
                through that relay, or around it, that the process behind a cut wire is alive.
            connect: Have them connect, and wait for it. Without it each waits to be told to.
            timeout: How long to wait for the group to form, in seconds.
            environment: Environment variables for the peers.
            communicator: Arguments for each `Communicator`. Unless given settings, the group forms as soon as `count`
                peers are there, without a last call for more.
        """
        communicator.setdefault("min_world_size", max(1, count))
        fitting: dict[str, Any] = {"last_call_s": 0.0} | ({"sentinel": False} if relay else {})
        settings = communicator.setdefault("settings", Settings.from_env(None, **fitting))
        if relay and settings.sentinel:
            raise ValueError("relayed peers need Settings(sentinel=False): a sentinel's word does not pass their relay")

        def start(more: Mapping[str, Any]) -> PeerProcess:
            wire = Relay(self._endpoint, delay_s=self.delay_s) if relay else None
            master = {"master": wire.endpoint if wire is not None else self._endpoint}
            arguments = master | communicator | dict(more)
            peer = PeerProcess(arguments, self._ownership, environment=environment, relay=wire)
            self.peers.append(peer)
            return peer

        group = PeerGroup(start)
        for peer in group.add(count, connect=connect):
            if connect:
                peer.result_of(peer.joined, timeout, "connect()")
        return group

    def find(self, peer: PeerProcess | int) -> PeerProcess:
        """The peer with this pid; `LookupError` if none of ours has it."""
        if isinstance(peer, PeerProcess):
            return peer
        for candidate in self.peers:
            if candidate.pid == peer:
                return candidate
        raise LookupError(f"process {peer} is no peer of the fixture peer_group")

    def end(self) -> None:
        """Ends every peer."""
        with contextlib.ExitStack() as ends:
            for peer in self.peers:
                ends.callback(peer.end)
