"""How torchrun's agents find one another: a rendezvous handler on a group of the master's.

The agents of a run are a group, its members are the nodes, and a round is what all of them agree on in a vote. See
`docs/design/torch-rendezvous.md`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import api

from ray_pccl.control.endpoint import Endpoint
from ray_pccl.control.messages import Question, VoteKind
from ray_pccl.errors import (
    MasterUnreachableError,
    PCCLError,
    PeerEvictedError,
    RendezvousClosedError,
    StoreTimeoutError,
)
from ray_pccl.peer.communicator import Communicator
from ray_pccl.ring.dialing import address_towards
from ray_pccl.settings import Settings
from ray_pccl.torch.rendezvous_errors import as_rendezvous_errors
from ray_pccl.torch.round_store import RoundBrokenError, RoundStore
from ray_pccl.torch.rounds import Round, Sight, lost_nodes, nodes_waiting
from ray_pccl.torch.store import DEFAULT_TIMEOUT, StoreUnavailableError
from ray_pccl.types import MembershipChange, MembershipEvent

log = logging.getLogger("ray_pccl.torch")

ASKING_S = 10.0
"""How long one request for news of other nodes lasts, before the next is made."""
UNREACHABLE_PAUSE_S = 1.0
_ALL_HERE = "all_here"
_TELLING = (MembershipChange.WAITING, MembershipChange.WITHDRAWN, MembershipChange.EPOCH, MembershipChange.MASTER_BACK)


class PCCLRendezvousHandler(api.RendezvousHandler):
    """One node of a run that torchrun started with ``--rdzv-backend=pccl``.

    The nodes that are lost, and those that come, make the agents of all others end their workers and meet again. The
    master may be killed and restarted meanwhile: nobody notices. Survivors keep their order, newcomers come last.

    Args:
        backend: The name under which torch knows this handler.
        endpoint: The master.
        run_id: Names the run. One that has ended is closed for good: the next one needs another id.
        min_nodes: The run goes on with this many or more.
        max_nodes: At most this many take part; others wait.
        local_addr: Where workers reach this node; the address on the way to the master if not given.
        join_timeout_s: How long `next_rendezvous` waits for enough nodes.
        close_timeout_s: How long `shutdown` tries to tell the master.
        settings: Of the node's membership; among them the last call.
    """

    def __init__(
        self,
        backend: str,
        endpoint: Endpoint,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        *,
        local_addr: str | None = None,
        join_timeout_s: float = 600.0,
        close_timeout_s: float = 5.0,
        settings: Settings | None = None,
    ) -> None:
        self._backend = backend
        self._run_id = run_id
        self._max_nodes = max_nodes
        settings = settings if settings is not None else Settings.from_env()
        self._last_call_s = settings.last_call_s
        self._endpoint, self._local_addr = endpoint, local_addr
        self._join_timeout_s = join_timeout_s
        self._close_timeout_s = close_timeout_s
        self._communicator = Communicator(
            f"torchrun/{run_id}",
            master=endpoint,
            min_world_size=min_nodes,
            max_world_size=max_nodes,
            settings=settings,
        )
        self._communicator.on_membership(self._heard)
        self._round: Round | None = None
        self._store: RoundStore | None = None
        self._server: TCPStore | None = None
        self._joined = False
        # What only the master knows, as it last said. Written by other threads, one field at a time.
        self._waiting = 0
        self._closed = False
        self._asked_again: str = ""
        self._asking = threading.Lock()
        self._news = threading.Condition()

    # --------------------------------------------------------------------------------------- what torch asks for

    def get_backend(self) -> str:
        """The name under which torch knows this handler."""
        return self._backend

    def get_run_id(self) -> str:
        """The run's name."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's agent serves the store of all workers; if not, rank 0's worker does."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> api.RendezvousInfo:
        """Meets the other nodes: blocks until at least the minimum is here, and all of them know it.

        Raises:
            RendezvousClosedError: The run has ended.
            RendezvousTimeoutError: Not enough nodes in time, or a node of the last round did not come.
            RendezvousConnectionError: No master.
            RendezvousError: The master refused this node; the text says why.
        """
        deadline = time.monotonic() + self._join_timeout_s
        with as_rendezvous_errors(self._run_id):
            while True:
                try:
                    round_ = self._meet(deadline)
                    past, self._store = self._store, None
                    if past is not None:
                        past.forget()
                    return self._agree(round_, deadline)
                except RoundBrokenError as error:
                    log.info("run %r: a node was lost while the nodes met, so they meet again: %s", self._run_id, error)
                except PeerEvictedError as error:
                    self._rejoin(error)
                except StoreUnavailableError as error:
                    if not isinstance(error.__cause__, PeerEvictedError):
                        raise
                    self._rejoin(error)

    def num_nodes_waiting(self) -> int:
        """Whether the nodes have to meet again, in the form that torch's agent understands. Never blocks."""
        round_ = self._round
        return 0 if round_ is None else nodes_waiting(round_, self._look(round_), self._max_nodes)

    def is_closed(self) -> bool:
        """Whether the run has ended."""
        with as_rendezvous_errors(self._run_id):
            return self._communicator.is_closed() if self._joined else self._closed

    def set_closed(self) -> None:
        """Ends the run: no node comes in any more, and the nodes do not meet again."""
        with as_rendezvous_errors(self._run_id):
            if self._joined:
                self._communicator.set_closed()
            self._closed = True

    def shutdown(self) -> bool:
        """Ends the run and leaves it; tells whether the master heard of it."""
        told = threading.Event()

        def tell() -> None:
            try:
                self.set_closed()
            except api.RendezvousError as error:
                log.warning("run %r: the master could not be told that it has ended: %s", self._run_id, error)
            else:
                told.set()

        teller = threading.Thread(target=tell, name="ray_pccl-closing", daemon=True)
        teller.start()
        teller.join(self._close_timeout_s)  # a master that is gone must not keep a run from ending
        self._round = None
        if self._store is not None:
            self._store.close()
        self._communicator.close()
        self._server = None
        return told.is_set()

    # -------------------------------------------------------------------------------------------------- meeting

    def _meet(self, deadline: float) -> Round:
        """Comes in, or votes with all others to let in who waits: the round that comes of it."""
        last = self._round
        if not self._joined:
            self._communicator.connect(_until(deadline))
            self._joined = True
        else:
            self._refuse_if_closed()
            if last is not None:
                self._communicator.store.set(last.again_key, self._communicator.peer_id)
            self._last_call(deadline)
            # Not update_topology(): a newcomer's first call of that is none, and here all have to come.
            self._communicator._vote(VoteKind.UPDATE_TOPOLOGY, _until(deadline))
        self._communicator.await_minimum(_until(deadline))
        self._refuse_if_closed()
        if last is not None and self._communicator.rank == 0:
            self._communicator.store.delete(last.again_key)
        # Nobody is admitted without this node's vote, so the two belong together.
        meeting = self._communicator._connected().membership.served(VoteKind.UPDATE_TOPOLOGY)
        view = self._communicator._view()
        return Round(view.epoch, meeting, view.rank, tuple(member.peer_id for member in view.members))

    def _last_call(self, deadline: float) -> None:
        """Where there is room, waits a moment for who may come, so that two newcomers cost the workers one restart."""
        ends = min(deadline, time.monotonic() + self._last_call_s)
        with self._news:
            self._news.wait_for(
                lambda: len(self._communicator.members) + self._waiting >= self._max_nodes,
                timeout=max(0.0, ends - time.monotonic()),
            )

    def _agree(self, round_: Round, deadline: float) -> api.RendezvousInfo:
        """Makes sure that all nodes of the round are here, and know where their workers meet."""
        self._round = round_
        self._store = RoundStore(self._communicator, lambda: self._why_over(round_))
        store = PrefixStore(round_.prefix, self._store)
        store.set_timeout(timedelta(seconds=_until(deadline)))
        address = self._local_addr or address_towards(self._endpoint.host, self._endpoint.port)
        # Each round has a server of its own: what the workers of the last one left in theirs is not to be found.
        self._server = None
        if round_.rank == 0 and self.use_agent_store:
            self._server = TCPStore(address, 0, is_master=True, multi_tenant=True, wait_for_workers=False)
        port = None if self._server is None else self._server.port
        workers_meet_at = api.RendezvousStoreInfo.build(round_.rank, store, address, port)
        if store.add("arrived", 1) == round_.world_size:
            store.set(_ALL_HERE, "")
        store.wait([_ALL_HERE])
        store.set_timeout(DEFAULT_TIMEOUT)
        threading.Thread(target=self._listen, args=(round_,), name="ray_pccl-rendezvous", daemon=True).start()
        log.info("run %r: node %d of %d (%s)", self._run_id, round_.rank, round_.world_size, round_.prefix)
        return api.RendezvousInfo(store, round_.rank, round_.world_size, workers_meet_at)

    def _rejoin(self, error: Exception) -> None:
        log.warning("run %r: this node was taken for dead, and joins again: %s", self._run_id, error)
        self._joined = False

    # ----------------------------------------------------------------------------------- what happens meanwhile

    def _look(self, round_: Round) -> Sight:
        members: tuple[str, ...] | None = round_.members
        try:
            members = self._communicator.members
        except PeerEvictedError:
            members = None
        except PCCLError as error:  # closed at the very moment
            log.debug("run %r: %s", self._run_id, error)
        return Sight(members, self._waiting, self._asked_again == round_.prefix, self._closed)

    def _why_over(self, round_: Round) -> str:
        gone = lost_nodes(round_, self._look(round_))
        return f"{', '.join(gone)} lost" if gone else ""

    def _heard(self, event: MembershipEvent) -> None:
        """In the communicator's thread for callbacks."""
        if event.change is MembershipChange.CLOSED:
            self._closed = True
        elif event.change in _TELLING:
            try:
                self._read_news()
            except PCCLError as error:  # the next event, such as that of the master's return, asks again
                log.debug("run %r: no news: %s", self._run_id, error)

    def _read_news(self) -> None:
        with self._asking:  # so that an older answer never replaces a newer one
            reply = self._communicator._query(Question.NUM_WAITING)
            with self._news:
                self._waiting, self._closed = reply.amount, self._closed or reply.flag
                self._news.notify_all()

    def _refuse_if_closed(self) -> None:
        self._read_news()
        if self._closed:
            raise RendezvousClosedError(f"the run {self._run_id!r} has ended")

    def _listen(self, round_: Round) -> None:
        """Waits, in a thread of its own, for a node that leaves the round for the next one."""
        while self._round is round_:
            try:
                self._communicator.store.wait([round_.again_key], ASKING_S)
            except StoreTimeoutError:
                continue
            except MasterUnreachableError:
                time.sleep(UNREACHABLE_PAUSE_S)
                continue
            except PCCLError:  # this node is in the group no more, which is news enough
                return
            self._asked_again = round_.prefix
            return


def _until(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
