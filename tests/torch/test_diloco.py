"""DiLoCo: what an outer step computes, when it happens, and that all make it or none, whoever comes and dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ray_pccl import Communicator, UsageError
from ray_pccl.settings import Settings
from ray_pccl.testing import Faults, PeerProcess, PeerStarter, eventually
from ray_pccl.torch import DiLoCo
from ray_pccl.torch.fragments import Fragments
from tests.torch.diloco_programs import begin, bits, finish, look, make, set_goal
from tests.torch.threads import succeeded, together
from tests.torch.training_programs import prepare, strike

PATIENCE_S = 60.0


@pytest.fixture
def master_settings() -> Settings:
    return Settings.from_env(None, heartbeat_timeout_s=4, stall_timeout_s=60)


def reach(peer: PeerProcess, more: int) -> None:
    goal = peer.run(look)[1] + more
    eventually(lambda: peer.run(look)[1] >= goal, PATIENCE_S, f"outer step {goal}")


@pytest.mark.parametrize("count", [1, 2, 5, 31])
def test_fragments_are_all_elements_once_in_equal_parts(count) -> None:
    wide = torch.randn(4, 5).t()  # not contiguous
    parameters = [torch.nn.Parameter(value) for value in (torch.randn(7), wide, torch.randn(2, 2).bfloat16())]
    fragments = Fragments(parameters, count)
    row = torch.cat([parameter.detach().flatten().float() for parameter in parameters])
    parts = [fragments.read(number) for number in range(count)]
    assert torch.equal(torch.cat(parts), row)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for number, part in enumerate(parts):
        fragments.write(number, part * 2)
    assert torch.equal(torch.cat([parameter.detach().flatten().float() for parameter in parameters]), row * 2)


def _train_by_hand(rates: Sequence[float], fragments: int, steps: int, every: int) -> torch.Tensor:
    """Two outer steps a fragment, of peers whose gradients are all one: the outer row afterwards."""
    outer, velocity = torch.zeros(6), torch.zeros(6)
    local = [torch.zeros(6) for _ in rates]
    ends = [6 * (number + 1) // fragments for number in range(fragments)]
    for step in range(steps):
        for own, rate in zip(local, rates, strict=True):
            own -= rate * every
        low, high = ([0, *ends][step % fragments], ends[step % fragments])
        part = slice(low, high)
        gradient = torch.stack([outer[part] - own[part] for own in local]).mean(0)
        velocity[part] = 0.9 * velocity[part] + gradient
        outer[part] -= 0.7 * (gradient + 0.9 * velocity[part])
        for own in local:
            own[part] = outer[part]
    return outer


@pytest.mark.parametrize(("fragments", "steps"), [(1, 2), (3, 6)])
def test_an_outer_step_is_nesterov_on_the_average_of_what_peers_moved(fragments, steps) -> None:
    rates = (0.25, 0.5)

    def train(comm: Communicator, number: int) -> tuple[torch.Tensor, list[int]]:
        model = torch.nn.ParameterList([torch.zeros(4), torch.zeros(2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=rates[number])
        diloco = DiLoCo(comm, model, optimizer, sync_every=2 * fragments, fragments=fragments, quantization=None)
        diloco.join()
        at, count = [], 0
        while diloco.steps < steps:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            info = diloco.step()
            count += 1
            at += [count] if info is not None else []
        return torch.cat([flat.detach() for flat in diloco.outer]), at

    for outer, at in succeeded(together(train, 2)):
        torch.testing.assert_close(outer, _train_by_hand(rates, fragments, steps, 2))
        assert at == [2 * (number + 1) for number in range(steps)]


def test_with_a_delay_the_average_runs_behind_inner_steps_whose_work_is_mixed_in() -> None:
    def train(comm: Communicator, number: int) -> tuple[list[float], list[bool]]:
        model = torch.nn.ParameterList([torch.zeros(1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        diloco = DiLoCo(
            comm,
            model,
            optimizer,
            sync_every=4,
            delay=2,
            mixing=0.5,
            quantization=None,
            outer_optimizer=lambda tensors: torch.optim.SGD(tensors, lr=1.0),
        )
        diloco.join()
        seen, outer_steps = [], []
        for _ in range(6):
            model[0].grad = torch.tensor([1.0 + number])
            outer_steps.append(diloco.step() is not None)
            seen.append(float(model[0].detach()))
        return seen, outer_steps

    outcomes = succeeded(together(train, 2))
    for number, (seen, outer_steps) in enumerate(outcomes):
        rate = 1.0 + number
        assert outer_steps == [False] * 5 + [True]
        assert seen[:5] == [-rate * (step + 1) for step in range(5)]
        # What both had moved after four steps, -4 and -8, was averaged; half of what each holds now is its own.
        assert seen[5] == pytest.approx(0.5 * -6.0 + 0.5 * -6 * rate)


def test_a_byte_an_element_is_sent_and_all_hold_the_same_bits() -> None:
    def train(comm: Communicator, number: int) -> tuple[int, str]:
        sent = 0
        for quantized in ({}, {"quantization": None}):
            torch.manual_seed(number)
            model = torch.nn.Linear(64, 64)
            diloco = DiLoCo(comm, model, torch.optim.Adam(model.parameters()), sync_every=1, **quantized)
            diloco.join()
            model(torch.rand(8, 64)).square().mean().backward()
            info = diloco.step()
            sent = info.tx_bytes / (sent or 1)
        return sent, bits(diloco)

    outcomes = succeeded(together(train, 2))
    assert all(times > 3.5 for times, _ in outcomes) and len({text for _, text in outcomes}) == 1


def test_other_arguments_on_a_member_are_an_error_on_all() -> None:
    def train(comm: Communicator, number: int) -> None:
        diloco = make(comm, number, {"sync_every": 2, "mixing": 0.1 * number})
        diloco.join()
        for _ in range(2):
            diloco.model(torch.rand(4, 4)).sum().backward()
            diloco.step()

    errors = together(train, 2)
    assert [type(error) for error in errors] == [UsageError] * 2 and "mixing" in str(errors[0])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"sync_every": 0}, "sync_every is a whole number from 1"),
        ({"sync_every": 10, "fragments": 3}, "not a multiple"),
        ({"sync_every": 10, "fragments": 5, "delay": 2}, "delay=2 is not less than the 2 inner steps"),
        ({"sync_every": 10, "mixing": 1.0}, "mixing is a number"),
        ({"sync_every": 10, "fragments": 0}, "fragments is a whole number"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        make(Communicator("never connected"), 0, wrong)


def test_a_training_goes_on_from_its_checkpoint() -> None:
    def train(comm: Communicator, number: int) -> tuple[str, str, int]:
        first = make(comm, number, {"sync_every": 4, "fragments": 2})
        first.join()
        for _ in range(6):
            first.model(torch.rand(4, 4)).sum().backward()
            first.step()
        second = make(comm, 50 + number, {"sync_every": 4, "fragments": 2})
        if number == 0:
            second.load_state_dict(first.state_dict())
        second.join()
        return bits(first), bits(second), second.steps

    for before, after, steps in succeeded(together(train, 2)):
        assert before == after and steps == 3


def test_a_join_amid_an_average_waits_for_it_and_drops_gradients_of_before() -> None:
    joining = threading.Event()

    def train(comm: Communicator, number: int) -> tuple[str, bool]:
        diloco = make(comm, number, {"sync_every": 4, "delay": 2})
        diloco.join()
        launch = comm.all_reduce_async

        def launch_late(*given: Any, **named: Any) -> Any:
            assert joining.wait(10)
            time.sleep(0.2)  # the other one is in its join by now; if not, it has less to wait for
            return launch(*given, **named)

        if number:
            comm.all_reduce_async = launch_late  # type: ignore[method-assign]
        for _ in range(4):
            diloco.model(torch.rand(4, 4)).sum().backward()
            diloco.step()
        diloco.model(torch.rand(4, 4)).sum().backward()
        joining.set()
        diloco.join()
        return bits(diloco), all(parameter.grad is None for parameter in diloco.model.parameters())

    first, second = succeeded(together(train, 2))
    assert first == second and first[1]


def test_a_frozen_parameter_may_have_any_name() -> None:
    def train(comm: Communicator, number: int) -> list[float]:
        model = torch.nn.Module()
        model.outer = torch.nn.ParameterList([torch.nn.Parameter(torch.full((1,), float(number)), requires_grad=False)])
        model.trained = torch.nn.Parameter(torch.full((2,), float(number)))
        diloco = DiLoCo(comm, model, torch.optim.SGD([model.trained], lr=1.0), sync_every=1)
        diloco.join()
        return [*model.outer[0].tolist(), *model.trained.tolist()]

    first, second = succeeded(together(train, 2))
    assert first == second and first in ([0.0] * 3, [1.0] * 3)


@pytest.mark.slow
def test_a_newcomer_is_healed_and_deaths_are_survived_with_the_same_bits_on_all(
    peer_group: PeerStarter, faults: Faults
) -> None:
    arguments = {"sync_every": 12, "fragments": 3, "delay": 2, "mixing": 0.5}
    settings = Settings.from_env(None, last_call_s=30.0, op_timeout_s=20.0, join_timeout_s=30.0)
    given = {"min_world_size": 2, "expected_world_size": 4, "settings": settings}
    group = peer_group(4, environment={"OMP_NUM_THREADS": "1"}, **given)
    (newcomer,) = group.add(connect=False)
    for started in [peer.run_async(begin, seed, arguments) for seed, peer in enumerate(group[:4])]:
        started.result(PATIENCE_S)
    newcomer.run(prepare)
    reach(group[0], 4)
    # In the average that runs behind the inner steps, and after it has committed.
    for victim, point in [(1, "before_commit"), (2, "training_committed")]:
        group[victim].run(strike, point, 5)
        eventually(lambda victim=victim: not group[victim].alive, PATIENCE_S, "it dies")
        reach(group[0], 4)
    faults.kill_master()
    newcomer.connect()
    newcomer.joined.result(PATIENCE_S)
    newcomer.run(begin, 99, arguments)
    reach(newcomer, 4)
    left = [group[0], group[3], newcomer]
    goal = group[0].run(look)[1] + 60
    for peer in left:
        peer.run(set_goal, goal)
    courses = [peer.run(finish) for peer in left]

    assert [course.error for course in courses] == [""] * 3
    first, _, healed = courses
    assert [info.step for info, _ in first.seen] == list(range(1, goal + 1))
    for course in courses[1:]:
        assert course.seen == first.seen[course.joined_at :], "members differ after an outer step"
    assert healed.joined_bits == first.seen[healed.joined_at - 1][1]
    assert [info.fragment for info, _ in first.seen] == [number % 3 for number in range(goal)]
    counts = [len(info.contributors) for info, _ in first.seen]
    assert sorted(set(counts)) == [2, 3, 4] and counts[-1] == 3
    assert len({course.model_bits for course in courses}) == 1
