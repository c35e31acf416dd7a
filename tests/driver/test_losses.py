"""Actors, masters and drivers die: who is left gets the right numbers, and never waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, PendingCallsLimitExceeded, RayActorError

import ray_pccl
from ray_pccl import InputFailedError, PeerLostError, ReduceOp, UsageError
from ray_pccl.driver import agent
from ray_pccl.driver.agent import Call, encode_call
from ray_pccl.driver.roster import State
from ray_pccl.testing import eventually
from ray_pccl.testing.ownership import send_signal
from tests.driver.workers import (
    AsyncActor,
    Gate,
    ThreadedActor,
    end,
    get,
    identity,
    is_watched,
    kill,
    made,
    pid_of,
    published,
    run_driver,
    start,
)

pytestmark = pytest.mark.ray

SOON_S = 20.0
"""Much shorter than any timeout that would end a wait for a dead actor."""

DRIVER = """
import sys, time
import ray, ray_pccl
from tests.driver.workers import get, identity, start
ray.init(address=sys.argv[1], log_to_driver=False)
actors = start(2)
group = ray_pccl.create_group(actors, sys.argv[2])
refs = [actor.make.remote(lambda: __import__("numpy").ones(1 << 16)) for actor in actors]
assert ray.get(group.allreduce_refs(refs))[0][0] == 2
print(*(get(actor.pid.remote()) for actor in actors), flush=True)
while True:
    get(group.allreduce_refs(refs))
"""


class Team:
    """Two actors that live, and one that will not, in a group."""

    def __init__(self, survivors: list[Any], victim: Any, name: str, **options: Any) -> None:
        self.survivors = survivors
        self.victim = victim
        self.group = ray_pccl.create_group(self.actors, name, **options)
        self.group.wait_ready(60)

    @property
    def actors(self) -> list[Any]:
        return [*self.survivors, self.victim]

    def kill(self) -> None:
        kill(self.victim)

    def ones(self) -> list[Any]:
        return [actor.run.remote(identity, 1) for actor in self.survivors]

    def goes_on(self) -> bool:
        """Whether the survivors reduce among themselves."""
        return bool(get(self.group.allreduce_refs(self.ones()), SOON_S) == [2, 2])


@pytest.fixture
def team(workers: list[Any], name: str) -> Iterator[Team]:
    [victim] = start(1)
    team = Team(workers[:2], victim, name)
    yield team
    team.group.destroy()
    end([victim])


def assert_lost(ref: Any, actor: Any) -> None:
    """The result raises an error that is ours and Ray's, and names the actor."""
    with pytest.raises(PeerLostError) as caught:
        get(ref, SOON_S)
    assert isinstance(caught.value, ActorDiedError)
    assert actor._actor_id.hex() in str(caught.value)
    with pytest.raises(ActorDiedError):
        get(ref, SOON_S)


# -------------------------------------------------------------------------------------------------- one actor is killed


@pytest.mark.parametrize("make", ["make", "run"])
def test_an_actor_that_died_before_the_call_is_left_out(team: Team, make: str) -> None:
    refs = [getattr(actor, make).remote(made, place) for place, actor in enumerate(team.actors)]
    get(refs)
    team.kill()

    reduced = team.group.allreduce_refs(refs)

    assert [value.tolist() for value in get(reduced[:2], SOON_S)] == [[1, 3, 5, 7]] * 2
    assert_lost(reduced[2], team.victim)
    assert team.goes_on()


def test_after_a_death_only_the_survivors_refs_are_needed(team: Team) -> None:
    team.kill()

    assert team.goes_on()

    eventually(lambda: team.group.world_size == 2, SOON_S)
    eventually(lambda: len(team.group.actors) == 2, SOON_S)
    team.group.wait_ready(SOON_S)


