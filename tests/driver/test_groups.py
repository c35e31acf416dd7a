"""Groups of plain actors: made, found, changed and ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import ray_pccl
from ray_pccl import ReduceOp, RendezvousTimeoutError, SettingsError, UsageError
from ray_pccl.driver.creating import LAST_CALL_S
from ray_pccl.driver.errors import ActorLostError
from ray_pccl.testing import eventually
from tests.driver.workers import AsyncActor, Gate, WorkerActor, end, get, identity, pid_of, published, run_driver, start

pytestmark = pytest.mark.ray

SECOND_DRIVER = """
import json, sys
import ray, ray_pccl
from tests.driver.workers import identity, made
ray.init(address=sys.argv[1], log_to_driver=False)
group = ray_pccl.get_group(sys.argv[2])
group.wait_ready(60)
refs = [actor.make.remote(made, place) for place, actor in enumerate(group.actors)]
reduced = ray.get(ray_pccl.allreduce_refs(refs), timeout=60)
numbers = ray.get(group.allreduce_refs([actor.run.remote(identity, 1) for actor in group.actors]), timeout=60)
print(json.dumps([group.world_size, [value.tolist() for value in reduced], numbers]))
"""

DRIVER_THAT_GOES_ON = """
import sys, time
import ray, ray_pccl
from tests.driver.workers import start
for number in range(2):
    ray.init(address=sys.argv[1], log_to_driver=False)
    actors = start(2)
    group = ray_pccl.create_group(actors, sys.argv[2])
    if number:
        group.wait_ready(60)
    ray.shutdown()
    time.sleep(0.5)
    print("still here", flush=True)
