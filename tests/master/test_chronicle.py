"""The timeline's milliseconds and its bounds."""

from __future__ import annotations

from master_actor.chronicle import KEPT, Chronicle
from master_actor.core.actions import Note
from ray_pccl.reports import HappeningKind

K = HappeningKind


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _chronicle() -> tuple[Chronicle, _Clock]:
    clock = _Clock()
    return Chronicle(clock, lambda: 1_000_000 + clock.now), clock


def test_a_recovery_takes_from_the_first_loss_to_the_new_epoch() -> None:
    chronicle, clock = _chronicle()
    chronicle.note(Note(K.LOST, "g", 1, "a"))
    clock.now += 0.004
    chronicle.note(Note(K.LOST, "g", 1, "b"))
    chronicle.note(Note(K.LOST, "other", 1, "z"))
    clock.now += 0.003
    recovered = chronicle.note(Note(K.RECOVERED, "g", 2))
    assert recovered.took_ms == 7.0
    assert recovered.at == 1_000_000 + clock.now
    clock.now += 5
    assert chronicle.note(Note(K.RECOVERED, "g", 3)).took_ms is None, "nobody was lost since"
    assert chronicle.note(Note(K.RECOVERED, "other", 2)).took_ms == 5003.0


def test_a_return_takes_since_the_boot() -> None:
    chronicle, clock = _chronicle()
    chronicle.booted(3)
    clock.now += 1.5
    assert chronicle.note(Note(K.RETURNED, "g", 2)).took_ms == 1500.0
    assert chronicle.booted_at == 1_000_100.0


def test_only_what_is_new_is_told_in_order_over_all_groups() -> None:
    chronicle, _ = _chronicle()
    for name in ("a", "b", "a", "c"):
        chronicle.note(Note(K.WAITING, name, 1, "p"))
    assert [(h.number, h.group) for h in chronicle.after(0)] == [(1, "a"), (2, "b"), (3, "a"), (4, "c")]
    assert [h.number for h in chronicle.after(2)] == [3, 4]
    assert chronicle.after(4) == ()


def test_a_busy_group_hides_no_other_one() -> None:
    chronicle, _ = _chronicle()
    chronicle.note(Note(K.LOST, "quiet", 1, "p"))
    for _ in range(KEPT + 10):
        chronicle.note(Note(K.WAITING, "busy", 1, "p"))
    assert [h.group for h in chronicle.after(0)].count("busy") == KEPT
    assert chronicle.after(0)[0].group == "quiet"


def test_evictions_are_losses_of_who_may_still_run() -> None:
    chronicle, _ = _chronicle()
    chronicle.note(Note(K.LOST, "g", 1, "a", certain=True))
    chronicle.note(Note(K.LOST, "g", 1, "b", certain=False))
    assert chronicle.counts["g", K.LOST] == 2
    assert chronicle.evictions["g"] == 1


def test_what_is_forgotten_leaves_nothing_but_the_masters_own() -> None:
    chronicle, _ = _chronicle()
    chronicle.booted(1)
    chronicle.note(Note(K.LOST, "gone", 1, "a", certain=False))
    chronicle.note(Note(K.LOST, "here", 1, "a"))
    chronicle.forget({"here"})
    assert [h.group for h in chronicle.after(0)] == ["", "here"]
    assert chronicle.counts["gone", K.LOST] == chronicle.evictions["gone"] == 0