@pytest.mark.parametrize("make", ["make", "run"])
def test_an_actor_that_dies_in_its_own_method_is_left_out(team: Team, gate: Gate, make: str) -> None:
    pid = pid_of(team.victim)
    refs = [actor.make.remote(made, place) for place, actor in enumerate(team.survivors)]
    held = getattr(team.victim, make).remote(gate.hold, np.full(4, 100.0))
    reduced = team.group.allreduce_refs([*refs, held])
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    assert [value.tolist() for value in get(reduced[:2], SOON_S)] == [[1, 3, 5, 7]] * 2
    assert_lost(reduced[2], team.victim)
    assert team.goes_on()


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.06])
def test_an_actor_that_dies_while_large_tensors_are_reduced_is_in_all_results_or_in_none(
    team: Team, delay_s: float
) -> None:
    pid = pid_of(team.victim)
    count = 4 << 20
    refs = [actor.make.remote(np.full, count, float(10**place)) for place, actor in enumerate(team.actors)]
    get([actor.run.remote(identity, None) for actor in team.actors])
    reduced = team.group.allreduce_refs(refs)
    time.sleep(delay_s)

    send_signal(pid, signal.SIGKILL)

    values = get(reduced[:2], SOON_S)
    [total] = {float(value[0]) for value in values}
    assert total in (11.0, 111.0)
    assert all((value == total).all() for value in values)
    assert_lost(reduced[2], team.victim)
    assert team.goes_on()


def test_an_actor_that_dies_afterwards_takes_its_own_result_along_and_no_other(team: Team) -> None:
    reduced = team.group.allreduce_refs([actor.make.remote(made, 1) for actor in team.actors])
    assert [value.tolist() for value in get(reduced)] == [[3, 6, 9, 12]] * 3

    team.kill()

    assert [value.tolist() for value in get(reduced[:2], SOON_S)] == [[3, 6, 9, 12]] * 2
    assert_lost(reduced[2], team.victim)
    with pytest.raises(PeerLostError, match=team.victim._actor_id.hex()):
        get(team.survivors[0].run.remote(identity, reduced[2]), SOON_S)
    assert team.goes_on()


def test_the_average_is_that_of_the_contributors(team: Team, gate: Gate) -> None:
    pid = pid_of(team.victim)
    refs = [actor.make.remote(np.full, 3, value) for actor, value in zip(team.survivors, [1.0, 2.0], strict=True)]
    reduced = team.group.allreduce_refs([*refs, team.victim.make.remote(gate.hold, np.full(3, 99.0))], ReduceOp.AVG)
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    assert [value.tolist() for value in get(reduced[:2], SOON_S)] == [[1.5] * 3] * 2


@pytest.mark.parametrize("call", ["allreduce_refs", "reduce_refs", "allgather_refs", "reducescatter_refs"])
def test_on_loss_raise_fails_the_whole_call(team: Team, gate: Gate, call: str) -> None:
    pid = pid_of(team.victim)
    refs = [actor.make.remote(np.ones, 3) for actor in team.survivors]
    held = team.victim.make.remote(gate.hold, np.ones(3))
    results = getattr(team.group, call)([*refs, held], on_loss="raise")
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    for result in [results] if call == "reduce_refs" else results:
        assert_lost(result, team.victim)
    assert team.goes_on()


@pytest.mark.parametrize("call", ["allreduce_refs", "reduce_refs", "allgather_refs", "reducescatter_refs"])
def test_on_loss_raise_fails_the_whole_call_if_an_actor_was_killed_just_before(team: Team, call: str) -> None:
    refs = [actor.make.remote(np.ones, 3) for actor in team.actors]
    get(refs)
    team.kill()

    results = getattr(team.group, call)(refs, on_loss="raise")

    for result in [results] if call == "reduce_refs" else results:
        assert_lost(result, team.victim)
    assert team.goes_on()


@pytest.mark.parametrize("on_loss", ["continue", "raise"])
def test_a_barrier_is_passed_by_the_survivors_or_fails_for_all_as_was_asked(
    team: Team, gate: Gate, on_loss: str
) -> None:
    pid = pid_of(team.victim)
    team.victim.run.remote(gate.hold)
    gate.await_reached()
    passed = team.group.barrier(on_loss=on_loss)

    send_signal(pid, signal.SIGKILL)

    if on_loss == "continue":
        assert get(passed[:2], SOON_S) == [None, None]
    else:
        for result in passed[:2]:
            assert_lost(result, team.victim)
    assert_lost(passed[2], team.victim)
    assert team.goes_on()


