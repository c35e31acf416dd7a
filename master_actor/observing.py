"""What onlookers may know: members' tallies, throughput over time, and the report made of all that.

Nothing here is journalled, and nothing is decided by it: after a restart members tell their tallies again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ray_pccl
from master_actor.chronicle import Chronicle
from master_actor.core.group import Group
from master_actor.core.master import Master
from master_actor.core.topology import age_of, bottleneck_of
from ray_pccl.control.messages import Tally, tally_interval_s
from ray_pccl.reports import GroupReport, HappeningKind, InFlight, MasterReport, MemberReport, Sample
from ray_pccl.types import Member

SAMPLE_S = 1.0
SAMPLES = 300
FRESH_INTERVALS = 2.5
"""For so many intervals between two tallies a member's last rate counts."""
MOST_IN_FLIGHT = 50
_NOTHING = Tally(0, 0, 0, 0, 0, 0, (), 0)


@dataclass(slots=True)
class _Told:
    """What a peer told last, and how fast it was going."""

    tally: Tally
    at: float
    bytes_per_s: float = 0.0
    operations_per_s: float = 0.0

    def again(self, tally: Tally, now: float, interval_s: float) -> None:
        """The peer tells again. It says nothing while it does nothing: a long silence was no part of its work."""
        elapsed = min(now - self.at, FRESH_INTERVALS * interval_s)
        if elapsed > 0:
            # One who connected anew counts from nothing: nothing is known of it before its next word.
            self.bytes_per_s = max(0, tally.bytes - self.tally.bytes) / elapsed
            self.operations_per_s = max(0, tally.operations - self.tally.operations) / elapsed
        self.tally, self.at = tally, now


class Observatory:
    """Everything that a master keeps for onlookers only."""

    def __init__(self, chronicle: Chronicle) -> None:
        self.chronicle = chronicle
        self._told: dict[str, _Told] = {}
        self._history: dict[str, deque[Sample]] = {}
        self._sample_due = 0.0

    def tally(self, peer_id: str, tally: Tally, world_size: int, now: float) -> None:
        """A member of a group of so many tells what it has done."""
        if (told := self._told.get(peer_id)) is not None:
            told.again(tally, now, tally_interval_s(world_size))
        else:
            self._told[peer_id] = _Told(tally, now)

    def tick(self, master: Master, now: float, wall: float) -> None:
        """Takes a sample of each group, once a second."""
        if now < self._sample_due:
            return
        self._sample_due = now + SAMPLE_S
        groups = {name: group.living for name, group in master.groups.items()}
        for name, living in groups.items():
            history = self._history.get(name)
            if history is None and not living:
                continue
            if history is None:
                history = self._history[name] = deque(maxlen=SAMPLES)
            history.append(self._sample(living, now, wall))
        for name in self._history.keys() - groups.keys():
            del self._history[name]
        present = {peer_id for living in groups.values() for peer_id in living}
        for peer_id in self._told.keys() - present:
            del self._told[peer_id]
        self.chronicle.forget(set(groups))

    def _sample(self, living: Sequence[str], now: float, wall: float) -> Sample:
        oldest = now - FRESH_INTERVALS * tally_interval_s(len(living))
        told = [told for peer in living if (told := self._told.get(peer)) is not None and told.at >= oldest]
        operations = sum(each.operations_per_s for each in told) / max(1, len(living))
        return Sample(round(wall, 3), round(sum(each.bytes_per_s for each in told), 1), round(operations, 3))

    def report(self, master: Master, now: float, wall: float, *, since: int, dashboard: str) -> MasterReport:
        """All that there is to tell, with the happenings after the number `since`."""
        identity = master.identity
        happenings = self.chronicle.after(since)
        return MasterReport(
            version=ray_pccl.__version__,
            boot=identity.boot,
            master_id=identity.master_id,
            host=identity.host,
            port=identity.port,
            pid=os.getpid(),
            at=wall,
            booted_at=self.chronicle.booted_at,
            dashboard=dashboard,
            groups=tuple(
                self._group(group, master, now)
                for group in sorted(master.groups.values(), key=lambda group: group.name)
                if group.living or len(group.room) or group.durable.epoch
            ),
            happenings=happenings,
        )

    def _group(self, group: Group, master: Master, now: float) -> GroupReport:
        durable, members = group.durable, group.living_members()
        bandwidth, counts = group.optimizer.bandwidth, self.chronicle.counts
        waiting = tuple(group.room.waiters)
        first = group.room.first.join if waiting else None
        formed = bool(members)
        return GroupReport(
            name=group.name,
            epoch=durable.epoch,
            phase=group.phase.value,
            closed=durable.closed,
            min_world_size=durable.min_world_size if formed or first is None else first.min_world_size,
            max_world_size=durable.max_world_size if formed or first is None else first.max_world_size,
            members=tuple(
                self._member(member, after, group, master, now)
                for member, after in zip(members, [*members[1:], *members[:1]], strict=True)
            ),
            waiting=waiting,
            in_flight=_in_flight(self._told[m.peer_id] for m in members if m.peer_id in self._told),
            history=tuple(self._history.get(group.name, ())),
            bottleneck=bottleneck_of(members, bandwidth),
            age_s=age_of(members, bandwidth, now),
            recoveries=counts[group.name, HappeningKind.RECOVERED],
            losses=counts[group.name, HappeningKind.LOST],
            evictions=self.chronicle.evictions[group.name],
        )

    def _member(self, member: Member, after: Member, group: Group, master: Master, now: float) -> MemberReport:
        told = self._told.get(member.peer_id)
        tally = told.tally if told is not None else _NOTHING
        apart = member.host != after.host
        return MemberReport(
            peer_id=member.peer_id,
            host=member.host,
            silent_s=round(master.liveness.silence(member.peer_id, now), 3),
            rate_to_next=group.optimizer.bandwidth.rate(member.host, after.host) if apart else None,
            operations=tally.operations,
            bytes=tally.bytes,
            aborts=tally.aborts,
            retries=tally.retries,
            failures=tally.failures,
            in_flight=tally.in_flight,
            store_bytes=tally.store_bytes,
        )


def _in_flight(tellers: Iterable[_Told]) -> tuple[InFlight, ...]:
    """The operations that members are in, each once, the longest-running first."""
    found: dict[tuple[int, str], tuple[int, float]] = {}
    for told in tellers:
        for running in told.tally.running:
            members, seconds = found.get((running.tag, running.what), (0, 0.0))
            found[running.tag, running.what] = (members + 1, max(seconds, running.seconds))
    rows = [InFlight(tag, what, members, round(seconds, 3)) for (tag, what), (members, seconds) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds)[:MOST_IN_FLIGHT])
