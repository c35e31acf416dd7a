"""The page in a browser, showing a made-up master: what is seen, what keys do, what names can't do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest

from master_actor.dashboard import serving
from ray_pccl.reports import GroupReport
from ray_pccl.testing.waiting import eventually
from tests.dashboard.made_up import MadeUpMaster
from tests.dashboard.stage import Stage, staged

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
HOSTILE = '<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>'


@pytest.fixture
def show() -> Iterator[Callable[..., Stage]]:
    """Serves a master's page for as long as the test runs."""
    with ExitStack() as stack:
        yield lambda master, **more: stack.enter_context(staged(master.report, **more))


def until(page: Any, condition: str) -> None:
    """Waits for a condition in the page. Playwright's own way to wait is shut out by the page's policy."""
    eventually(lambda: page.evaluate(condition), 15, condition)


def _live(page: Any) -> None:
    page.wait_for_selector('#connection[data-state="live"]')


def _figure(page: Any, name: str) -> str:
    return page.locator(f'[data-figure="{name}"] dd').inner_text().replace("\n", " ").strip()


def _events(page: Any, kind: str) -> Any:
    return page.locator(f'.event[data-kind="{kind}"]')


def _active(page: Any) -> str:
    return page.evaluate(
        "document.activeElement.id || document.activeElement.className || document.activeElement.tagName"
    )