def test_gathering_and_scattering_leave_out_who_died(team: Team, gate: Gate) -> None:
    pid = pid_of(team.victim)
    refs = [actor.make.remote(made, place, 6) for place, actor in enumerate(team.survivors)]
    order = [refs[0], team.victim.make.remote(gate.hold, made(50, 6)), refs[1]]
    gathered = team.group.allgather_refs(order)
    scattered = team.group.reducescatter_refs(order)
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    for place in (0, 2):
        assert [value.tolist() for value in get(gathered[place], SOON_S)] == [made(0, 6).tolist(), made(1, 6).tolist()]
    assert get(scattered[0], SOON_S).tolist() == [1, 3]
    assert get(scattered[2], SOON_S).tolist() == [9, 11]
    assert_lost(gathered[1], team.victim)
    assert_lost(scattered[1], team.victim)
    assert team.goes_on()


def test_reducing_to_a_root_that_died_is_lost_and_to_another_it_is_not(team: Team, gate: Gate) -> None:
    pid = pid_of(team.victim)
    refs = [actor.make.remote(np.ones, 2) for actor in team.survivors]
    refs.append(team.victim.make.remote(gate.hold, np.ones(2)))
    to_the_dead = team.group.reduce_refs(refs, team.victim)
    to_another = team.group.reduce_refs(refs, 0)
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    assert_lost(to_the_dead, team.victim)
    assert get(to_another, SOON_S).tolist() == [2, 2]
    assert team.goes_on()


def test_a_broadcast_of_who_died_is_lost_and_one_to_it_reaches_the_others(team: Team, gate: Gate) -> None:
    pid = pid_of(team.victim)
    from_the_dead = team.group.broadcast_ref(team.victim.make.remote(gate.hold, np.ones(2)))
    from_another = team.group.broadcast_ref(team.survivors[0].make.remote(np.ones, 2))
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    for result in from_the_dead:
        assert_lost(result, team.victim)
    assert [value.tolist() for value in get(from_another[:2], SOON_S)] == [[1, 1]] * 2
    assert_lost(from_another[2], team.victim)
    assert team.goes_on()


def test_many_calls_in_flight_all_end_when_an_actor_dies(team: Team, gate: Gate) -> None:
    pid = pid_of(team.victim)
    calls = [team.group.allreduce_refs([actor.run.remote(identity, 1) for actor in team.actors]) for _ in range(5)]
    team.victim.run.remote(gate.hold)
    calls += [team.group.allreduce_refs([actor.run.remote(identity, 1) for actor in team.actors]) for _ in range(10)]
    gate.await_reached()

    send_signal(pid, signal.SIGKILL)

    sums = [get(call[:2], SOON_S) for call in calls]
    assert sums == [[3, 3]] * 5 + [[2, 2]] * 10
    for call in calls[5:]:
        assert_lost(call[2], team.victim)


def test_inside_actors_the_sum_is_that_of_the_survivors(team: Team, gate: Gate) -> None:
    pid = pid_of(team.victim)
    team.victim.run.remote(gate.hold)
    gate.await_reached()
    name = team.group.name
    inside = [actor.run.remote(lambda: ray_pccl.allreduce(1, group_name=name)) for actor in team.survivors]

    send_signal(pid, signal.SIGKILL)

    assert get(inside, SOON_S) == [2, 2]


def test_an_actor_that_ray_ended_is_as_dead_as_any(team: Team) -> None:
    ray.kill(team.victim)

    assert team.goes_on()

    reduced = team.group.barrier()
    assert get(reduced, SOON_S) == [None] * len(reduced)


def test_the_last_actor_goes_on_alone(ray_local: Any, name: str) -> None:
    actors = start(3)
    group = ray_pccl.create_group(actors, name)
    group.wait_ready(60)

    for victim in actors[1:]:
        kill(victim)

    assert get(group.allreduce_refs([actors[0].run.remote(identity, 5)]), SOON_S) == [5]
    group.destroy()
    end(actors[:1])


