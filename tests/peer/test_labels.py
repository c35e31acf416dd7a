"""A peer's label is part of its name, and names are part of addresses: any text must do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from master_actor import serve
from ray_pccl import Communicator, SettingsError
from ray_pccl.ring.dialing import Address


@pytest.mark.parametrize("label", ["peer 0", "a  b c 1.2.3.4 5", "x" * 200, "ü" * 100, "line\nbreak"])
def test_peers_reduce_whatever_their_labels_are(label: str) -> None:
    def work(endpoint: Any) -> tuple[bool, float]:
        with Communicator("labels", master=endpoint, min_world_size=2, max_world_size=2, label=label) as comm:
            tensor = np.ones(4)
            comm.all_reduce(tensor)
            return comm.peer_id.startswith(label), float(tensor[0])

    with serve() as endpoint, ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, [endpoint] * 2)) == [(True, 2.0)] * 2


@pytest.mark.parametrize("label", ["x" * 201, "ü" * 101, 7])
def test_a_label_that_is_none_is_refused_at_once(label: Any) -> None:
    with pytest.raises(SettingsError, match="up to 200 bytes"):
        Communicator("labels", label=label)


def test_long_names_have_sockets_of_their_own() -> None:
    one, other = (Address("x" * 200 + end, "127.0.0.1", 1) for end in "ab")
    assert one.unix != other.unix and Address.parse(str(one)) == one
    assert all(len(address.unix.encode()) <= 107 for address in (one, other))
