"""What the edges between members are good for, as the solver is told, and what the ring of now is worth by that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import permutations

from master_actor.core.bandwidth import Bandwidth
from master_actor.core.ring import Edge
from ray_pccl.types import Member

Rates = tuple[tuple[float, ...], ...]


def matrix(members: Sequence[Member], bandwidth: Bandwidth, avoid: Collection[Edge]) -> tuple[tuple[int, ...], Rates]:
    """The host of each member, as a number, and bytes per second from each to each; 0 to avoid, nan where unknown.

    Members of one host share a row, unless edges of theirs are to be avoided: a thousand rows of a thousand are large.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(member.host for member in members))}
    hosts = tuple(numbers[member.host] for member in members)
    shared = []
    for name in numbers:
        rates = bandwidth.references(name, tuple(numbers))
        shared.append(tuple(rates) if len(hosts) == len(numbers) else tuple(rates[host] for host in hosts))
    rows = [shared[host] for host in hosts]
    place = {member.peer_id: number for number, member in enumerate(members)}
    for source, target in (way for edge in avoid for way in permutations(edge)):
        if source in place and target in place:
            row = list(rows[place[source]])
            row[place[target]] = 0.0
            rows[place[source]] = tuple(row)
    return hosts, tuple(rows)


def worth_of(members: Sequence[Member], bandwidth: Bandwidth, avoid: Collection[Edge]) -> tuple[float, float] | None:
    """The slowest edge of the ring in this order, and the sum of all from host to host.

    None if that is no ring as the solver makes them: hosts are torn apart, or an edge is unknown or to be avoided.
    """
    pairs = zip(members, [*members[1:], *members[:1]], strict=True)
    across = [(source, target) for source, target in pairs if source.host != target.host]
    rates: list[float] = []
    for source, target in across:
        rate = bandwidth.reference(source.host, target.host)
        if not rate or frozenset((source.peer_id, target.peer_id)) in avoid:
            return None
        rates.append(rate)
    if not rates or len(across) != len({member.host for member in members}):
        return None
    return min(rates), sum(rates)