def test_an_actor_that_dies_while_the_group_forms_is_left_out(workers: list[Any], name: str, gate: Gate) -> None:
    [victim] = start(1)
    pid = pid_of(victim)
    victim.run.remote(gate.hold)
    gate.await_reached()
    group = ray_pccl.create_group([*workers[:2], victim], name)
    reduced = group.allreduce_refs([worker.run.remote(identity, 1) for worker in [*workers[:2], victim]])

    send_signal(pid, signal.SIGKILL)

    assert get(reduced[:2], SOON_S) == [2, 2]
    assert_lost(reduced[2], victim)
    group.destroy()


# -------------------------------------------------------------------------------------------------- and comes back


def test_an_actor_with_restarts_takes_part_again_by_itself(workers: list[Any], name: str) -> None:
    [phoenix] = start(1, max_restarts=-1)
    team = Team(workers[:2], phoenix, name)

    def total() -> int:
        """What the survivors get, which is the same, and right: with the third actor or without."""
        reduced = team.group.allreduce_refs([*team.ones(), phoenix.run.remote(identity, 1)])
        [value] = set(get(reduced[:2], SOON_S))
        assert value in (2, 3)
        if value == 3:
            assert get(reduced[2], SOON_S) == 3
        return int(value)

    assert total() == 3
    for _ in range(2):
        send_signal(eventually(lambda: pid_if_alive(phoenix), SOON_S), signal.SIGKILL)
        assert total() == 2
        eventually(lambda: total() == 3, 60)
        assert team.group.world_size == 3
        assert phoenix._actor_id in [member._actor_id for member in team.group.members()]
    team.group.destroy()
    end([phoenix])


def pid_if_alive(actor: Any) -> int | None:
    with contextlib.suppress(RayActorError):
        return pid_of(actor)
    return None


def test_wait_ready_waits_for_an_actor_that_is_on_its_way_back(workers: list[Any], name: str) -> None:
    [phoenix] = start(1, max_restarts=1)
    team = Team(workers[:2], phoenix, name)
    kill(phoenix)
    assert team.goes_on()

    team.group.wait_ready(60)

    assert team.group.world_size == 3
    reduced = team.group.allreduce_refs([actor.make.remote(np.ones, 2) for actor in team.actors])
    assert [value.tolist() for value in get(reduced, SOON_S)] == [[3, 3]] * 3
    team.group.destroy()
    end([phoenix])


def test_a_newcomer_takes_the_place_of_a_dead_actor(team: Team) -> None:
    team.kill()
    assert team.goes_on()
    [newcomer] = start(1)

    team.group.add([newcomer])
    team.group.wait_ready(60)

    actors = [*team.survivors, newcomer]
    assert get(team.group.allreduce_refs([actor.run.remote(identity, 1) for actor in actors])) == [3, 3, 3]
    end([newcomer])


# ------------------------------------------------------------------------------------------------------- the master


def kill_master() -> int:
    pid: int = get(ray_pccl.start_master().pid.remote())
    send_signal(pid, signal.SIGKILL)
    return pid


def test_a_group_goes_on_while_its_master_is_killed_and_comes_back(team: Team) -> None:
    old = kill_master()

    for _ in range(5):
        reduced = team.group.allreduce_refs([actor.make.remote(np.ones, 2) for actor in team.actors])
        assert [value.tolist() for value in get(reduced, SOON_S)] == [[3, 3]] * 3

    assert get(ray_pccl.start_master().pid.remote()) != old
    eventually(lambda: team.group.world_size == 3, SOON_S)


def test_the_survivors_go_on_when_the_master_dies_along_with_an_actor(team: Team) -> None:
    refs = [actor.make.remote(np.ones, 2) for actor in team.actors]
    get(refs)
    kill_master()
    team.kill()

    reduced = team.group.allreduce_refs(refs)

    assert [value.tolist() for value in get(reduced[:2], 60)] == [[2, 2]] * 2
    assert_lost(reduced[2], team.victim)
    assert team.goes_on()