def _tab_to(page: Any, target: str) -> None:
    """Goes to an element with the Tab key alone, and sees that the focus is visible there."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"document.activeElement.matches({target!r})"):
            return
    raise AssertionError(f"no Tab leads to {target}; it ended on {_active(page)}")


def test_it_shows_the_figures_the_operations_and_the_legend_of_a_group(show: Any, open_page: Any) -> None:
    page = open_page(show(MadeUpMaster()).page.url)
    _live(page)
    assert _figure(page, "members") == "8"
    assert _figure(page, "hosts") == "3"
    assert _figure(page, "epoch") == "1"
    assert _figure(page, "phase") == "steady"
    assert re.fullmatch(r"118 ?MB/s", _figure(page, "bottleneck"))
    assert re.search(r"\d ?(MB|GB)/s", _figure(page, "bytes"))
    assert _figure(page, "master") == "boot 1"
    assert "all_reduce AVG of 1048576 FLOAT" in page.locator("#flights").inner_text()
    assert "6 of 8 members" in page.locator("#flights").inner_text()
    assert "below 200 MB/s" in page.locator("#legend").inner_text()
    assert "same host" in page.locator("#legend").inner_text()
    assert page.locator(".grid-rows .grid-row:visible").count() == 8
    assert "now" in page.locator("#bytes-chart").get_attribute("aria-label")
    assert page.title() == "train · ray_pccl"
    # The canvases are drawn: there is more than one colour on each.
    for canvas in ("ring", "bytes-chart", "operations-chart"):
        colours = page.evaluate(
            """id => { const c = document.getElementById(id);
            const { data } = c.getContext('2d').getImageData(0, 0, c.width, c.height);
            return new Set(new Uint32Array(data.buffer)).size }""",
            canvas,
        )
        assert colours > 10, canvas


def test_a_death_comes_into_the_timeline_with_its_milliseconds(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    stage = show(master)
    page = open_page(stage.page.url)
    _live(page)
    page.locator(".grid-row", has_text=master.ring[3].peer_id).click()
    gone = stage.run(lambda: master.kill(3, took_ms=11.83))
    _events(page, "recovered").wait_for()
    assert gone in _events(page, "lost").inner_text()
    assert "sentinel saw it exiting" in _events(page, "lost").inner_text()
    assert "11.8 ms" in _events(page, "recovered").inner_text()
    assert re.search(r"\d\d:\d\d:\d\d\.\d\d\d", _events(page, "lost").inner_text())
    assert _figure(page, "members") == "7"
    assert page.locator("#announcer").inner_text() == "A peer was lost. Recovered in 11.8 ms."
    assert "Not in the ring any more" in page.locator("#detail").inner_text()


def test_the_timeline_is_filtered_by_kind(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    master.kill(2)
    page = open_page(show(master).page.url)
    _events(page, "joined").wait_for()
    assert _events(page, "joined").count() == 1  # eight at once are one entry
    assert "8 peers joined" in _events(page, "joined").inner_text()
    page.get_by_role("button", name="Joins").click()
    _events(page, "joined").wait_for(state="detached")
    assert _events(page, "waiting").count() == 0
    assert _events(page, "lost").count() == 1
    page.get_by_role("button", name="Deaths").click()
    _events(page, "lost").wait_for(state="detached")
    page.get_by_role("button", name="Joins").click()
    _events(page, "joined").wait_for()
    assert page.get_by_role("button", name="Deaths").get_attribute("aria-pressed") == "false"


def _other_group(name: str, now: float, **changes: Any) -> GroupReport:
    group = MadeUpMaster(group=name, members=3, hosts=1, seed=5, now=now).report().groups[0]
    return msgspec.structs.replace(group, **changes)


def test_one_chooses_between_groups_and_the_address_remembers(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    master.others.append(_other_group("evaluate/ä#1", master.now, epoch=17, phase="forming"))
    url = show(master).page.url
    page = open_page(url)
    _live(page)
    assert page.locator("#group").input_value() == "train"
    page.get_by_label("Group", exact=True).select_option("evaluate/ä#1")
    until(page, "document.querySelector('[data-figure=epoch] dd').textContent === '17'")
    assert _figure(page, "phase") == "forming"
    assert _figure(page, "members") == "3"
    assert _figure(page, "bottleneck") == "\u2013"
    again = open_page(page.url)
    _live(again)
    until(again, "document.querySelector('[data-figure=epoch] dd').textContent === '17'")


def test_a_group_below_its_minimum_says_so(show: Any, open_page: Any) -> None:
    master = MadeUpMaster(members=0)
    master.others.append(_other_group("small", master.now, min_world_size=4))
    page = open_page(show(master).page.url)
    _live(page)
    until(page, "document.querySelector('[data-figure=members] dd').textContent === '3below 4'")
    assert "wait for newcomers" in page.locator("[data-figure=members]").get_attribute("title")


def test_without_a_group_it_says_how_to_make_one_and_shows_it_by_itself(show: Any, open_page: Any) -> None:
    master = MadeUpMaster(members=0)
    stage = show(master)
    page = open_page(stage.page.url)
    page.get_by_text("No group yet").wait_for()
    assert "create_group" in page.locator("#empty").inner_text()
    other = MadeUpMaster()
    stage.run(lambda: master.others.append(other.report().groups[0]))
    page.locator("#figures").wait_for()
    assert page.locator("#empty").is_hidden()


def test_it_can_be_used_with_the_keyboard_alone(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    peers = [member.peer_id for member in master.ring]
    page = open_page(show(master).page.url)
    _live(page)
    page.keyboard.press("Tab")
    assert _active(page) == "skip"
    _tab_to(page, "#group")
    assert "solid" in page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    _tab_to(page, "#ring")
    assert "solid" in page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    detail = page.locator("#detail")
    for key, place in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 7),
        ("ArrowDown", 0),
        ("ArrowUp", 7),
    ]:
        page.keyboard.press(key)
        until(page, f"document.getElementById('detail-title').textContent === 'Rank {place}'")
        assert peers[place] in detail.inner_text()
        assert page.locator("#ring").get_attribute("aria-valuenow") == str(place)
    assert peers[7] in page.locator("#ring").get_attribute("aria-valuetext")
    assert "118 MB/s" in page.locator("#ring").get_attribute("aria-valuetext")
    assert page.locator("#ring-tooltip").is_visible()
    _tab_to(page, "#filters button")
    page.keyboard.press("Space")
    _events(page, "joined").wait_for(state="detached")
    _tab_to(page, ".grid-head button")
    _tab_to(page, ".grid-view")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    until(page, "document.querySelector('.grid-row.active')?.getAttribute('aria-rowindex') === '4'")
    active = page.locator(".grid-view").get_attribute("aria-activedescendant")
    assert peers[2] in page.locator(f"#{active}").inner_text()
    assert "solid" in page.evaluate("getComputedStyle(document.querySelector('.grid-row.active')).outlineStyle")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('detail-title').textContent === 'Rank 2'")


def test_members_are_found_sorted_and_chosen(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    page = open_page(show(master).page.url)
    _live(page)
    rows = page.locator(".grid-rows .grid-row:visible")
    page.get_by_placeholder("Find a peer or a host").fill("node-b")
    until(page, "document.querySelectorAll('.grid-rows .grid-row:not([hidden])').length === 3")
    assert "3 members found" in page.locator("#members-hint").inner_text()
    page.get_by_placeholder("Find a peer or a host").fill("")
    page.get_by_role("columnheader", name="To next").get_by_role("button").click()
    until(page, "document.querySelector('.grid-rows .grid-row').textContent.includes('118 MB/s')")
    assert page.get_by_role("columnheader", name="To next").get_attribute("aria-sort") == "ascending"
    rows.first.click()
    until(page, "document.getElementById('detail-title').textContent === 'Rank 7'")
    page.get_by_role("button", name="Next →").click()
    until(page, "document.getElementById('detail-title').textContent === 'Rank 0'")
    for word in ("Heard", "Operations", "Bytes", "Aborts", "Retries"):
        assert word in page.locator("#detail").inner_text()


def test_one_points_at_the_ring_and_is_told_who_that_is(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    page = open_page(show(master).page.url)
    _live(page)
    box = page.locator("#ring").bounding_box()
    found = set()
    for step in range(0, 100, 4):
        for part in (0.2, 0.25, 0.3):
            page.mouse.move(box["x"] + box["width"] * step / 100, box["y"] + box["height"] * part)
            page.wait_for_timeout(20)
            if page.locator("#ring-tooltip").is_visible():
                found.add(page.locator("#ring-tooltip").inner_text().split(" ")[0])
                page.mouse.click(box["x"] + box["width"] * step / 100, box["y"] + box["height"] * part)
    assert {"0", "7"} <= found
    assert page.locator("#detail-title").inner_text().startswith("Rank ")


@pytest.mark.parametrize("what", ["group", "long names", "empty"])
def test_a_phone_needs_no_sideways_scrolling(show: Any, open_page: Any, what: str) -> None:
    master = MadeUpMaster(members=0 if what == "empty" else 8)
    if what == "long names":
        master.others.append(_other_group("x" * 300, master.now))
        for member in master.ring:
            member.host, member.peer_id = "h" * 200 + member.host, "p" * 200 + member.peer_id
        master.kill(1)
    page = open_page(show(master).page.url, **PHONE)
    _live(page)
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    wide = page.evaluate(
        "[...document.querySelectorAll('main, section, header, button, input, select, canvas, dl, dd, pre, li, p')]"
        ".filter(e => e.getBoundingClientRect().right > 361).map(e => e.className || e.tagName)"
    )
    assert wide == []
    if what == "group":
        page.locator(".grid-rows .grid-row").nth(2).tap()
        until(page, "document.getElementById('detail-title').textContent === 'Rank 2'")


def test_names_and_reasons_are_text_whatever_they_hold(show: Any, open_page: Any) -> None:
    master = MadeUpMaster(group=HOSTILE)
    for member in master.ring:
        member.peer_id += HOSTILE
        member.host += HOSTILE
    master.others.append(_other_group(HOSTILE + "2", master.now))
    gone = master.kill(0)
    happening = next(one for one in master.happenings if one.kind.value == "lost")
    master.happenings[happening.number - 1] = msgspec.structs.replace(happening, reason=HOSTILE)
    page = open_page(show(master).page.url)
    _events(page, "lost").wait_for()
    assert HOSTILE in _events(page, "lost").inner_text()
    assert gone in _events(page, "lost").inner_text()
    assert page.locator("#group").input_value() == HOSTILE
    page.locator("#ring").focus()
    page.keyboard.press("ArrowRight")
    page.locator("#ring-tooltip").wait_for()
    assert HOSTILE in page.locator("#detail").inner_text()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert page.evaluate("window.pwned") is None


def test_the_token_opens_the_page_and_leaves_the_address_line(show: Any, open_page: Any) -> None:
    stage = show(MadeUpMaster(), host="0.0.0.0")
    address = f"http://127.0.0.1:{stage.port}/"
    token = stage.page.url.partition("token=")[2]
    page = open_page(f"{address}?token={token}#train")
    _live(page)
    assert page.url == f"{address}#train"
    assert page.evaluate("document.cookie") == ""
    page.reload()
    _live(page)
    stranger = open_page(address)
    assert "needs its token" in stranger.locator("h1").inner_text()
    stranger.get_by_label("Token").fill(token)
    stranger.get_by_role("button", name="Open").click()
    _live(stranger)


def test_light_and_dark_follow_the_system_and_motion_can_be_left_out(show: Any, open_page: Any) -> None:
    url = show(MadeUpMaster()).page.url
    grounds = {}
    for scheme in ("light", "dark"):
        page = open_page(url, color_scheme=scheme, reduced_motion="reduce")
        _live(page)
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert page.evaluate("getComputedStyle(document.querySelector('.board')).transitionDuration") == "0s"
    assert sum(map(int, re.findall(r"\d+", grounds["light"]))) > 600
    assert sum(map(int, re.findall(r"\d+", grounds["dark"]))) < 150


def test_a_master_that_is_away_is_told_of_and_found_again(show: Any, open_page: Any) -> None:
    master = MadeUpMaster()
    stage = show(master)
    page = open_page(stage.page.url)
    _live(page)
    port = stage.port
    stage.close()
    page.wait_for_selector('#connection[data-state="away"]')
    until(page, "/Master away, trying again · [1-9]/.test(document.getElementById('connection-text').textContent)")
    assert "does not answer" in page.locator("#banner").inner_text()
    assert _figure(page, "members") == "8"
    reborn = MadeUpMaster(boot=2, past=False)
    again = Stage(reborn.report, port=port)
    try:
        again.open(boot=2)
        _live(page)
        until(page, "document.querySelector('[data-figure=master] dd').textContent === 'boot 2'")
        assert page.locator("#banner").is_hidden()
        assert _events(page, "booted").count() == 2
    finally:
        again.close()
        again.end()


def test_a_page_too_many_says_so_and_goes_on_when_there_is_room(
    show: Any, open_page: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(serving, "MAX_STREAMS", 0)
        page = open_page(show(MadeUpMaster()).page.url)
        page.wait_for_selector('#connection[data-state="full"]')
        assert "limited number of pages" in page.locator("#banner").inner_text()
    _live(page)


def test_a_token_of_another_master_is_told_of(show: Any, open_page: Any) -> None:
    stage = show(MadeUpMaster(), host="0.0.0.0")
    page = open_page(f"http://127.0.0.1:{stage.port}/?{stage.page.url.partition('?')[2]}")
    _live(page)
    stage.close()
    other = Stage(MadeUpMaster(seed=3).report, host="0.0.0.0", port=stage.port)
    try:
        other.open(key=b"x" * 32)
        page.wait_for_selector('#connection[data-state="refused"]')
        assert "ray-pccl status" in page.locator("#banner").inner_text()
    finally:
        other.close()
        other.end()
