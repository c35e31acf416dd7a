"""Says why there is no ring, as briefly as can be: the edges of which one at least would have to connect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_pccl.topology.covers import Rows, bits, cover, reached, rows_of
from ray_pccl.topology.problem import Problem
from ray_pccl.topology.rings import NoRingError

SHOWN = 6
"""Edges that a message names; the error has all."""


def obstacle(problem: Problem) -> NoRingError | None:
    """What keeps every ring from being, if it is one of the plain reasons: a host cut off, a cut, a shortage."""
    usable = problem.between_hosts() > 0
    rows, columns = rows_of(usable), rows_of(usable.T)
    everyone = range(len(rows))
    for host in everyone:
        others = [other for other in everyone if other != host]
        if not rows[host]:
            return _error(problem, "{} can send to nobody", [host], others)
        if not columns[host]:
            return _error(problem, "nobody can send to {}", others, [host], about=host)
    return _cut(problem, rows, columns) or _shortage(problem, rows)


def missing(problem: Problem, order: Sequence[int], *, proven: bool) -> NoRingError:
    """Blames a host that all ways lead through, else the unusable edges of the ring that has the fewest found."""
    if error := _gateway(problem):
        return error
    tour = np.asarray(order)
    after = np.roll(tour, -1)
    between = problem.host_of[tour] != problem.host_of[after]
    unusable = between & (problem.bandwidth[tour, after] <= 0)
    edges = list(zip(tour[unusable].tolist(), after[unusable].tolist(), strict=True))
    reason = (
        "every ring needs at least as many edges that can't connect as this one"
        if proven
        else "none was found in the time given; the best try still needs edges that can't connect"
    )
    return _told(reason, edges)


def _cut(problem: Problem, rows: Rows, columns: Rows) -> NoRingError | None:
    """The smaller cut that nothing crosses, seen from the first host and towards it."""
    everyone = (1 << len(rows)) - 1
    cuts = []
    for towards, graph in ((False, rows), (True, columns)):
        inside = reached(graph, 0)
        if outside := everyone & ~inside:
            cuts.append((outside, inside) if towards else (inside, outside))
    if not cuts:
        return None
    near, far = min(cuts, key=lambda cut: cut[0].bit_count() * cut[1].bit_count())
    reason = f"nothing leads from {near.bit_count()} of the hosts to the other {far.bit_count()}"
    return _error(problem, reason, list(bits(near)), list(bits(far)))


def _gateway(problem: Problem) -> NoRingError | None:
    """A host without which two others can't reach one another in either direction.

    A ring without one of its hosts is still a way through all the others, so one of those two would be reached.
    """
    usable = problem.between_hosts() > 0
    rows, columns = rows_of(usable), rows_of(usable.T)
    everyone = (1 << len(usable)) - 1
    for host in range(len(usable) if len(usable) > 2 else 0):
        others = everyone & ~(1 << host)
        first = 0 if host else 1
        onward, back = reached(rows, first, within=others), reached(columns, first, within=others)
        if others & ~onward & ~back:
            crossings = [(onward, others & ~onward), (others & ~back, back)]
            edges = [edge for near, far in crossings for edge in _between(problem, list(bits(near)), list(bits(far)))]
            reason = f"some hosts can't reach others, nor be reached by them, but through {_name(problem, host)}"
            return _told(reason, list(dict.fromkeys(edges)))
    return None


def _shortage(problem: Problem, rows: Rows) -> NoRingError | None:
    """Hosts that together can send to fewer hosts than they are."""
    stuck = cover(rows).stuck
    if not stuck:
        return None
    senders = list(bits(stuck))
    receivers = 0
    for host in senders:
        receivers |= rows[host]
    rest = list(bits((1 << len(rows)) - 1 & ~receivers))
    reason = f"{len(senders)} hosts can send to only {receivers.bit_count()} in all"
    return _error(problem, reason, senders, rest)


def _error(
    problem: Problem, reason: str, senders: list[int], receivers: list[int], *, about: int | None = None
) -> NoRingError:
    name = _name(problem, senders[0] if about is None else about)
    return _told(reason.format(name), _between(problem, senders, receivers))


def _name(problem: Problem, host: int) -> str:
    peers = problem.members[host].tolist()
    return f"peer {peers[0]}" if len(peers) == 1 else f"the host of peers {', '.join(map(str, peers[:SHOWN]))}"


def _between(problem: Problem, senders: list[int], receivers: list[int]) -> list[tuple[int, int]]:
    """All edges from the peers of the ones to the peers of the others."""
    sources = np.concatenate([problem.members[host] for host in senders]).tolist()
    targets = np.concatenate([problem.members[host] for host in receivers]).tolist()
    return [(i, j) for i in sources for j in targets if problem.host_of[i] != problem.host_of[j]]


def _told(reason: str, edges: Sequence[tuple[int, int]]) -> NoRingError:
    named = ", ".join(f"{i}->{j}" for i, j in edges[:SHOWN])
    more = f" and {len(edges) - SHOWN} more" if len(edges) > SHOWN else ""
    return NoRingError(
        f"no ring exists without edges that can't connect: {reason}. One of these must be made to work: {named}{more}",
        edges=tuple(edges),
    )
