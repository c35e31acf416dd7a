"""``ray-pccl evict``: a peer is put out of its group."""

from __future__ import annotations

from typing import Annotated

import typer

from ray_pccl.cli.cluster import connected
from ray_pccl.cli.errors import NotFoundError
from ray_pccl.cli.exit_codes import ExitCode
from ray_pccl.cli.options import Shared, console
from ray_pccl.cli.status import PATIENCE_S
from ray_pccl.reports import MasterReport

NAMED = 8
"""How many candidates an error lists."""
ELLIPSIS = "…"


def evict(
    shared: Shared,
    peer: Annotated[
        str, typer.Argument(metavar="PEER_ID", help="Its id, or a part of it that no other has, as `status` shows it.")
    ],
    reason: Annotated[str, typer.Option(help="What the peer and the timeline are told.")] = "evicted by hand",
) -> int:
    """Put a peer out of its group.

    The others go on without it. It gets PeerEvictedError with the reason, and may join again.
    """
    with connected(shared):
        import ray_pccl

        group, peer_id = choose(ray_pccl.report(shared.namespace, timeout_s=PATIENCE_S), peer)
        ray_pccl.evict(peer_id, reason, namespace=shared.namespace)
    console().print(f"{peer_id} was put out of group {group}.", soft_wrap=True)
    return ExitCode.OK


def choose(report: MasterReport, wanted: str) -> tuple[str, str]:
    """The group and the id of the one peer that is meant: by its id, its beginning, or any part of it.

    Raises:
        NotFoundError: None is meant, or several.
    """
    peers = [(group.name, member.peer_id) for group in report.groups for member in group.members]
    peers += [(group.name, peer_id) for group in report.groups for peer_id in group.waiting]
    part = wanted.strip().removeprefix(ELLIPSIS)  # as `status` shows what is long
    ways = [
        [peer for peer in peers if peer[1] == part],
        [peer for peer in peers if part and peer[1].startswith(part)],
        [peer for peer in peers if part and part in peer[1]],
    ]
    found = next((some for some in ways if some), [])
    if len(found) == 1:
        return found[0]
    listed = found or peers
    names = ", ".join(f"{peer_id} ({group})" for group, peer_id in listed[:NAMED])
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    text = f"{wanted!r} is part of {len(found)} ids: {names}{more}" if found else f"no peer {wanted!r}; "
    if not found:
        text += f"there are {names}{more}" if names else "there is none at all"
    raise NotFoundError(text, candidates=tuple(peer_id for _, peer_id in listed))
