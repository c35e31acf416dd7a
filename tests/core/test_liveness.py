"""The table "When is a peer dead?" of docs/design/membership.md, row by row."""

from __future__ import annotations

from master_actor.core.liveness import SENTINEL_PATIENCE_S, Liveness
from ray_pccl.control.messages import ProcessState
from ray_pccl.settings import Settings

SETTINGS = Settings(heartbeat_timeout_s=1, stall_timeout_s=30)
TICK_S = 0.1


class Watched:
    """A `Liveness` under a clock that ticks as the server's does."""

    def __init__(self) -> None:
        self.liveness = Liveness(SETTINGS)
        self.now = 0.0

    def connect(self, peer_id: str, host: str = "h", *, watched: bool = True) -> None:
        self.liveness.connected(peer_id, host, watched=watched, now=self.now)

    def see(self, peer_id: str, state: ProcessState, host: str = "h") -> None:
        self.liveness.sentinel_heard(host, self.now)
        self.liveness.seen(host, peer_id, state, self.now)

    def until(self, end: float, *, beating: str = "", sentinels: tuple[str, ...] = ()) -> dict[str, float]:
        """Time passes; when each peer was first judged dead. Peers and sentinels that are named give signs of life."""
        dead: dict[str, float] = {}
        steps = round((end - self.now) / TICK_S)
        start = self.now
        for step in range(1, steps + 1):
            self.now = round(start + step * TICK_S, 6)
            for peer_id in beating:
                self.liveness.heard(peer_id, self.now)
            for host in sentinels:
                self.liveness.sentinel_heard(host, self.now)
            for verdict in self.liveness.tick(self.now):
                dead.setdefault(verdict.peer_id, self.now)
        return dead

    def reason(self, peer_id: str) -> str:
        (verdict,) = [verdict for verdict in self.liveness.tick(self.now) if verdict.peer_id == peer_id]
        return verdict.reason


def test_a_peer_that_beats_lives() -> None:
    world = Watched()
    world.connect("a")
    world.connect("b", watched=False)
    assert world.until(60.0, beating="ab") == {}


def test_a_closed_connection_is_certain_only_where_no_sentinel_could_know_better() -> None:
    world = Watched()
    world.connect("a", watched=False)
    world.connect("b")
    assert world.liveness.disconnected("a") is True
    assert world.liveness.disconnected("b") is False


def test_a_peer_whose_sentinel_does_not_come_is_judged_by_its_own_beats() -> None:
    world = Watched()
    world.connect("a")
    assert world.until(10.0) == {"a": SENTINEL_PATIENCE_S}


def test_a_closed_connection_is_not_certain_if_the_sentinel_sees_the_process_running() -> None:
    for state in (ProcessState.RUNNING, ProcessState.STOPPED):
        world = Watched()
        world.connect("a")
        world.see("a", state)
        assert world.liveness.disconnected("a") is False


def test_what_a_sentinel_saw_before_the_peer_connected_counts() -> None:
    world = Watched()
    world.see("a", ProcessState.RUNNING)
    world.connect("a")
    assert world.liveness.disconnected("a") is False


def test_a_peer_that_is_not_there_can_not_disconnect() -> None:
    assert Watched().liveness.disconnected("nobody") is False


def test_a_stopped_process_is_dead_after_the_heartbeat_timeout() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.RUNNING)
    world.until(5.0, beating="a", sentinels=("h",))
    world.see("a", ProcessState.STOPPED)
    assert world.until(7.0, sentinels=("h",)) == {"a": 6.0}
    assert "SIGSTOP" in world.reason("a")


def test_a_short_stop_costs_nothing() -> None:
    world = Watched()
    world.connect("a")
    for start in range(5):
        world.see("a", ProcessState.STOPPED)
        assert world.until(2 * start + 0.9, sentinels=("h",)) == {}
        world.see("a", ProcessState.RUNNING)
        assert world.until(2 * start + 2.0, sentinels=("h",)) == {}