def test_groups_are_made_and_changed_when_the_master_has_come_back(workers: list[Any], name: str) -> None:
    kill_master()

    group = ray_pccl.create_group(workers[:2], name)
    assert get(group.allreduce_refs([worker.run.remote(identity, 1) for worker in workers[:2]])) == [2, 2]
    kill_master()
    group.add([workers[2]])
    group.wait_ready(60)

    assert get(group.allreduce_refs([worker.run.remote(identity, 1) for worker in workers])) == [3, 3, 3]
    group.destroy()


# ------------------------------------------------------------------------------------------------------- the driver


def named_actors() -> list[Any]:
    return sorted(ray.util.list_named_actors(all_namespaces=True), key=str)


def test_a_driver_that_dies_takes_its_actors_along_and_leaves_nothing(workers: list[Any], name: str) -> None:
    ray_pccl.start_master()
    before = named_actors()
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, name], env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert is_known(name)

        send_signal(driver.pid, signal.SIGKILL)

    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 60, "its actors end")
    assert named_actors() == before
    eventually(lambda: not is_known(name), SOON_S, "the group is forgotten")
    again = ray_pccl.create_group(workers, name)
    assert get(again.allreduce_refs([worker.run.remote(identity, 1) for worker in workers]), SOON_S) == [3, 3, 3]
    again.destroy()


def is_known(name: str) -> bool:
    from ray_pccl.driver.master import describe

    return any(status.group == name and status.members for status in describe())


def test_a_caller_that_dies_in_the_middle_of_a_call_holds_up_nobody_else(workers: list[Any], name: str) -> None:
    [caller] = start(1)
    group = ray_pccl.create_group(workers, name, op_timeout_s=5)
    group.wait_ready(60)

    def call_for_ever() -> None:
        found = ray_pccl.get_group(name)
        while True:
            ray.get(found.allreduce_refs([actor.make.remote(made, 1) for actor in found.actors]))

    eventually(lambda: published(name) == 3, SOON_S)
    pid = pid_of(caller)
    caller.run.remote(call_for_ever)
    eventually(lambda: any(ray_pccl.store_stats(worker).objects for worker in workers), SOON_S)

    send_signal(pid, signal.SIGKILL)

    for _ in range(3):
        reduced = group.allreduce_refs([worker.run.remote(identity, 1) for worker in workers])
        assert get(reduced, SOON_S) == [3, 3, 3]
    group.destroy()


def test_a_group_of_dead_actors_can_be_destroyed_and_made_anew(ray_local: Any, name: str) -> None:
    actors = start(2)
    group = ray_pccl.create_group(actors, name)
    group.wait_ready(60)
    assert get([actor.run.remote(is_watched, name) for actor in actors]) == [True, True]
    for actor in actors:
        kill(actor)

    eventually(lambda: group.world_size == 0, SOON_S)
    group.destroy()
    with pytest.raises(UsageError, match="there is no group"):
        ray_pccl.get_group(name)
    fresh = start(2)
    again = ray_pccl.create_group(fresh, name)

    assert get(again.allreduce_refs([actor.run.remote(identity, 1) for actor in fresh]), SOON_S) == [2, 2]
    again.destroy()
    end(fresh)


# ----------------------------------------------------------------------------------------- what users do to themselves

SCRIPT_ON_TWO_NODES = """
import time
import numpy as np, ray, ray_pccl
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_pccl.driver.groups import _watch
from ray_pccl.driver import agent
from ray_pccl.driver.agent import Call, encode_call
from ray_pccl.driver.roster import State
from ray_pccl.testing import eventually
from ray_pccl.testing.cluster import ray_nodes
from tests.driver.workers import Gate, WorkerActor, get, identity, start
import pathlib, sys, tempfile
with ray_nodes(2), tempfile.TemporaryDirectory() as directory:
    gate = Gate(pathlib.Path(directory))
    here = ray.get_runtime_context().get_node_id()
    (there,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
    actors = start(2, scheduling_strategy=NodeAffinitySchedulingStrategy(there, soft=False))
    group = ray_pccl.create_group(actors, "far")
    group.wait_ready(60)
    values = [actor.make.remote(np.ones, 3) for actor in actors]
    ray.wait(values, num_returns=2)
    texts = [actor.run.remote(lambda: "x" * 3_000_000) for actor in actors]  # in that node's own store
    gathered = group.allgather_refs(texts)
    held = [actor.run.remote(gate.hold) for actor in actors]
    reduced = group.allreduce_refs(values)
    del values
    ray.wait(gathered, num_returns=2, fetch_local=False)
    eventually(lambda: len(_watch._pending) == 2, 20, "only the last call is pending")
    gate.open()
    print([value.tolist() for value in get(reduced)], group.world_size, flush=True)
"""


