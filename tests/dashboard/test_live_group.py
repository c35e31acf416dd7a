"""The page of a real master in a process of its own, with real peers: they come, they die, and so does the master."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_pccl import Communicator
from ray_pccl.settings import Settings
from ray_pccl.testing.faults import Faults
from ray_pccl.testing.groups import PeerStarter
from ray_pccl.testing.master import MasterProcess
from ray_pccl.testing.waiting import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def master_process(tmp_path_factory: pytest.TempPathFactory, master_settings: Settings) -> Iterator[MasterProcess]:
    """As the fixture of the plugin, and with a page."""
    directory = Path(tmp_path_factory.mktemp("master"))
    process = MasterProcess(directory, master_settings, dashboard_host="127.0.0.1")
    try:
        process.start()
        yield process
    finally:
        process.close()


def _urls(process: MasterProcess) -> list[str]:
    """Where the page was, in each of the master's lives."""
    return eventually(lambda: re.findall(r"^live page: (\S+)$", process.log_path.read_text(), re.MULTILINE))


def _reduce(comm: Communicator, times: int) -> None:
    for _ in range(times):
        comm.all_reduce(np.ones(1 << 16, np.float32))


def _event(page: Any, kind: str) -> Any:
    return page.locator(f'.event[data-kind="{kind}"]')


def _row(page: Any, peer_id: str) -> Any:
    return page.locator(f'.grid-row:visible:has([title="{peer_id}"])')


def _figure(page: Any, name: str) -> str:
    return page.locator(f'[data-figure="{name}"] dd').inner_text().replace("\n", " ").strip()


def test_a_group_forms_works_loses_a_peer_and_its_master_before_ones_eyes(
    master_process: MasterProcess, peer_group: PeerStarter, faults: Faults, open_page: Any
) -> None:
    [url] = _urls(master_process)
    page = open_page(url)
    page.get_by_text("No group yet").wait_for()

    peers = peer_group(3, peer_group="train")
    eventually(lambda: _figure(page, "members") == "3", what="three members are shown")
    assert _figure(page, "epoch") == "1"
    assert _figure(page, "phase") == "steady"
    assert page.locator("#group").input_value() == "train"
    for peer in peers:
        _row(page, peer.peer_id).wait_for()

    for work in [peer.run_async(_reduce, 200) for peer in peers]:
        work.result(60)
    eventually(lambda: "200" in _row(page, peers[0].peer_id).inner_text(), 15)
    eventually(lambda: re.search(r"[1-9]", _figure(page, "bytes")), 15, "bytes per second are shown")

    faults.kill(peers[2])
    _event(page, "recovered").wait_for()
    assert peers[2].peer_id in _event(page, "lost").inner_text()
    took = re.search(r"([\d.]+) ms", _event(page, "recovered").inner_text())
    assert took is not None and 0 < float(took[1]) < 5000
    eventually(lambda: (_figure(page, "members")[:1], _figure(page, "epoch")) == ("2", "2"))
    eventually(lambda: not _row(page, peers[2].peer_id).is_visible())

    faults.kill_master()
    eventually(lambda: _figure(page, "master") == "boot 2", 20, "the page has found the master again")
    page.wait_for_selector('#connection[data-state="live"]')
    assert _urls(master_process) == [url, url]
    _event(page, "returned").wait_for()
    assert _event(page, "booted").count() == 2
    assert peers[2].peer_id in _event(page, "lost").inner_text()  # what the page has seen stays
    eventually(lambda: _figure(page, "members").startswith("2"))
