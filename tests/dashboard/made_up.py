"""Reports that no master made: groups of any size, that live on from second to second."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field

from ray_pccl.reports import (
    GroupReport,
    Happening,
    HappeningKind,
    InFlight,
    MasterReport,
    MemberReport,
    Sample,
)

MB = 1e6
HISTORY_S = 300


@dataclass
class MadeUpMember:
    peer_id: str
    host: str
    operations: int = 0
    bytes: int = 0
    aborts: int = 0
    retries: int = 0


@dataclass
class MadeUpMaster:
    """A master with one group (or none), whose report changes from call to call."""

    hosts: int = 3
    members: int = 8
    group: str = "train"
    boot: int = 1
    seed: int = 1
    past: bool = True
    """Whether the group has run for five minutes already."""
    now: float = field(default_factory=time.time)
    rates: tuple[float, ...] = (1180 * MB, 940 * MB, 118 * MB, 610 * MB, 1050 * MB, 320 * MB)
    dashboard: str = ""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.booted_at = self.now - 1260
        self.ring: list[MadeUpMember] = []
        self.happenings: list[Happening] = []
        self.history: list[Sample] = []
        self.epoch = 0
        self.recoveries = 0
        self.waiting: tuple[str, ...] = ()
        self.others: list[GroupReport] = []
        self._members_ever = 0
        self._tell(HappeningKind.BOOTED, at=self.booted_at, group="", reason=f"boot {self.boot}")
        if self.members:
            self._form()

    def _tell(self, kind: HappeningKind, *, at: float | None = None, **more: object) -> None:
        arguments: dict[str, object] = {"group": self.group, "epoch": self.epoch, "members": len(self.ring)} | more
        self.happenings.append(
            Happening(number=len(self.happenings) + 1, at=self.now if at is None else at, kind=kind, **arguments)  # type: ignore[arg-type]
        )

    def _new_member(self, host: int) -> MadeUpMember:
        self._members_ever += 1
        name = f"10.0.{host // 250}.{host % 250 + 11}" if self.hosts > 26 else f"node-{chr(97 + host)}"
        return MadeUpMember(f"{self._random.getrandbits(48):012x}", name)

    def _form(self) -> None:
        began = self.now - HISTORY_S
        for index in range(self.members):
            member = self._new_member(index * self.hosts // self.members)
            self._tell(HappeningKind.WAITING, at=began - 2, peer_id=member.peer_id, epoch=0, members=0)
            self.ring.append(member)
        self.epoch = 1
        self._tell(HappeningKind.EPOCH, at=began, reason="the group formed", took_ms=None)
        for member in self.ring:
            self._tell(HappeningKind.JOINED, at=began, peer_id=member.peer_id)
        if self.past:
            for second in range(HISTORY_S):
                self._live(began + second)

    def _live(self, at: float) -> None:
        wave = 0.8 + 0.15 * math.sin(at / 17) + self._random.uniform(-0.05, 0.05)
        size = 4 << 20
        operations = 46 * wave * 8 / (8 + abs(len(self.ring) - 8))
        self.history.append(Sample(at, operations * size * len(self.ring), operations))
        for member in self.ring:
            member.operations += round(operations)
            member.bytes += round(operations) * size

    # ----------------------------------------------------------------------------------------- what happens to it

    def second(self) -> None:
        """Lives on for a second."""
        self.now += 1.0
        self._live(self.now)

    def kill(self, index: int, took_ms: float = 11.8) -> str:
        """A member dies, and the others recover."""
        gone = self.ring.pop(index)
        self._tell(HappeningKind.LOST, peer_id=gone.peer_id, reason="its host's sentinel saw it exiting")
        self.epoch += 1
        self.recoveries += 1
        self._tell(HappeningKind.RECOVERED, at=self.now + took_ms / 1e3, took_ms=took_ms)
        for member in self.ring:
            member.aborts += 1
            member.retries += 1
        return gone.peer_id

    def join(self, host: int) -> str:
        """A peer comes, waits, and is admitted."""
        member = self._new_member(host)
        self._tell(HappeningKind.WAITING, peer_id=member.peer_id)
        same = [place for place, one in enumerate(self.ring) if one.host == member.host]
        self.ring.insert(same[-1] + 1 if same else len(self.ring), member)
        self.epoch += 1
        self._tell(HappeningKind.EPOCH, at=self.now + 0.4, reason="admitted 1 peer")
        self._tell(HappeningKind.JOINED, at=self.now + 0.4, peer_id=member.peer_id)
        return member.peer_id

    # ------------------------------------------------------------------------------------------------- its report

    def report(self, since: int = 0) -> MasterReport:
        """What `Server.report` would tell."""
        groups = ([self._group()] if self.ring or self.waiting else []) + self.others
        return MasterReport(
            version="0.1.0",
            boot=self.boot,
            master_id="9f3c2b7a11d04e58",
            host="10.0.0.5",
            port=48148,
            pid=4242,
            at=self.now,
            booted_at=self.booted_at,
            dashboard=self.dashboard,
            groups=tuple(groups),
            happenings=tuple(one for one in self.happenings if one.number > since),
        )

    def _group(self) -> GroupReport:
        members = []
        rates = []
        crossing = 0
        for place, member in enumerate(self.ring):
            rate = None
            if self.ring[(place + 1) % len(self.ring)].host != member.host:
                rate = self.rates[crossing % len(self.rates)] * (1 + 0.3 * ((crossing // len(self.rates)) % 7))
                rates.append(rate)
                crossing += 1
            members.append(
                MemberReport(
                    peer_id=member.peer_id,
                    host=member.host,
                    silent_s=round(self._random.uniform(0.01, 0.24), 3),
                    rate_to_next=rate,
                    operations=member.operations,
                    bytes=member.bytes,
                    aborts=member.aborts,
                    retries=member.retries,
                    in_flight=1 + place % 2,
                    store_bytes=0,
                )
            )
        count = len(members)
        return GroupReport(
            name=self.group,
            epoch=self.epoch,
            phase="steady",
            closed=False,
            min_world_size=2,
            max_world_size=None,
            members=tuple(members),
            waiting=self.waiting,
            in_flight=(
                InFlight(1041, "all_reduce AVG of 1048576 FLOAT", count, 0.021),
                InFlight(1042, "all_reduce AVG of 4194304 BFLOAT16", max(1, count - 2), 0.008),
                InFlight(7, "broadcast of 65536 FLOAT", max(1, count // 3), 0.003),
            ),
            history=tuple(sample for sample in self.history if sample.at >= self.now - HISTORY_S),
            bottleneck=min(rates, default=None),
            age_s=38.0,
            recoveries=self.recoveries,
        )


def thousand(hosts: int = 125) -> MadeUpMaster:
    """A master of 1,000 members."""
    return MadeUpMaster(hosts=hosts, members=1000, group="llm-70b")
