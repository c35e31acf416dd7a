from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields

import pytest

from ray_pccl.errors import SettingsError
from ray_pccl.settings import PREFIX, Settings

NUMBERS = [spec for spec in fields(Settings) if spec.metadata]
SWITCHES = [spec for spec in fields(Settings) if not spec.metadata]


def test_the_defaults_are_valid_and_ignore_an_empty_environment() -> None:
    assert Settings.from_env({}) == Settings()


def test_every_number_names_its_unit() -> None:
    assert all(spec.name.endswith(("_s", "_ms", "_streams")) for spec in NUMBERS)


def test_settings_are_frozen_and_pickle() -> None:
    settings = Settings(op_timeout_s=7)
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises((FrozenInstanceError, AttributeError)):
        settings.op_timeout_s = 8  # type: ignore[misc]


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("bad", [-1, 1e12, float("nan"), "5", None, True])
def test_a_number_outside_its_range_is_refused_with_the_range_and_the_variable(spec, bad) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**{spec.name: bad})
    text = str(caught.value)
    assert spec.name in text and f"{spec.metadata['low']:g}" in text and f"{spec.metadata['high']:g}" in text
    assert PREFIX + spec.name.upper() in text


@pytest.mark.parametrize("spec", SWITCHES, ids=lambda spec: spec.name)
def test_a_switch_takes_only_true_and_false(spec) -> None:
    with pytest.raises(SettingsError, match=spec.name):
        Settings(**{spec.name: 1})


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_every_number_can_be_set_in_the_environment(spec) -> None:
    value = spec.default * 1.01
    assert getattr(Settings.from_env({PREFIX + spec.name.upper(): str(value)}), spec.name) == value


@pytest.mark.parametrize("word", ["0", "false", "No", "OFF", " off "])
def test_a_switch_can_be_turned_off_in_the_environment(word: str) -> None:
    assert Settings.from_env({"RAY_PCCL_PROACTIVE_RECOVERY": word}).proactive_recovery is False


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON"])
def test_a_switch_can_be_turned_on_in_the_environment(word: str) -> None:
    assert Settings.from_env({"RAY_PCCL_SENTINEL": word}).sentinel is True


@pytest.mark.parametrize(
    ("variable", "text"),
    [("RAY_PCCL_SENTINEL", "maybe"), ("RAY_PCCL_OP_TIMEOUT_S", "soon"), ("RAY_PCCL_OP_TIMEOUT_S", "nan")],
)
def test_nonsense_in_the_environment_is_refused_by_the_variables_name(variable: str, text: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        Settings.from_env({variable: text})


def test_what_is_given_wins_over_the_environment() -> None:
    assert Settings.from_env({"RAY_PCCL_OP_TIMEOUT_S": "7"}, op_timeout_s=8).op_timeout_s == 8


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_PCCL_OP_TIMEOUT_S", "9")
    assert Settings.from_env().op_timeout_s == 9


def test_a_setting_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(SettingsError, match="op_timeout_s") as caught:
        Settings.from_env({}, op_timeuot_s=7)
    assert "op_timeuot_s" in str(caught.value)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ({"heartbeat_interval_ms": 2000.0}, {"heartbeat_timeout_s": 2.0}),
        ({"reconnect_cap_ms": 3000.0}, {"register_grace_s": 3.0}),
        ({"heartbeat_timeout_s": 5.0}, {"stall_timeout_s": 5.0}),
        ({"heartbeat_timeout_s": 5.0}, {"master_lease_s": 5.0}),
    ],
)
def test_durations_that_depend_on_each_other_must_be_in_order(small: dict, large: dict) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(**small, **large)
    assert all(name in str(caught.value) for name in (*small, *large))


def test_a_peer_takes_over_the_masters_word_on_what_is_shared_and_nothing_else() -> None:
    of_master = Settings(heartbeat_timeout_s=0.7, master_lease_s=9, op_timeout_s=1)
    of_peer = Settings(heartbeat_timeout_s=2, op_timeout_s=7).with_shared(of_master.shared())
    assert (of_peer.heartbeat_timeout_s, of_peer.master_lease_s, of_peer.op_timeout_s) == (0.7, 9, 7)


def test_a_shared_setting_that_only_a_newer_master_knows_is_ignored() -> None:
    assert Settings().with_shared({"of_the_future_s": 1.0}) == Settings()
