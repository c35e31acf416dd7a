"""Reports of masters that never were."""

from __future__ import annotations

from typing import Any

import msgspec

from ray_pccl.reports import GroupReport, Happening, HappeningKind, InFlight, MasterReport, MemberReport, Sample

AT = 1_800_000_000.0


def peer_id(number: int, host: str = "node-a-0123abcd") -> str:
    return f"{host}-{4000 + number}-{number:08x}deadbeef"


def member(number: int, host: str = "node-a-0123abcd", **given: Any) -> MemberReport:
    told = {"silent_s": 0.04, "operations": 12_345, "bytes": 48_200_000_000} | given
    return MemberReport(peer_id=peer_id(number, host), host=host, **told)


def group(name: str = "train", members: int = 4, **given: Any) -> GroupReport:
    """Members on two hosts, half on each."""
    hosts = ["node-a-0123abcd", "node-b-4567cdef"]
    everyone = [member(number, hosts[2 * number // max(1, members)]) for number in range(members)]
    told: dict[str, Any] = {
        "epoch": 14,
        "phase": "steady",
        "closed": False,
        "min_world_size": 2,
        "max_world_size": 8,
        "members": tuple(everyone),
        "waiting": (),
        "in_flight": (),
        "history": tuple(Sample(AT - 9 + second, 1e9 + second * 1e8, 310.0) for second in range(10)),
    }
    return GroupReport(name=name, **(told | given))


def report(*groups: GroupReport, **given: Any) -> MasterReport:
    told: dict[str, Any] = {
        "version": "0.1.0",
        "boot": 2,
        "master_id": "m",
        "host": "10.0.0.1",
        "port": 48148,
        "pid": 77,
        "at": AT,
        "booted_at": AT - 3 * 3600 - 12 * 60,
        "dashboard": "http://127.0.0.1:48149/",
        "happenings": (
            Happening(1, AT - 60, HappeningKind.BOOTED, reason="boot 2"),
            Happening(2, AT - 50, HappeningKind.LOST, "train", 14, peer_id(9), "its process died", 4),
            Happening(3, AT - 50, HappeningKind.RECOVERED, "train", 14, members=4, took_ms=6.5),
        ),
    }
    return MasterReport(groups=groups, **(told | given))


def busy_group() -> GroupReport:
    """One with all that there is to tell."""
    calm = group()
    first, second, third, fourth = calm.members
    members = (
        MemberReport(first.peer_id, first.host, 0.1, None, 10, 4096, 1, 2, 3, 2, 5 << 20),
        MemberReport(second.peer_id, second.host, 0.1, 1.25e9, 10, 4096),
        MemberReport(third.peer_id, third.host, 2.5, None, 10, 4096),
        MemberReport(fourth.peer_id, fourth.host, 0.1, None, 123_456_789, 10**15),
    )
    return msgspec.structs.replace(
        calm,
        phase="asking",
        closed=True,
        members=members,
        waiting=(peer_id(7),),
        in_flight=(InFlight(7, "all_reduce SUM of 1048576 FLOAT", 3, 1.25),),
        bottleneck=118e6,
        age_s=185.0,
        recoveries=2,
        evictions=1,
    )
