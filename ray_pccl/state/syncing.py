"""One sync of the shared state, in rounds of the group's own collectives. The master has no part in it.

Every round is an `all_gather` of a row a member: all survivors see the same table or none does, and from it each works
out the same verdict. The round in which nobody lacks anything any more is the commit: only after it, and then on every
survivor, are tensors written. Whoever dies, and wherever, just is in the next table no more. See
``docs/design/shared-state.md``.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ray_pccl.control.messages import Failure
from ray_pccl.errors import (
    CollectiveMismatchError,
    NoUpToDatePeerError,
    PCCLError,
    PeerLostError,
    ProtocolError,
    UsageError,
    WorldChangedError,
)
from ray_pccl.peer.requests import SHARED_STATE_TAG
from ray_pccl.ring import fault_points
from ray_pccl.state import mismatch
from ray_pccl.state.election import Election, Table, ahead_error, elect, judge
from ray_pccl.state.hashing import digest_of, digests_of, summary
from ray_pccl.state.pieces import cut
from ray_pccl.state.pulling import Puller
from ray_pccl.state.rounds import Rounds, Standing
from ray_pccl.state.rows import DIGEST_BYTES, NOWHERE, Row, SharedStateSyncStrategy
from ray_pccl.state.sharing import SharedState, SharedStateSyncInfo, check_revision
from ray_pccl.state.storing import store
from ray_pccl.state.supplying import Offer
from ray_pccl.state.tensors import Bytes

if TYPE_CHECKING:
    from ray_pccl.peer.operations import Operations
    from ray_pccl.ring.plane import DataPlane

SLICE_S = 2.0
"""How long a receiver goes on before it shows up in a round: so that who waits there knows that it lives."""
LOOK_S = 0.05
LARGE_BYTES = 64 << 20
MAX_ANEW = 8
"""How often members may be of two minds about the round they are in: when peers are admitted amid a sync."""


class Sync:
    """One call."""

    def __init__(
        self, group: Rounds, state: SharedState, strategy: SharedStateSyncStrategy, timeout: float | None, tag: int
    ) -> None:
        self._group = group
        self._tag = tag
        self._state = state
        self._me = group.peer_id
        self._timeout = timeout
        self._patience_s = group.patience_s if timeout is None else timeout
        infos = state.infos
        self._description = mismatch.packed(
            [(info.name, info.dtype, info.shape, info.allow_content_inequality) for info in infos]
        )
        self._pieces = cut([info.nbytes for info in infos], [info.allow_content_inequality for info in infos])
        self._tensor_of = {index: infos[piece.tensor].name for index, piece in enumerate(self._pieces)}
        self._contents = [info.load() for info in infos]
        self._digests = digests_of(self._contents, self._pieces)
        self._row = Row(
            nonce=secrets.token_bytes(8),
            revision=state.revision,
            known=group.standing.known,
            since=group.standing.since,
            strategy=strategy,
            form=digest_of(self._description),
            content=summary(self._digests, self._pieces, loose=False),
            loose=summary(self._digests, self._pieces, loose=True),
            has_loose=any(piece.loose for piece in self._pieces),
        )
        self._election: Election | None = None
        self._everyones: dict[str, Bytes] = {}
        """The digests of all pieces of all members."""
        self._puller: Puller | None = None
        self._offer: Offer | None = None
        self._in_round = False

    def run(self) -> SharedStateSyncInfo:
        """To the commit, or to an error: then the state is as it was."""
        try:
            table = self._rounds()
        except NoUpToDatePeerError as error:
            if error.details.get("lost"):
                self._group.standing = Standing()
            raise
        except PCCLError:
            raise
        except BaseException as error:  # an interrupt, no memory: the others are not to wait for this peer
            self._give_up(error)
            raise
        finally:
            self._let_go()
        return self._commit(table)

    def _rounds(self) -> Table:
        """Meets the others until nobody lacks anything; the last table."""
        anew = 0
        while True:
            fault_points.reach("state_round")
            try:
                table = self._gather_rows()
                if self._is_over(table):
                    return table
            except (PeerLostError, WorldChangedError):
                continue  # for everyone alike
            except CollectiveMismatchError:
                # Peers were admitted amid the sync, and began their own: all begin again, together.
                anew += 1
                if anew > MAX_ANEW or self._tag != SHARED_STATE_TAG:
                    raise
                self._forget_election()
                continue
            self._transfer()

    def _gather_rows(self) -> Table:
        rows = self._gather(self._own_row().pack())
        try:
            return {peer: Row.unpack(row) for peer, row in rows.items()}
        except ValueError as error:
            raise ProtocolError(f"a row of a sync that can't be read: {error}") from None

    def _gather(self, mine: bytes) -> dict[str, bytes]:
        self._in_round = True
        try:
            gathered = self._group.gather(mine, self._timeout, self._tag)
        except PCCLError:
            self._in_round = False
            raise
        self._in_round = False
        return gathered

    def _own_row(self) -> Row:
        puller, election = self._puller, self._election
        if election is None:
            return self._row.at(NOWHERE)
        if puller is None:
            return self._row.at(election.sync)
        missing = puller.missing
        late = bool(missing) and time.monotonic() - puller.last_arrival > self._patience_s
        return self._row.at(election.sync, missing=missing, overdue=late, spoilt=puller.spoilt)

    def _is_over(self, table: Table) -> bool:
        """Whether the table commits. Begins or goes on with the transfer if it does not."""
        election = self._election
        if election is not None and all(row.sync == election.sync for row in table.values()):
            if judge(table, election, self._tensor_of):
                return True
            self._follow(table)
            return False
        # The first table, or someone has just come: what was elected before is not everyone's.
        self._forget_election()
        if len({row.form for row in table.values()}) > 1:
            raise mismatch.mismatch(self._gather_descriptions())
        election = elect(table)
        if not election.receivers:
            self._election = election
            return True
        everyones = self._gather(self._digests.tobytes())
        if everyones.keys() != table.keys():
            return False
        self._election = election
        self._everyones = {
            peer: np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES) for peer, digests in everyones.items()
        }
        self._begin(election)
        return False

    def _gather_descriptions(self) -> Mapping[str, mismatch.Description]:
        sizes = self._gather(len(self._description).to_bytes(8, "little"))
        largest = max(int.from_bytes(size, "little") for size in sizes.values())
        texts = self._gather(self._description.ljust(largest, b"\0"))
        if texts.keys() != sizes.keys():
            raise WorldChangedError("members have come or gone in between")
        try:
            return {
                peer: mismatch.unpacked(text[: int.from_bytes(sizes[peer], "little")]) for peer, text in texts.items()
            }
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a description of a state that can't be read: {error}") from None

    # ---------------------------------------------------------------------------------------------- the transfer

    def _begin(self, election: Election) -> None:
        if self._me in election.sources:
            self._offer = Offer(self._contents, self._pieces, keeps=len(election.receivers) > 1)
            self._group.supply.offer(election.sync, self._offer)
        if self._me in election.receivers:
            wanted, needed = self._needs(election.sources)
            self._puller = self._group.puller(election.sync, self._pieces, wanted)
            self._puller.want(needed, wanted, self._held_by(election.sources))

    def _needs(self, sources: Sequence[str]) -> tuple[Bytes, list[int]]:
        """The digests that the pieces here must have, and which pieces have others. Of the living sources."""
        assert self._election is not None
        model = self._everyones[sources[0]]
        differs = (model != self._digests).any(axis=1)
        if self._me not in self._election.newcomers:
            differs &= ~np.fromiter((piece.loose for piece in self._pieces), bool, len(self._pieces))
        return model, [int(index) for index in np.nonzero(differs)[0]]

    def _held_by(self, sources: Sequence[str]) -> dict[str, Bytes]:
        return {source: self._everyones[source] for source in sources}

    def _follow(self, table: Table) -> None:
        """Goes on with the sources that are left."""
        puller, election = self._puller, self._election
        if puller is None or election is None:
            return
        living = [source for source in election.sources if source in table]
        for source in set(puller.sources) - set(living):
            puller.drop(source)
        is_new = self._me in election.newcomers
        if is_new and living and not np.array_equal(puller.wanted, self._everyones[living[0]]):
            wanted, needed = self._needs(living)  # what may differ now comes from another
            puller.want(needed, wanted, self._held_by(living))

    def _transfer(self) -> None:
        """A while of the transfer, for who receives; whoever does not goes to wait in the next round at once."""
        puller = self._puller
        if puller is None:
            return
        ends = time.monotonic() + min(SLICE_S, self._patience_s / 4)
        while not puller.wait(LOOK_S) and time.monotonic() < ends and puller.spoilt < 0:
            members = self._group.members
            for source in puller.sources:
                if source not in members:
                    puller.drop(source)
            if not puller.sources:
                return

    def _forget_election(self) -> None:
        self._let_go()
        self._election = self._puller = self._offer = None

    def _let_go(self) -> None:
        if self._puller is not None:
            self._puller.stop()
        if self._election is not None:
            self._group.supply.withdraw(self._election.sync)

    def _give_up(self, error: BaseException) -> None:
        text = f"peer {self._me} was interrupted in sync_shared_state(): {type(error).__name__} {error}"
        if self._in_round:
            return  # the round itself has told the others
        with contextlib.suppress(PCCLError):
            self._group.refuse(Failure("PCCLError", text), self._timeout, self._tag)

    # ------------------------------------------------------------------------------------------------ the commit

    def _commit(self, table: Table) -> SharedStateSyncInfo:
        election, puller = self._election, self._puller
        assert election is not None
        if self._me in election.ahead:
            self._group.standing.note(election.revision)
            raise ahead_error(self._me, table, election)
        updated: tuple[str, ...] = ()
        fault_points.reach("state_committing")
        if puller is not None:
            try:
                updated = store(self._state.infos, self._contents, self._pieces, puller.arrived)
            except BaseException:
                self._group.standing = Standing()  # part of it is written: this peer is a newcomer from now on
                raise
        self._state.revision = election.revision
        self._group.standing.note(election.revision)
        sent = self._offer.tx_bytes if self._offer is not None else 0
        received = 0
        if puller is not None:
            received = puller.rx_bytes
            if received >= LARGE_BYTES:  # giving so much back to the kernel takes as long as copying it
                threading.Thread(target=puller.arrived.clear, name="ray_pccl-free", daemon=True).start()
        return SharedStateSyncInfo(sent, received, election.revision, updated)


class SharedStates(Rounds):
    """The syncs of one membership, one at a time."""

    def __init__(self, operations: Operations, plane: DataPlane, peer_id: str) -> None:
        super().__init__(operations, plane, peer_id)
        self._busy = threading.Lock()

    def sync(
        self,
        state: SharedState,
        strategy: SharedStateSyncStrategy,
        timeout: float | None = None,
        *,
        tag: int = SHARED_STATE_TAG,
    ) -> SharedStateSyncInfo:
        """See `Communicator.sync_shared_state`.

        With a tag of the caller's, its rounds meet whatever else has that tag: members that are in another operation
        of the caller's are a `CollectiveMismatchError` on all then, at once, and it is the caller who begins anew.
        """
        if not isinstance(state, SharedState):
            raise UsageError(f"a SharedState is due, not {type(state).__name__}: make one of your tensors")
        if not isinstance(strategy, SharedStateSyncStrategy):
            raise UsageError(f"strategy is a SharedStateSyncStrategy, not {strategy!r}")
        check_revision(state.revision)
        if not self._busy.acquire(blocking=False):
            raise UsageError("the shared state of this group is being synchronised already: wait for that call")
        try:
            return self._begun(state, strategy, timeout, tag).run()
        finally:
            self._busy.release()

    def _begun(self, state: SharedState, strategy: SharedStateSyncStrategy, timeout: float | None, tag: int) -> Sync:
        try:
            return Sync(self, state, strategy, timeout, tag)
        except BaseException as error:  # of reading and hashing: the others are not to wait for this peer
            text = f"peer {self.peer_id} could not read its shared state: {type(error).__name__} {error}"
            with contextlib.suppress(PCCLError):
                self.refuse(Failure("PCCLError", text), timeout, tag)
            raise