def test_a_process_that_was_stopped_before_it_reconnected_is_still_stopped() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.STOPPED)
    world.connect("a")
    assert world.until(1.5, sentinels=("h",)) == {"a": 1.0}


def test_a_host_of_which_nothing_is_heard_is_dead_after_the_heartbeat_timeout() -> None:
    world = Watched()
    for peer_id in "ab":
        world.connect(peer_id)
        world.see(peer_id, ProcessState.RUNNING)
    world.connect("x", "other host")
    world.see("x", ProcessState.RUNNING, "other host")
    world.until(5.0, beating="abx", sentinels=("h", "other host"))
    assert world.until(7.0, sentinels=("other host",)) == {"a": 6.0, "b": 6.0}
    assert "host h" in world.reason("a")


def test_a_silent_peer_on_a_host_that_is_heard_is_dead_only_after_the_stall_timeout() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.RUNNING)
    assert world.until(31.0, sentinels=("h",)) == {"a": 30.0}
    assert "GIL" in world.reason("a")


def test_a_peer_that_holds_its_gil_for_ten_seconds_lives() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.RUNNING)
    assert world.until(10.0, sentinels=("h",)) == {}
    assert world.until(35.0, beating="a", sentinels=("h",)) == {}


def test_another_peer_of_the_host_shows_that_the_host_lives() -> None:
    world = Watched()
    for peer_id in "ab":
        world.connect(peer_id)
        world.see(peer_id, ProcessState.RUNNING)
    assert world.until(29.0, beating="b") == {}


def test_without_a_sentinel_a_peers_own_beats_must_come() -> None:
    world = Watched()
    world.connect("a", watched=False)
    assert world.until(2.0) == {"a": 1.0}
    assert "no sentinel" in world.reason("a")


def test_an_unwatched_peer_is_not_excused_by_its_neighbours() -> None:
    world = Watched()
    world.connect("a", watched=False)
    world.connect("b", watched=False)
    assert world.until(2.0, beating="b") == {"a": 1.0}


def test_when_the_sentinel_is_gone_a_silent_peer_has_the_time_that_a_new_one_may_take() -> None:
    # A sentinel that was killed is replaced by its peers, which one that holds its GIL can't do at once.
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.RUNNING)
    world.until(5.0, beating="a", sentinels=("h",))
    world.liveness.sentinel_gone("h", world.now)
    assert world.until(40.0) == {"a": 5.0 + SENTINEL_PATIENCE_S}


def test_when_the_sentinel_is_gone_what_it_saw_is_not_believed_any_more() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.RUNNING)
    world.see("a", ProcessState.STOPPED)
    world.liveness.sentinel_gone("h", world.now)
    assert world.until(10.0, beating="a") == {}


def test_a_sentinel_that_comes_again_is_believed_again() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.RUNNING)
    world.liveness.sentinel_gone("h", world.now)
    world.see("a", ProcessState.STOPPED)
    assert world.until(1.5, sentinels=("h",)) == {"a": 1.0}


def test_two_short_freezes_between_which_the_sentinel_saw_nothing_are_not_a_long_one() -> None:
    world = Watched()
    world.connect("a")
    world.see("a", ProcessState.STOPPED)
    assert world.until(0.6, sentinels=("h",)) == {}
    world.liveness.heard("a", world.now)  # it ran for a moment, and said something
    assert world.until(2.0, sentinels=("h",)) == {"a": 1.6}


def test_what_is_gone_is_forgotten() -> None:
    world = Watched()
    for place in range(100):
        peer_id, host = f"p{place}", f"h{place}"
        world.connect(peer_id, host)
        world.see(peer_id, ProcessState.RUNNING, host)
        world.see(peer_id, ProcessState.EXITING, host)
        world.liveness.disconnected(peer_id)
        world.liveness.sentinel_gone(host, world.now)
    assert world.liveness.peers == {} == world.liveness.hosts == world.liveness._processes
