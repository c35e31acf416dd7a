"""The page's server, over real sockets: what it serves, what it refuses, and whom it drops."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from master_actor.dashboard import serving
from master_actor.dashboard.access import token_of
from ray_pccl.reports import MasterReport, from_json
from ray_pccl.testing.waiting import eventually
from tests.dashboard.made_up import MadeUpMaster, thousand
from tests.dashboard.requests import ask, begin_stream, reports, stream
from tests.dashboard.stage import KEY, Stage, staged

TOKEN = token_of(KEY)
LIFE = "life=9f3c2b7a11d04e58.1"


@pytest.fixture
def master() -> MadeUpMaster:
    return MadeUpMaster()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "TICK_S", 0.02)


@pytest.fixture
def stage(master: MadeUpMaster, quick: None) -> Iterator[Stage]:
    with staged(master.report) as made:
        yield made


@pytest.fixture
def public(master: MadeUpMaster, quick: None) -> Iterator[Stage]:
    """One that is bound to every address of this machine."""
    with staged(master.report, host="0.0.0.0") as made:
        yield made


def _body(answer: object) -> bytes:
    return answer.body  # type: ignore[attr-defined, no-any-return]


def _streams(stage: Stage) -> int:
    assert stage.page._server is not None
    return len(stage.page._server._streams)


# ----------------------------------------------------------------------------------------------------------- files


def test_the_page_and_its_files_come_with_a_policy_that_lets_nothing_in_from_elsewhere(stage: Stage) -> None:
    page = ask(stage.port, "/")
    assert page.status == 200
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for path in ("/static/main.js", "/static/page.css", "/static/favicon.svg", "/api/report", "/no/such/page"):
        answer = ask(stage.port, path)
        assert answer.headers["Content-Security-Policy"] == policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_nothing_in_the_files_points_elsewhere(stage: Stage) -> None:
    for path in serving.STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "").replace("://", "elsewhere") or path.suffix == ".js", path
        assert "http:" not in text and "https:" not in text, path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "style="):
            assert word not in text, f"{word} in {path}"


def test_a_file_that_the_browser_has_is_not_sent_again(stage: Stage) -> None:
    tag = ask(stage.port, "/static/main.js").headers["ETag"]
    again = ask(stage.port, "/static/main.js", If_None_Match=tag)
    assert (again.status, _body(again)) == (304, b"")


@pytest.mark.parametrize("path", ["/static/../serving.py", "/static/%2e%2e%2fserving.py", "/static/", "/static/x.js"])
def test_what_is_no_file_of_the_page_is_not_found(stage: Stage, path: str) -> None:
    answer = ask(stage.port, path)
    assert answer.status == 404
    assert b"import" not in _body(answer)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/api/report", "/api/stream"])
def test_nothing_can_be_changed(stage: Stage, method: str, path: str) -> None:
    assert ask(stage.port, path, method=method).status == 405


# ---------------------------------------------------------------------------------------------------------- reports


def test_the_report_is_there_as_json_after_the_number_that_was_asked_for(stage: Stage, master: MadeUpMaster) -> None:
    report = from_json(_body(ask(stage.port, "/api/report")))
    assert report.groups[0].name == "train"
    assert len(report.happenings) == len(master.happenings)
    last = report.happenings[-1].number
    assert from_json(_body(ask(stage.port, f"/api/report?since={last - 1}"))).happenings == report.happenings[-1:]
    assert ask(stage.port, "/api/report?since=x").status == 400


def test_a_stream_begins_with_everything_and_goes_on_with_what_is_new(stage: Stage, master: MadeUpMaster) -> None:
    with stream(stage.port) as news:
        first = next(news)
        assert len(first["happenings"]) == len(master.happenings)
        stage.run(lambda: master.kill(1))
        told = next(report for report in news if report["happenings"])
        assert [happening["kind"] for happening in told["happenings"]] == ["lost", "recovered"]
        assert told["groups"][0]["history"] == []


def test_a_page_that_comes_again_is_told_what_it_missed_unless_the_master_was_restarted(
    stage: Stage, master: MadeUpMaster
) -> None:
    last = len(master.happenings)
    stage.run(lambda: master.kill(1))
    with stream(stage.port, f"?{LIFE}&since={last}") as news:
        assert [happening["number"] for happening in next(news)["happenings"]] == [last + 1, last + 2]
    with stream(stage.port, f"?life=another.7&since={last}") as news:
        assert len(next(news)["happenings"]) == last + 2


def test_a_report_that_fails_once_does_not_end_the_streams(
    stage: Stage, master: MadeUpMaster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with stream(stage.port) as news:
        next(news)
        feed = stage.page._server._feed  # type: ignore[union-attr]
        with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "ray_pccl.master"):
            patch.setattr(feed, "_report", lambda since: 1 / 0)
            eventually(lambda: "could not be told" in caplog.text)
        assert next(news)["groups"]


# ------------------------------------------------------------------------------------------------------------ access


def test_a_site_whose_name_points_to_this_machine_reads_nothing(stage: Stage) -> None:
    for path in ("/", "/static/main.js", "/api/report", "/api/stream"):
        answer = ask(stage.port, path, host="evil.example")
        assert answer.status == 403
        assert b"train" not in _body(answer)


def test_elsewhere_than_on_loopback_a_token_is_asked_for(public: Stage) -> None:
    assert public.page.url.endswith(f":{public.port}/?token={TOKEN}")
    for path in ("/api/report", "/api/stream", "/api/report?token=wrong"):
        answer = ask(public.port, path)
        assert answer.status == 401
        assert b"train" not in _body(answer)
    form = ask(public.port, "/")
    assert form.status == 401
    assert b'name="token"' in _body(form)
    assert ask(public.port, "/static/page.css").status == 200


def test_the_token_in_the_address_is_kept_in_a_cookie_that_no_script_sees(public: Stage) -> None:
    page = ask(public.port, f"/?token={TOKEN}")
    assert page.status == 200
    cookie = page.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    answer = ask(public.port, "/api/report", Cookie=cookie.partition(";")[0])
    assert from_json(_body(answer)).groups[0].name == "train"
    assert ask(public.port, "/?token=wrong").headers["Set-Cookie"] is None


def test_a_script_shows_the_token_in_a_header(public: Stage) -> None:
    assert ask(public.port, "/api/report", Authorization=f"Bearer {TOKEN}").status == 200
    assert ask(public.port, "/api/report", Authorization="Bearer nonsense").status == 401


# ------------------------------------------------------------------------------------------------------------ limits


def test_a_browser_that_does_not_read_is_dropped_and_the_others_go_on(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 0.5)
    report = thousand().report()
    with staged(lambda _: report) as stage:
        hung = begin_stream(stage.port, buffer=4096)
        with stream(stage.port) as news:
            next(news)
            eventually(lambda: _streams(stage) == 2)

            def dropped() -> bool:
                next(news)
                return _streams(stage) == 1

            eventually(dropped, 20)
            next(news)
        with contextlib.suppress(ConnectionError):  # what was on the way is there, and then it ends
            while hung.recv(1 << 20):
                pass
        hung.close()


def test_a_browser_that_reads_slowly_misses_no_happening(quick: None) -> None:
    master = thousand()
    with staged(master.report) as stage:
        slow = begin_stream(stage.port, buffer=4096)
        feed = stage.page._server._feed  # type: ignore[union-attr]
        for _ in range(20):
            stage.run(lambda: master.kill(0))
            tick = feed._tick
            eventually(lambda before=tick: feed._tick > before)
        told: list[int] = []
        for report in reports(slow):
            told += [happening["number"] for happening in report["happenings"]]
            if told and told[-1] == len(master.happenings):
                break
        assert sorted(set(told)) == list(range(1, len(master.happenings) + 1))
        slow.close()


def test_there_are_only_so_many_streams(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_STREAMS", 2)
    with stream(stage.port) as one, stream(stage.port) as two:
        next(one), next(two)
        answer = ask(stage.port, "/api/stream")
        assert answer.status == 503
        assert b"close one" in _body(answer)
    eventually(lambda: _streams(stage) == 0)
    with stream(stage.port) as again:
        assert next(again)


def test_connections_that_say_nothing_give_way_to_new_ones_and_streams_stay(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)
    with stream(stage.port) as news, contextlib.ExitStack() as silent:
        next(news)
        idle = [silent.enter_context(socket.create_connection(("127.0.0.1", stage.port), timeout=5)) for _ in range(10)]

        def served() -> bool:
            with contextlib.suppress(ConnectionError):  # one of a burst may be turned away itself
                return ask(stage.port, "/api/report").status == 200
            return False

        eventually(served, 5)
        with contextlib.suppress(ConnectionError):
            assert idle[0].recv(1) == b""
        assert next(news)


def test_however_many_ask_at_once_the_master_listens_to_its_peers_between_two_reports(master: MadeUpMaster) -> None:
    made_in: list[int] = []
    rounds = itertools.count()
    now = 0

    def report(since: int) -> MasterReport:
        made_in.append(now)
        time.sleep(0.5 if len(made_in) == 1 else 0.0)  # meanwhile the others come
        return master.report(since)

    with staged(report) as stage, ThreadPoolExecutor(12) as clients:

        def count() -> None:
            nonlocal now
            now = next(rounds)
            if len(made_in) < 12:
                stage._loop.call_soon(count)

        stage.run(count)
        answers = clients.map(lambda _: ask(stage.port, "/api/report").status, range(12))
        assert list(answers) == [200] * 12
    assert len(set(made_in)) == 12


def test_connections_that_come_and_go_one_after_the_other_take_nobodys_place(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 4)
    for _ in range(20):
        assert ask(stage.port, "/static/page.css").status == 200
    assert stage.page._server is not None
    assert len(stage.page._server._connections) <= 2


def test_the_end_closes_the_port_and_ends_the_streams(master: MadeUpMaster, quick: None) -> None:
    with staged(master.report) as stage, stream(stage.port) as news:
        next(news)
        assert stage.page._socket is not None
        held = stage.page._socket.dup()  # as a child that was forked would have it
        stage.close()
        with contextlib.suppress(ConnectionError):
            for _ in news:
                pass
        with pytest.raises(ConnectionRefusedError):
            ask(stage.port, "/")
        held.close()
        assert stage.page.url == ""