def test_a_large_result_on_another_node_upsets_no_call_that_is_pending(ray_local: Any) -> None:
    printed = run_driver(SCRIPT_ON_TWO_NODES)

    assert printed.splitlines()[-1] == "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]] 2"


def test_a_cancelled_call_of_an_async_actor_is_told_to_the_others_and_holds_up_no_later_one(
    ray_local: Any, name: str, gate: Gate
) -> None:
    actors = start(2, AsyncActor)
    group = ray_pccl.create_group(actors, name)
    group.wait_ready(60)
    refs = [actors[0].make_held.remote(gate, np.ones, 2), actors[1].make.remote(np.ones, 2)]
    gate.await_reached()
    reduced = group.allreduce_refs(refs)
    eventually(lambda: get(actors[0].run.remote(_arrivals, name)) == 1, SOON_S, "the call has arrived")

    ray.cancel(reduced[0])

    with pytest.raises(InputFailedError, match="cancelled"):
        get(reduced[1], SOON_S)
    gate.open()
    again = group.allreduce_refs([actor.make.remote(np.ones, 2) for actor in actors])
    assert [value.tolist() for value in get(again, SOON_S)] == [[2.0, 2.0]] * 2
    group.destroy()
    end(actors)


def _arrivals(name: str) -> int:
    """How many calls of the group wait in this actor, for their values or for their turns."""
    from ray_pccl.driver.seats import local_seats

    return sum(len(lane._arrived) for lane in local_seats.find(name)._lanes.values())


@pytest.mark.parametrize("actor_class", [ThreadedActor, AsyncActor], ids=["threaded", "async"])
@pytest.mark.parametrize("how", ["remove", "destroy"])
def test_actors_leave_after_the_calls_that_were_made_before(
    ray_local: Any, name: str, gate: Gate, actor_class: Any, how: str
) -> None:
    actors = start(2, actor_class)
    group = ray_pccl.create_group(actors, name)
    group.wait_ready(60)
    held = actors[0].make_held.remote(gate, np.ones, 2) if actor_class is AsyncActor else None
    first = held or actors[0].make.remote(lambda: gate.hold(np.ones(2)))
    reduced = group.allreduce_refs([first, actors[1].make.remote(np.ones, 2)])
    gate.await_reached()

    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(group.remove, actors[1:]) if how == "remove" else threads.submit(group.destroy)
        eventually(lambda: group.is_destroyed or len(group.actors) == 1, SOON_S)
        gate.open()
        leaving.result(SOON_S)

    assert [value.tolist() for value in get(reduced, SOON_S)] == [[2.0, 2.0]] * 2
    if how == "remove":  # who stays waits for nothing that only the other was asked for
        assert get(group.allreduce_refs([actors[0].run.remote(identity, 5)]), SOON_S) == [5]
    group.destroy()
    end(actors)


def test_a_call_that_an_actor_can_not_take_holds_up_nobody(workers: list[Any], name: str, gate: Gate) -> None:
    [full] = start(1, max_pending_calls=1, max_restarts=0)
    group = ray_pccl.create_group([*workers[:2], full], name)
    group.wait_ready(60)
    refs = [actor.make.remote(np.ones, 2) for actor in workers[:2]] + [full.make.remote(np.ones, 2)]
    ray.wait(refs, num_returns=3)
    eventually(lambda: _accepts(full, gate), SOON_S)
    gate.await_reached()

    for actor in group._roster.actors.values():
        actor.peer_id = ""  # as it is for a moment after the group has formed
    with pytest.raises(PendingCallsLimitExceeded):
        group.allreduce_refs(refs)

    gate.open()
    eventually(lambda: _sum_of(group, [*workers[:2], full]) == 3, SOON_S, "all take part again")
    group.destroy()
    end([full])


