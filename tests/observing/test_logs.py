"""Lines of the log name what they are about."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_pccl import Settings, SettingsError, configure_logging
from ray_pccl.testing import Faults, PeerProcess, PeerStarter, eventually

LOGGER = logging.getLogger("ray_pccl")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """The library's logger, put back as it was."""
    before = (LOGGER.level, list(LOGGER.handlers), LOGGER.propagate)
    yield
    LOGGER.level, LOGGER.handlers, LOGGER.propagate = before


def test_a_json_line_has_the_group_the_epoch_and_the_operation() -> None:
    stream = io.StringIO()
    configure_logging("INFO", json_lines=True, stream=stream)
    about = {"group": "train", "epoch": 3, "operation": "7/12", "peer": "p"}
    logging.getLogger("ray_pccl.peer").info("tried %s", "again", extra=about)
    logging.getLogger("ray_pccl.peer").debug("not this one", extra=about)
    [line] = stream.getvalue().splitlines()
    seen = json.loads(line)
    assert seen.items() >= {**about, "message": "tried again", "level": "INFO", "logger": "ray_pccl.peer"}.items()


def test_a_text_line_has_them_too_and_one_without_has_none() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream)
    logging.getLogger("ray_pccl.master").warning("it ended", extra={"group": "g", "epoch": 2, "peer": None})
    logging.getLogger("ray_pccl.master").warning("bare")
    first, second = stream.getvalue().splitlines()
    assert first.endswith("WARNING ray_pccl.master group=g epoch=2: it ended")
    assert second.endswith("WARNING ray_pccl.master: bare")


def test_configuring_twice_shows_a_line_once() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging(stream=first)
    configure_logging(stream=second, json_lines=True)
    LOGGER.info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1


def test_an_error_is_in_the_json_line() -> None:
    stream = io.StringIO()
    configure_logging(stream=stream, json_lines=True)
    try:
        raise ValueError("what went wrong")
    except ValueError:
        LOGGER.exception("it failed")
    assert "ValueError: what went wrong" in json.loads(stream.getvalue())["error"]


def test_a_level_that_is_none_is_an_error_that_names_them() -> None:
    with pytest.raises(SettingsError, match="DEBUG, INFO"):
        configure_logging("LOUD")


@pytest.mark.parametrize(
    ("variables", "printed"),
    [({"RAY_PCCL_LOG_LEVEL": "info"}, "INFO ray_pccl: hello"), ({"RAY_PCCL_LOG_FORMAT": "json"}, '"message": "hello"')],
)
def test_the_environment_does_the_same(variables: dict[str, str], printed: str) -> None:
    code = (
        "from ray_pccl.logs import *; import logging; configure_from_env(); logging.getLogger('ray_pccl').info('hello')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, check=True
    )
    assert printed in done.stderr


def test_a_format_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_pccl.logs import configure_from_env

    monkeypatch.setenv("RAY_PCCL_LOG_FORMAT", "xml")
    with pytest.raises(SettingsError, match="text, json"):
        configure_from_env()


def test_what_the_program_says_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_pccl.logs import configure_from_env

    monkeypatch.setenv("RAY_PCCL_LOG_LEVEL", "ERROR")
    configure_logging("INFO", stream=(shown := io.StringIO()))
    configure_from_env()  # as every connect() does
    LOGGER.info("an epoch")
    assert "an epoch" in shown.getvalue()


def test_a_slip_in_the_environment_does_not_cost_the_master() -> None:
    script = """
import os, ray
from master_actor import actor
from master_actor.journal import MemoryStorage
from ray_pccl import Settings
actor.RayStorage = lambda namespace: MemoryStorage()
ray.util.get_node_ip_address = lambda: "127.0.0.1"
print(actor.MasterService("ours", Settings()).endpoint().host, flush=True)
os._exit(0)
"""
    slip = {**os.environ, "RAY_PCCL_LOG_LEVEL": "chatty"}
    done = subprocess.run([sys.executable, "-c", script], env=slip, capture_output=True, text=True, timeout=60)
    assert done.stdout == "127.0.0.1\n", done.stderr
    assert "a log level is one of DEBUG" in done.stderr


def _log_to(comm: object, path: str) -> None:
    configure_logging("INFO", json_lines=True, stream=Path(path).open("w", buffering=1))  # noqa: SIM115


def _reduce(comm: object) -> None:
    import numpy as np

    comm.all_reduce(np.ones(8), tag=5)


def test_a_death_in_an_operation_is_logged_with_epoch_and_operation(
    peer_group: PeerStarter, faults: Faults, tmp_path: Path
) -> None:
    peers: list[PeerProcess] = list(
        peer_group(3, min_world_size=2, max_world_size=3, settings=Settings(last_call_s=30))
    )
    path = f"{tmp_path}/log"
    peers[0].run(_log_to, path)
    started = [peer.run_async(_reduce) for peer in peers[:2]]
    eventually(lambda: peers[0].run(_in_flight) and peers[1].run(_in_flight), 10, "two are inside")
    faults.kill(peers[2])
    for done in started:
        done.result(20)
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    [retried] = [line for line in lines if "tried again" in line["message"]]
    assert (retried["group"], retried["epoch"], retried["operation"]) == ("0", 1, "5/0")
    [epoch] = [line for line in lines if "epoch 2 with 2 members" in line["message"]]
    assert epoch["epoch"] == 2 and peers[2].peer_id in epoch["message"]


def _in_flight(comm: object) -> bool:
    return comm.statistics().in_flight == 1