"""


def sums(group: Any, actors: list[Any], values: list[Any] | None = None) -> list[Any]:
    """What the actors get of the values, or of a one from each."""
    given = values or [1] * len(actors)
    refs = [actor.run.remote(identity, value) for actor, value in zip(actors, given, strict=True)]
    reduced: list[Any] = get(group.allreduce_refs(refs))
    return reduced


def ids(actors: list[Any]) -> list[str]:
    return [actor._actor_id.hex() for actor in actors]


@pytest.fixture
def group(workers: list[Any], name: str) -> Iterator[Any]:
    """A group of all workers, that are members."""
    group = ray_pccl.create_group(workers, name)
    group.wait_ready(60)
    yield group
    group.destroy()


# --------------------------------------------------------------------------------------------------- making and ending


def test_a_group_is_made_of_plain_actors_and_knows_them(group: Any, workers: list[Any], name: str) -> None:
    assert group.name == name
    assert name in repr(group)
    assert group.world_size == 3
    assert ids(group.actors) == ids(workers)
    assert sorted(ids(group.members())) == sorted(ids(workers))
    assert not group.is_destroyed
    assert sums(group, workers) == [3, 3, 3]


def test_members_are_told_by_rank(group: Any, workers: list[Any], name: str) -> None:
    ranks = get([member.run.remote(lambda: ray_pccl.get_communicator(name).rank) for member in group.members()])

    assert ranks == [0, 1, 2]


def test_create_group_does_not_wait_for_its_actors(workers: list[Any], name: str, gate: Gate) -> None:
    held = workers[0].run.remote(gate.hold)
    gate.await_reached()

    group = ray_pccl.create_group(workers[:2], name)
    reduced = group.allreduce_refs([worker.run.remote(identity, 2) for worker in workers[:2]])

    assert ray.wait([held, *reduced], timeout=0)[0] == []
    with pytest.raises(RendezvousTimeoutError, match=workers[0]._actor_id.hex()) as caught:
        group.wait_ready(0.2)
    assert isinstance(caught.value, TimeoutError)
    gate.open()
    group.wait_ready(60)
    assert get(reduced) == [4, 4]
    group.destroy()


def test_a_destroyed_group_is_gone_and_its_name_is_free_again(workers: list[Any], name: str) -> None:
    first = ray_pccl.create_group(workers[:2], name)
    assert sums(first, workers[:2]) == [2, 2]

    first.destroy()
    first.destroy()

    assert first.is_destroyed
    with pytest.raises(UsageError, match=f"there is no group '{name}'"):
        ray_pccl.get_group(name)
    for call in (
        lambda: first.barrier(),
        lambda: first.wait_ready(1),
        lambda: first.add([workers[2]]),
        lambda: first.remove([workers[0]]),
        lambda: sums(first, workers[:2]),
    ):
        with pytest.raises(UsageError, match="was destroyed"):
            call()
    for _ in range(2):
        again = ray_pccl.create_group(workers, name)
        assert sums(again, workers) == [3, 3, 3]
        again.destroy()


def test_a_group_is_destroyed_after_the_calls_that_were_made_before(workers: list[Any], name: str, gate: Gate) -> None:
    group = ray_pccl.create_group(workers, name)
    refs = [workers[0].run.remote(gate.hold, 1), *(worker.run.remote(identity, 1) for worker in workers[1:])]
    gate.await_reached()
    reduced = group.allreduce_refs(refs)
    gate.open()

    group.destroy()

    assert get(reduced) == [3, 3, 3]


def test_two_groups_of_one_name_are_refused(group: Any, workers: list[Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"there is a group '{name}'.*already: use get_group"):
        ray_pccl.create_group(workers[:1], name)

    assert sums(group, workers) == [3, 3, 3]


@pytest.mark.parametrize("backend", ["pccl", "GLOO", "", None])
def test_an_unknown_backend_is_refused_and_the_error_says_what_there_is(workers: list[Any], backend: Any) -> None:
    with pytest.raises(SettingsError, match=f"backend is one of 'ring', 'gloo', 'nccl', not {backend!r}"):
        ray_pccl.create_group(workers, "never", backend=backend)
    with pytest.raises(SettingsError, match=f"backend is one of 'ring', 'gloo', 'nccl', not {backend!r}"):
        ray_pccl.options(WorkerActor, collective={"group_name": "never", "world_size": 1, "backend": backend})


def test_arguments_that_make_no_sense_are_refused_at_once(workers: list[Any]) -> None:
    create = ray_pccl.create_group
    for call, kind, text in [
        (lambda: create([], "never"), UsageError, "at least one actor"),
        (lambda: create([workers[0], workers[0]], "never"), UsageError, "each of them once"),
        (lambda: create(["actor"], "never"), UsageError, "'actor' is none"),
        (lambda: create([WorkerActor], "never"), UsageError, "is none"),
        (lambda: create(None, "never"), UsageError, "None is none"),
        (lambda: create(workers, ""), UsageError, "a group's name is a text"),
        (lambda: create(workers, None), UsageError, "a group's name is a text"),
        (lambda: create(workers, "never", max_world_size=2), UsageError, "3 actors are more than max_world_size=2"),
        (lambda: create(workers, "never", min_world_size=0), ray_pccl.PCCLError, "min_world_size"),
        (lambda: create(workers, "never", min_world_size=5, max_world_size=4), ray_pccl.PCCLError, "max_world_size"),
        (lambda: create(workers, "never", op_timeout=3), SettingsError, "no such setting: op_timeout"),
        (lambda: create(workers, "never", op_timeout_s=-3), SettingsError, "op_timeout_s must be a number"),
        (lambda: ray_pccl.get_group(""), UsageError, "a group's name is a text"),
        (lambda: ray_pccl.get_group("unheard of"), UsageError, "there is no group 'unheard of': make it with"),
        (lambda: ray_pccl.store_stats("actor"), UsageError, "'actor' is none"),
    ]:
        with pytest.raises(kind, match=text):
            call()
    assert not any(worker_is_in(worker, "never") for worker in workers)


def worker_is_in(worker: Any, name: str) -> bool:
    """Whether the worker has been asked to join, and not to leave since."""

    def look() -> bool:
        from ray_pccl.driver.seats import local_seats

        return name in local_seats

    return bool(get(worker.run.remote(look), 20))


def test_settings_reach_the_communicators(workers: list[Any], name: str) -> None:
    group = ray_pccl.create_group(workers[:1], name, op_timeout_s=17.5, min_world_size=1, max_world_size=4)

    def settings() -> float:
        return ray_pccl.get_communicator(name)._settings.op_timeout_s

    assert get(workers[0].run.remote(settings)) == 17.5
    group.destroy()


def test_the_others_form_without_an_actor_whose_constructor_fails(workers: list[Any], name: str) -> None:
    @ray.remote(num_cpus=0)
    class Broken:
        def __init__(self) -> None:
            raise ValueError("not today")

    began = time.monotonic()
    group = ray_pccl.create_group([workers[0], Broken.remote(), workers[1]], name)

    assert sums(group, workers[:2]) == [2, 2]

    assert time.monotonic() - began < LAST_CALL_S - 10
    group.wait_ready(20)
    assert ids(group.actors) == ids(workers[:2])
    assert group.world_size == 2
    group.destroy()


def test_actors_of_a_destroyed_group_end_with_their_last_handle(ray_local: Any, name: str) -> None:
    actors = start(2)
    pids = [pid_of(actor) for actor in actors]
    group = ray_pccl.create_group(actors, name)
    assert sums(group, actors) == [2, 2]
    group.destroy()

    del actors, group

    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30, "the actors end")


def test_a_group_in_another_namespace_has_a_master_of_its_own(workers: list[Any], name: str) -> None:
    group = ray_pccl.create_group(workers[:2], name, namespace="another")
    try:
        assert sums(group, workers[:2]) == [2, 2]
        assert ray_pccl.get_group(name, namespace="another") is group
        with pytest.raises(UsageError, match="there is no group"):
            ray_pccl.get_group(name)
        group.destroy()
    finally:
        ray_pccl.stop_master(namespace="another")


# -------------------------------------------------------------------------------------------------- coming and going


def test_actors_are_added_and_take_part(workers: list[Any], name: str) -> None:
    group = ray_pccl.create_group(workers[:2], name)
    assert sums(group, workers[:2]) == [2, 2]

    group.add([workers[2]])
    group.wait_ready(60)

    assert group.world_size == 3
    assert ids(group.actors) == ids(workers)
    assert sums(group, workers) == [3, 3, 3]
    with pytest.raises(UsageError, match=f"actor {workers[2]._actor_id.hex()} is in group '{name}' already"):
        group.add([workers[2]])
    with pytest.raises(UsageError, match="is none"):
        group.add(["actor"])
    group.destroy()


def test_an_added_actor_that_is_not_ready_yet_says_so_and_the_others_go_on(
    workers: list[Any], name: str, gate: Gate
) -> None:
    group = ray_pccl.create_group(workers[:2], name)
    assert sums(group, workers[:2]) == [2, 2]
    workers[2].run.remote(gate.hold)
    gate.await_reached()

    group.add([workers[2]])
    refs = [worker.run.remote(identity, 1) for worker in workers]
    reduced = group.allreduce_refs(refs)

    assert get(reduced[:2]) == [2, 2]
    gate.open()
    with pytest.raises(ray_pccl.PeerLostError, match="takes part again when it has joined"):
        get(reduced[2])
    group.wait_ready(60)
    assert sums(group, workers) == [3, 3, 3]
    group.destroy()


def test_actors_are_removed_and_the_others_go_on(group: Any, workers: list[Any]) -> None:
    assert sums(group, workers) == [3, 3, 3]

    group.remove([workers[1]])

    eventually(lambda: group.world_size == 2, 30)
    assert ids(group.actors) == ids([workers[0], workers[2]])
    assert sums(group, [workers[0], workers[2]]) == [2, 2]
    with pytest.raises(UsageError, match="is not in group"):
        group.remove([workers[1]])
    with pytest.raises(UsageError, match="is not in group"):
        sums(group, workers)
    group.add([workers[1]])
    group.wait_ready(60)
    assert sums(group, workers) == [3, 3, 3]


def test_what_was_called_before_an_actor_is_removed_still_includes_it(group: Any, workers: list[Any]) -> None:
    reduced = group.allreduce_refs([worker.run.remote(identity, 1) for worker in workers])

    group.remove([workers[0]])

    assert get(reduced) == [3, 3, 3]


def test_two_groups_share_actors_and_do_not_mix_their_calls(workers: list[Any], name: str) -> None:
    left = ray_pccl.create_group(workers[:2], f"{name}-left")
    right = ray_pccl.create_group(workers[1:], f"{name}-right")
    a, b, c = workers
    calls = []

    for step in range(5):
        lefts = [actor.run.remote(identity, 1 + step) for actor in (a, b)]
        rights = [actor.run.remote(identity, 10 * (1 + step)) for actor in (c, b)]
        calls.append((left.allreduce_refs(lefts), ray_pccl.allreduce_refs(rights, group=f"{name}-right")))

    for step, (one, other) in enumerate(calls):
        assert get(one) == [2 * (1 + step)] * 2
        assert get(other) == [20 * (1 + step)] * 2
    with pytest.raises(UsageError, match="say which one, with group="):
        ray_pccl.allreduce_refs([actor.run.remote(identity, 1) for actor in (a, b)])
    with pytest.raises(UsageError, match="name one of them"):
        get(b.run.remote(ray_pccl.get_communicator))
    assert get(a.run.remote(lambda: ray_pccl.get_communicator().world_size)) == 2
    left.destroy()
    right.destroy()


# ------------------------------------------------------------------------------------------------------------ finding


def test_a_group_is_found_by_its_name_here_and_in_any_actor(group: Any, workers: list[Any], name: str) -> None:
    eventually(lambda: published(name) == 3, 20)

    def use_it() -> Any:
        found = ray_pccl.get_group(name)
        others = found.actors[1:]
        return found.world_size, [actor._actor_id.hex() for actor in found.actors], len(others)

    [asking] = start(1)

    def reduce_from_there() -> Any:
        found = ray_pccl.get_group(name)
        return ray.get(found.allreduce_refs([actor.run.remote(identity, 5) for actor in found.actors]))

    assert ray_pccl.get_group(name) is group
    world_size, known, _ = get(workers[0].run.remote(use_it))
    assert world_size == 3
    assert sorted(known) == sorted(ids(workers))
    assert get(asking.run.remote(reduce_from_there)) == [15, 15, 15]
    assert sums(group, workers) == [3, 3, 3]
    end([asking])


def test_a_group_is_found_and_used_by_another_driver(group: Any, workers: list[Any], name: str) -> None:
    eventually(lambda: published(name) == 3, 20)

    printed = run_driver(SECOND_DRIVER, name)

    assert json.loads(printed.splitlines()[-1]) == [3, [[3, 6, 9, 12]] * 3, [3, 3, 3]]
    assert sums(group, workers) == [3, 3, 3]


def test_a_driver_lives_on_when_it_has_shut_ray_down_and_a_group_is_left(ray_local: Any, name: str) -> None:
    assert run_driver(DRIVER_THAT_GOES_ON, name).split("\n") == ["still here", "still here", ""]


def test_two_callers_of_one_group_do_not_mix_their_calls(group: Any, workers: list[Any], name: str) -> None:
    [other] = start(1)
    eventually(lambda: published(name) == 3, 20)

    def reduce_often() -> Any:
        found = ray_pccl.get_group(name)
        return [ray.get(found.allreduce_refs([a.run.remote(identity, 7) for a in found.actors])) for _ in range(10)]

    there = other.run.remote(reduce_often)
    here = [sums(group, workers) for _ in range(10)]

    assert here == [[3, 3, 3]] * 10
    assert get(there) == [[21, 21, 21]] * 10
    end([other])


def test_a_group_that_is_ready_is_found_at_once_with_all_its_actors(workers: list[Any], name: str) -> None:
    [other] = start(1)
    for number in range(5):
        group = ray_pccl.create_group(workers, f"{name}-{number}")
        group.wait_ready(60)

        found = get(other.run.remote(lambda of: len(ray_pccl.get_group(of).actors), group.name))

        assert found == 3
        group.destroy()
    end([other])


@pytest.fixture
def caller(ray_local: Any, name: str) -> Iterator[Any]:
    """An actor that knows the group, and is none of it."""
    [actor] = start(1)
    yield actor
    end([actor])


@pytest.fixture
def own(ray_local: Any) -> Iterator[list[Any]]:
    """Three actors for one test alone."""
    actors = start(3)
    yield actors
    end(actors)


def reduce_all(name: str) -> Any:
    """Has all actors that this process knows of the group reduce. For actors."""
    try:
        found = ray_pccl.get_group(name)
        return ray.get(found.allreduce_refs([actor.run.remote(identity, 1) for actor in found.actors]), timeout=15)
    except Exception as error:  # whatever it is, it is told
        return type(error).__name__


def test_a_caller_that_found_the_group_earlier_is_told_of_actors_that_were_added(
    own: list[Any], caller: Any, name: str
) -> None:
    group = ray_pccl.create_group(own[:2], name, op_timeout_s=5)
    group.wait_ready(60)
    eventually(lambda: published(name) == 2, 20)
    assert get(caller.run.remote(reduce_all, name)) == [2, 2]

    group.add([own[2]])
    group.wait_ready(60)

    assert get(caller.run.remote(reduce_all, name)) in ([3, 3, 3], "UsageError")
    assert sums(group, own) == [3, 3, 3]
    group.destroy()


def test_an_actor_that_was_removed_is_not_brought_back_by_another_caller(
    own: list[Any], caller: Any, name: str
) -> None:
    group = ray_pccl.create_group(own, name)
    group.wait_ready(60)
    eventually(lambda: published(name) == 3, 20)
    assert get(caller.run.remote(reduce_all, name)) == [3, 3, 3]

    group.remove([own[2]])
    eventually(lambda: group.world_size == 2, 20)
    get(caller.run.remote(reduce_all, name))

    for _ in range(20):
        assert sums(group, own[:2]) == [2, 2]
        assert group.world_size == 2
        assert not worker_is_in(own[2], name)


def test_a_group_that_was_destroyed_is_not_brought_back_by_another_caller(
    own: list[Any], caller: Any, name: str
) -> None:
    group = ray_pccl.create_group(own, name)
    group.wait_ready(60)
    eventually(lambda: published(name) == 3, 20)
    assert get(caller.run.remote(reduce_all, name)) == [3, 3, 3]

    group.destroy()
    refused = get(caller.run.remote(reduce_all, name))

    assert isinstance(refused, str)
    assert refused != "GetTimeoutError"
    for _ in range(20):
        assert not any(worker_is_in(actor, name) for actor in own)


# ---------------------------------------------------------------------------------------------------- inside an actor


def test_get_communicator_gives_the_very_communicator(group: Any, workers: list[Any], name: str) -> None:
    def look() -> Any:
        one, other = ray_pccl.get_communicator(name), ray_pccl.get_communicator(name)
        members = one.members
        return one is other, one.peer_id, members[one.rank], one.world_size

    told = get([worker.run.remote(look) for worker in workers])

    for (same, peer_id, at_rank, world_size), worker in zip(told, workers, strict=True):
        assert same
        assert peer_id == at_rank
        assert worker._actor_id.hex() in peer_id
        assert world_size == 3


def test_the_communicator_works_beside_the_drivers_calls(group: Any, workers: list[Any], name: str) -> None:
    def reduce_here(value: float) -> Any:
        result = np.empty(3)
        ray_pccl.get_communicator(name).all_reduce(np.full(3, value), result)
        return result.tolist()

    for _ in range(3):
        inside = [worker.run.remote(reduce_here, 2.0) for worker in workers]
        outside = group.allreduce_refs([worker.run.remote(identity, 1) for worker in workers])
        assert get(inside) == [[6, 6, 6]] * 3
        assert get(outside) == [3, 3, 3]


def test_get_communicator_outside_a_group_says_so(workers: list[Any]) -> None:
    with pytest.raises(UsageError, match="this process is in no group"):
        get(workers[0].run.remote(ray_pccl.get_communicator))
    with pytest.raises(UsageError, match="not in 'unheard of'"):
        get(workers[0].run.remote(ray_pccl.get_communicator, "unheard of"))
    with pytest.raises(UsageError, match="this process is in no group"):
        ray_pccl.get_communicator()


def test_allreduce_inside_actors_returns_the_reduced_value(group: Any, workers: list[Any], name: str) -> None:
    def inside(place: int) -> Any:
        given = np.full(3, float(place))
        reduced = ray_pccl.allreduce(given)
        nest = ray_pccl.allreduce({"w": given, "n": place}, ReduceOp.MAX, group_name=name)
        return reduced.tolist(), given.tolist(), nest["w"].tolist(), nest["n"]

    told = get([worker.run.remote(inside, place) for place, worker in enumerate(workers)])

    assert told == [([3, 3, 3], [place] * 3, [2, 2, 2], 2) for place in range(3)]


def test_allreduce_inside_actors_refuses_what_makes_no_sense(group: Any, workers: list[Any]) -> None:
    for given, text in [((1, "sum"), "op is a ray_pccl.ReduceOp"), (("text",), "is a str, which can't be reduced")]:
        with pytest.raises(UsageError, match=text):
            get(workers[0].run.remote(ray_pccl.allreduce, *given))
    assert get([worker.run.remote(ray_pccl.allreduce, 2) for worker in workers]) == [6, 6, 6]


# ---------------------------------------------------------------------------------------------- declared with options


def rank_in(name: str) -> tuple[int, int]:
    communicator = ray_pccl.get_communicator(name)
    return communicator.rank, communicator.world_size


def test_options_make_actors_that_are_in_a_group_with_the_ranks_that_were_given(ray_local: Any, name: str) -> None:
    def made(rank: int) -> Any:
        collective = {"group_name": name, "group_rank": rank, "world_size": 2, "backend": "ring"}
        return ray_pccl.options(WorkerActor, collective=collective, num_cpus=0).remote()

    actors = [made(1), made(0)]

    assert get([actor.run.remote(rank_in, name) for actor in actors]) == [(1, 2), (0, 2)]
    assert get([actor.run.remote(ray_pccl.allreduce, 2) for actor in actors]) == [4, 4]
    assert get(ray_pccl.allreduce_refs([actor.run.remote(identity, 3) for actor in actors])) == [6, 6]
    group = ray_pccl.get_group(name)
    assert sorted(ids(group.members())) == sorted(ids(actors))
    with pytest.raises(UsageError, match=f"group '{name}' has all its 2 actors"):
        made(0)
    group.destroy()
    end(actors)


def backend_of(name: str) -> tuple[str, bool]:
    communicator = ray_pccl.get_communicator(name)
    return communicator.backend, communicator._running._plane._delegate._session is not None


def test_actors_of_a_group_may_have_gloo_move_their_data(ray_local: Any, name: str) -> None:
    collective = {"group_name": name, "group_rank": [0, 1], "world_size": 2, "backend": "gloo"}
    declared = ray_pccl.options(WorkerActor, collective=collective, num_cpus=0)
    actors = [declared.remote()]
    with pytest.raises(UsageError, match=f"group '{name}' has backend 'gloo', not 'ring'"):
        ray_pccl.options(WorkerActor, collective=collective | {"backend": "ring"}).remote()
    actors.append(declared.remote())
    refs = [actor.run.remote(identity, np.ones(1000, np.float32)) for actor in actors]
    for result in get(ray_pccl.allreduce_refs(refs)):
        assert np.array_equal(result, np.full(1000, 2, np.float32))
    assert get([actor.run.remote(backend_of, name) for actor in actors]) == [("gloo", True)] * 2
    end(actors[:1])
    (alone,) = get(ray_pccl.allreduce_refs([actors[1].run.remote(identity, np.ones(10))]))
    assert np.array_equal(alone, np.ones(10)), "they survive as with our own"
    ray_pccl.get_group(name).destroy()
    end(actors[1:])


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a CUDA device: NCCL may be used")
def test_a_backend_that_the_actors_do_not_have_is_an_error_that_says_what_is_missing(
    workers: list[Any], name: str
) -> None:
    group = ray_pccl.create_group(workers[:2], name, backend="nccl")
    refs = [worker.run.remote(identity, 1.0) for worker in workers[:2]]
    with pytest.raises(ActorLostError, match="could not join: backend='nccl' needs a CUDA device"):
        get(group.allreduce_refs(refs))
    group.destroy()


def test_options_give_out_a_list_of_ranks_in_turn_and_need_none(ray_local: Any, name: str) -> None:
    declared = ray_pccl.options(
        AsyncActor, collective={"group_name": name, "group_rank": [1, 0], "world_size": 2}, max_concurrency=4
    )
    actors = [declared.remote() for _ in range(2)]
    assert sums(ray_pccl.get_group(name), actors) == [2, 2]
    ranks = [member._actor_id.hex() for member in ray_pccl.get_group(name).members()]
    assert ranks == ids([actors[1], actors[0]])
    ray_pccl.get_group(name).destroy()
    end(actors)

    free = ray_pccl.options(WorkerActor, collective={"group_name": name, "world_size": 2})
    actors = [free.remote() for _ in range(2)]
    assert sorted(get([actor.run.remote(rank_in, name) for actor in actors])) == [(0, 2), (1, 2)]
    ray_pccl.get_group(name).destroy()
    end(actors)


@pytest.mark.parametrize(
    ("collective", "text"),
    [
        ({"group_name": "never", "world_size": 2, "rank": 0}, "takes group_name and world_size.*'rank'"),
        ({"group_name": "never"}, "takes group_name and world_size"),
        ({"world_size": 2}, "takes group_name and world_size"),
        ({}, "takes group_name and world_size"),
        ({"group_name": "", "world_size": 2}, "a group's name is a text"),
        ({"group_name": "never", "world_size": 0}, "world_size is a number from 1, not 0"),
        ({"group_name": "never", "world_size": "2"}, "world_size is a number from 1, not '2'"),
        ({"group_name": "never", "world_size": True}, "world_size is a number from 1"),
        ({"group_name": "never", "world_size": 2, "group_rank": 2}, "group_rank is a rank below 2"),
        ({"group_name": "never", "world_size": 2, "group_rank": -1}, "group_rank is a rank below 2"),
        ({"group_name": "never", "world_size": 2, "group_rank": [0, 5]}, "group_rank is a rank below 2"),
        ({"group_name": "never", "world_size": 2, "group_rank": "0"}, "group_rank is a rank below 2"),
        ({"group_name": "never", "world_size": 2, "group_rank": [0, 0]}, "group_rank"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_at_once(collective: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        ray_pccl.options(WorkerActor, collective=collective)


def test_options_of_what_is_no_actor_class_are_refused() -> None:
    with pytest.raises(UsageError, match=r"is no actor class: decorate it with @ray\.remote"):
        ray_pccl.options(int, collective={"group_name": "never", "world_size": 1})