@pytest.mark.parametrize("how", ["remove", "destroy"])
def test_an_actor_whose_queue_is_full_leaves_when_it_has_room(
    workers: list[Any], name: str, gate: Gate, how: str
) -> None:
    [full] = start(1, max_pending_calls=1, max_restarts=0)
    group = ray_pccl.create_group([*workers[:2], full], name)
    group.wait_ready(60)
    eventually(lambda: _accepts(full, gate), SOON_S)
    gate.await_reached()

    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(group.remove, [full]) if how == "remove" else threads.submit(group.destroy)
        if how == "remove":
            eventually(lambda: len(group.actors) == 2, SOON_S)
        else:  # the others need not wait for it
            eventually(lambda: not any(get(actor.run.remote(_is_in, name)) for actor in workers[:2]), SOON_S)
        assert not leaving.done()
        gate.open()
        leaving.result(SOON_S)

    assert not get(full.run.remote(_is_in, name))
    group.destroy()
    end([full])


def _is_in(name: str) -> bool:
    from ray_pccl.driver.seats import local_seats

    return name in local_seats


def test_an_actor_whose_queue_stays_full_is_put_out(
    workers: list[Any], name: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    [full] = start(1, max_pending_calls=1, max_restarts=0)
    group = ray_pccl.create_group([*workers[:2], full], name)
    group.wait_ready(60)
    eventually(lambda: _accepts(full, gate), SOON_S)
    gate.await_reached()

    monkeypatch.setattr("ray_pccl.driver.groups._LEAVE_S", 0.5)
    group.remove([full])

    eventually(lambda: group.world_size == 2, SOON_S)
    refs = [actor.run.remote(identity, 1) for actor in workers[:2]]
    assert get(group.allreduce_refs(refs), SOON_S) == [2, 2]
    gate.open()
    group.destroy()
    end([full])


def test_a_vote_that_an_actor_can_not_take_holds_up_nobody(workers: list[Any], name: str, gate: Gate) -> None:
    [full] = start(1, max_pending_calls=1, max_restarts=0)
    group = ray_pccl.create_group([workers[0], full], name)
    group.wait_ready(60)
    eventually(lambda: _accepts(full, gate), SOON_S)
    gate.await_reached()
    group.add([workers[1]])
    newcomer = group._roster.actors[workers[1]._actor_id.hex()]
    eventually(lambda: newcomer.state is State.WAITING, SOON_S)

    with pytest.raises(PendingCallsLimitExceeded):
        group.barrier()  # the vote to admit comes first

    eventually(lambda: group.world_size == 2 and len(group.members()) == 2, SOON_S, "who could vote has let it in")
    assert full not in group.members()
    gate.open()
    eventually(lambda: _sum_of(group, [*workers[:2], full]) == 3, SOON_S, "all take part again")
    group.destroy()
    end([full])


def test_calls_that_come_before_the_one_to_join_tell_that_the_actor_is_lost(ray_local: Any) -> None:
    """As after a restart, where calls that were meant for the earlier process arrive first, several at a time."""
    [actor] = start(1, AsyncActor)
    call = encode_call(Call("no group", "no uid", 1, 0, 0, "barrier"))
    hidden = actor.__ray_call__.options(name="ray_pccl.barrier(no group)")
    for _ in range(2):
        results = [hidden.remote(agent.run, call) for _ in range(5)]
        for result in results:
            with pytest.raises(PeerLostError, match="restarted"):
                get(result, SOON_S)
    end([actor])


def _accepts(actor: Any, gate: Gate) -> bool:
    with contextlib.suppress(PendingCallsLimitExceeded):
        actor.run.remote(gate.hold)
        return True
    return False


def _sum_of(group: Any, actors: list[Any]) -> int | None:
    with contextlib.suppress(PendingCallsLimitExceeded, PeerLostError):
        refs = [actor.run.remote(identity, 1) for actor in actors[:2]]
        return int(get(group.allreduce_refs([*refs, actors[2].run.remote(identity, 1)])[0], SOON_S))
    return None
