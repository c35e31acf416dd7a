"""What the master tells of the topology, as users see it."""

from __future__ import annotations

from array import array

import msgspec

from ray_pccl.control.messages import TopologyReport
from ray_pccl.errors import ProtocolError
from ray_pccl.topology.types import Topology

_reports = msgspec.msgpack.Decoder(TopologyReport)


def read(values: tuple[bytes, ...]) -> Topology:
    """The topology of a reply to `Question.TOPOLOGY`; `ProtocolError` if it is none."""
    try:
        encoded, packed = values
        report = _reports.decode(encoded)
        rates = array("f", packed)
        width = len(report.hosts)
        if len(rates) not in (0, width**2) or any(not 0 <= host < width for _, host in report.order):
            raise ValueError(f"{len(rates)} rates between {width} hosts")
    except (ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"the master's word on the topology can't be read: {error}") from None
    matrix = {
        (source, target): rate
        for source, near in report.order
        for target, far in report.order
        if rates and source != target and (rate := rates[near * width + far]) == rate  # not nan
    }
    order = tuple(peer_id for peer_id, _ in report.order)
    hosts = {peer_id: report.hosts[host] for peer_id, host in report.order}
    return Topology(order, matrix, hosts, report.bottleneck, report.age_s)
