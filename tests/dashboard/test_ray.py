"""The page of a master that is a Ray actor: there by default, for its own node, and again when Ray restarts it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray

import ray_pccl
from ray_pccl.reports import MasterReport, from_json
from ray_pccl.testing.waiting import eventually
from tests.dashboard.requests import ask

pytestmark = pytest.mark.ray


def _port(url: str) -> int:
    return int(url.rstrip("/").rpartition(":")[2])


def _asked(port: int) -> MasterReport | None:
    try:
        return from_json(ask(port, "/api/report").body)  # type: ignore[attr-defined]
    except OSError:
        return None


def test_an_actors_page_is_there_by_default_and_comes_back_with_the_actor(ray_local: Any) -> None:
    actor = ray_pccl.start_master()
    url = ray_pccl.report().dashboard
    assert url.startswith("http://127.0.0.1:")
    assert eventually(lambda: _asked(_port(url))).boot == 1  # type: ignore[union-attr]
    os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)

    def again() -> bool:
        report = _asked(_port(url))
        return report is not None and report.boot == 2

    eventually(again, 30, "the page is where it was")
    assert ray_pccl.report().dashboard == url
    ray_pccl.stop_master()
    eventually(lambda: _asked(_port(url)) is None, what="the page has gone with the master")


def test_one_may_do_without_a_page(ray_local: Any) -> None:
    ray_pccl.start_master(dashboard_host="")
    assert ray_pccl.report().dashboard == ""
    ray_pccl.stop_master()
