"""What open pages are sent: all of it once, and then what is new."""

from __future__ import annotations

import time

from master_actor.dashboard.feed import Feed
from ray_pccl.reports import MasterReport, from_json
from tests.dashboard.made_up import MadeUpMaster, thousand


def test_a_tick_tells_only_what_is_new_since_the_one_before() -> None:
    master = MadeUpMaster()
    feed = Feed(master.report)
    feed.advance()
    gone = master.kill(2)
    master.second()
    told = from_json(feed.advance().data)
    assert [happening.kind.value for happening in told.happenings] == ["lost", "recovered"]
    assert told.happenings[0].peer_id == gone
    assert [sample.at for sample in told.groups[0].history] == [master.now]
    assert len(told.groups[0].members) == 7
    quiet = from_json(feed.advance().data)
    assert quiet.happenings == ()
    assert quiet.groups[0].history == ()


def test_a_page_that_comes_is_told_everything_and_goes_on_with_the_next_tick() -> None:
    master = MadeUpMaster()
    feed = Feed(master.report)
    feed.advance()
    whole = feed.whole(0)
    told = from_json(whole.data)
    assert len(told.happenings) == len(master.happenings)
    assert len(told.groups[0].history) == len(master.history)
    assert feed.advance().tick == whole.tick + 1


def test_a_page_that_fell_behind_is_told_what_it_missed() -> None:
    master = MadeUpMaster()
    feed = Feed(master.report)
    before = feed.advance()
    master.kill(0)
    feed.advance()
    master.second()
    assert feed.advance().tick > before.tick + 1
    missed = from_json(feed.whole(before.last).data)
    assert [happening.kind.value for happening in missed.happenings] == ["lost", "recovered"]


def test_a_report_is_made_once_a_tick_whatever_the_number_of_pages() -> None:
    calls: list[int] = []
    master = MadeUpMaster()

    def report(since: int) -> MasterReport:
        calls.append(since)
        return master.report(since)

    feed = Feed(report)
    feed.advance()
    calls.clear()
    for _ in range(50):
        feed.whole(0)
    assert len(calls) == 1


def test_what_is_kept_for_who_comes_is_of_this_tick() -> None:
    master = MadeUpMaster()
    feed = Feed(master.report)
    feed.advance()
    feed.whole(0)
    gone = master.kill(0)
    feed.advance()
    assert gone in [happening.peer_id for happening in from_json(feed.whole(0).data).happenings[-2:]]


def test_a_group_that_is_new_is_told_with_its_whole_history() -> None:
    master = MadeUpMaster()
    feed = Feed(master.report)
    feed.advance()
    master.others.append(MadeUpMaster(group="other", seed=2, now=master.now).report().groups[0])
    told = {group.name: group for group in from_json(feed.advance().data).groups}
    assert len(told["other"].history) > 200
    assert told["train"].history == ()


def test_a_thousand_members_hold_up_the_masters_loop_for_a_few_milliseconds() -> None:
    report = thousand().report()
    feed = Feed(lambda _: report)
    feed.advance()
    taken = []
    for _ in range(10):
        began = time.perf_counter()
        update = feed.advance()
        taken.append(time.perf_counter() - began)
    print(f"a tick of 1,000 members: {1e3 * min(taken):.2f} ms, {len(update.data)} bytes")
    assert min(taken) < 0.01
