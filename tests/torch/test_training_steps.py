"""What a step of the trainer does to gradients, optimisers and counters, and what it refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from ray_pccl import (
    Communicator,
    NotConnectedError,
    Settings,
    SharedStateMismatchError,
    StepMismatchError,
    UsageError,
)
from ray_pccl.ring import fault_points
from ray_pccl.torch import ElasticSampler, ElasticTrainer, StepInfo
from tests.torch.threads import succeeded, together
from tests.torch.training_programs import bits

POINTS = torch.rand(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _linear(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 1, dtype=torch.float64)


def _joined(comm: Communicator, model: torch.nn.Module, **more: Any) -> ElasticTrainer:
    trainer = ElasticTrainer(comm, model, torch.optim.SGD(model.parameters(), lr=0.5), **more)
    trainer.join()
    return trainer


def _loss(model: torch.nn.Module, points: torch.Tensor) -> torch.Tensor:
    return (model(points) - points.prod(1, keepdim=True)).square().mean()


def test_uneven_batches_are_averaged_by_their_sizes() -> None:
    cuts = [(0, 2), (2, 11), (11, 24)]

    def train(comm: Communicator, number: int) -> tuple[torch.Tensor, float, float]:
        model = _linear()
        trainer = _joined(comm, model)
        low, high = cuts[number]
        loss = _loss(model, POINTS[low:high])
        loss.backward()
        info = trainer.step(loss, weight=high - low)
        assert all(parameter.grad is None for parameter in model.parameters())
        return model.weight.detach(), info.loss, info.weight

    whole = _linear()
    loss = _loss(whole, POINTS)
    loss.backward()
    torch.optim.SGD(whole.parameters(), lr=0.5).step()
    outcomes = succeeded(together(train, 3))
    for weight, mean, total in outcomes:
        assert torch.equal(weight, outcomes[0][0])
        torch.testing.assert_close(weight, whole.weight.detach())
        assert mean == pytest.approx(float(loss.detach())) and total == 24


def test_a_gradient_that_some_lack_counts_as_zero_and_one_that_all_lack_stays_none() -> None:
    seen: dict[int, Any] = {}

    def train(comm: Communicator, number: int) -> Any:
        model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in ("all", "some", "none")})
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def look() -> None:
            seen[number] = {name: None if p.grad is None else p.grad.tolist() for name, p in model.items()}

        trainer = ElasticTrainer(comm, model, optimizer, before_update=look)
        trainer.join()
        model["all"].grad = torch.full((2,), float(number))
        if number == 1:
            model["some"].grad = torch.full((2,), 4.0)
        trainer.step()
        return bits(trainer), model["none"] in optimizer.state

    (first, kept), (second, _) = succeeded(together(train, 2))
    assert seen[0] == seen[1] == {"all": [0.5, 0.5], "some": [2.0, 2.0], "none": None}
    assert first == second and not kept


def test_the_hook_sees_the_average_and_accumulated_gradients_are_one_step() -> None:
    def train(comm: Communicator, number: int) -> list[float]:
        model = _linear()
        norms: list[float] = []

        def clip() -> None:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))

        trainer = _joined(comm, model, before_update=clip)
        for part in POINTS[number::2].split(6):
            (_loss(model, part) / 2).backward()
        trainer.step()
        return norms

    whole = _linear()
    _loss(whole, POINTS).backward()
    due = float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()]))
    for before, after in succeeded(together(train, 2)):
        assert before == pytest.approx(due) and after == pytest.approx(0.01, rel=1e-3)


def test_parameters_of_several_types_are_averaged_each_in_its_own() -> None:
    def train(comm: Communicator, number: int) -> dict[str, Any]:
        kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64)
        named = {f"of {str(kind)[6:]}": torch.nn.Parameter(torch.zeros(3, dtype=kind)) for kind in kinds}
        model = torch.nn.ParameterDict(named)
        trainer = ElasticTrainer(comm, model, torch.optim.SGD(model.parameters(), lr=1.0))
        trainer.join()
        for parameter in model.values():
            parameter.grad = torch.full_like(parameter, -2.0 * number)
        trainer.step()
        return {name: (parameter.dtype, parameter.tolist()) for name, parameter in model.items()}

    first, second = succeeded(together(train, 2))
    assert first == second and len(first) == 5
    assert all(values == [1.0] * 3 for _, values in first.values())


def test_all_parameters_of_a_step_have_the_same_contributors_if_one_is_lost_between_two_reductions() -> None:
    averages: dict[int, list[float]] = {}
    lost = threading.Event()

    def train(comm: Communicator, number: int) -> StepInfo:
        wide, narrow = torch.zeros(1, dtype=torch.float64), torch.zeros(1)
        model = torch.nn.ParameterList([torch.nn.Parameter(narrow), torch.nn.Parameter(wide)])

        def look() -> None:
            averages[number] = [float(parameter.grad) for parameter in model]

        def leave(point: str) -> None:
            if threading.current_thread() is leaver and point == "training_reducing":
                reached.append(point)
                if len(reached) == 2:
                    comm.close()

        trainer = ElasticTrainer(
            comm, model, torch.optim.SGD(model.parameters()), sampler=ElasticSampler(60, 5), before_update=look
        )
        trainer.join()
        if number == 2:
            leaver, reached = threading.current_thread(), []
            fault_points.install(leave)
            lost.set()
        assert lost.wait(20)
        trainer.sampler.next_batch()
        for parameter in model:
            parameter.grad = torch.full_like(parameter, number + 1.0)
        info = trainer.step(number + 1.0)
        assert trainer.sampler.used == 5 * len(info.contributors)
        return info

    settings = Settings(last_call_s=20, op_timeout_s=20, join_timeout_s=20)
    three = {"min_world_size": 1, "expected_world_size": 3, "settings": settings}
    try:
        first, second, gone = together(train, 3, **three)
    finally:
        fault_points.install(None)
    assert isinstance(gone, NotConnectedError)
    assert first == second and (len(first.contributors), first.loss, first.attempts) == (2, 1.5, 2)
    assert averages == {0: [1.5, 1.5], 1: [1.5, 1.5]}


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def train(comm: Communicator, number: int) -> None:
        model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True))
        trainer = _joined(comm, model)
        model(torch.tensor([1])).sum().backward()
        trainer.step()

    (error,) = together(train, 1)
    assert isinstance(error, UsageError) and "0.weight" in str(error) and "sparse" in str(error)


def test_members_at_different_steps_are_an_error_on_all() -> None:
    def train(comm: Communicator, number: int) -> None:
        model = _linear()
        trainer = _joined(comm, model)
        trainer._meeting.progress.steps += number
        _loss(model, POINTS).backward()
        trainer.step()

    errors = together(train, 2)
    assert [type(error) for error in errors] == [StepMismatchError] * 2
    assert sorted(errors[0].steps.values()) == [0, 1] and errors[0].steps == errors[1].steps


def test_another_model_is_an_error_on_all_that_names_the_tensor() -> None:
    def train(comm: Communicator, number: int) -> None:
        _joined(comm, torch.nn.Linear(3, 1 + number))

    errors = together(train, 2)
    assert [type(error) for error in errors] == [SharedStateMismatchError] * 2
    assert all("live." in str(error) for error in errors)


def test_a_group_begins_with_the_checkpoint_that_is_furthest() -> None:
    checkpoints: dict[int, Any] = {}

    def make(comm: Communicator, number: int) -> ElasticTrainer:
        model = _linear(number)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        return ElasticTrainer(comm, model, optimizer, scheduler, ElasticSampler(24, 5))

    def train(comm: Communicator, number: int) -> str:
        trainer = make(comm, number)
        trainer.join()
        for steps in (2, 5):
            while trainer.steps < steps:
                _loss(trainer.model, POINTS[trainer.sampler.next_batch()]).backward()
                trainer.step()
            checkpoints[steps] = torch.utils._pytree.tree_map(
                lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, trainer.state_dict()
            )
        return bits(trainer)

    def go_on(comm: Communicator, number: int) -> tuple[int, str, int, list[int]]:
        trainer = make(comm, 100 + number)
        if number:
            trainer.load_state_dict(checkpoints[2 if number == 1 else 5])
        trainer.join()
        return trainer.steps, bits(trainer), trainer.sampler.used, trainer.sampler.next_batch().tolist()

    (before,) = succeeded(together(train, 1))
    outcomes = succeeded(together(go_on, 3))
    assert {outcome[0] for outcome in outcomes} == {5} and {outcome[2] for outcome in outcomes} == {25}
    assert len({outcome[1] for outcome in outcomes}) == 1 and before
    drawn = [index for outcome in outcomes for index in outcome[3]]
    assert len(drawn) == 15, "what was assigned when the checkpoint was made went back, and is handed out again"


OPTIMIZERS = {
    "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_newcomer_gets_an_optimisers_state_whatever_it_consists_of(optimizer) -> None:
    goal: list[int] = []

    def train(comm: Communicator, number: int) -> dict[int, str]:
        torch.manual_seed(number)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).double()
        trainer = ElasticTrainer(comm, model, OPTIMIZERS[optimizer](model.parameters()), sampler=ElasticSampler(24, 4))
        trainer.join()
        seen = {trainer.steps: bits(trainer)}
        while not goal or trainer.steps < goal[0]:
            _loss(model, POINTS[trainer.sampler.next_batch()]).backward()
            info = trainer.step()
            seen[trainer.steps] = bits(trainer)
            if len(info.contributors) == 3 and not goal:
                goal.append(trainer.steps + 3)
        return seen

    first, second, late = succeeded(together([train, train], late=[train]))
    common = set(first) & set(second) & set(late)
    assert min(late) > 0, "it was there from the beginning"
    assert len(common) >= 4 and all(first[step] == second[step] == late[step] for step in common)


def test_a_newcomer_that_does_not_fit_is_told_so_and_the_others_go_on() -> None:
    told: list[BaseException] = []

    def train(comm: Communicator, number: int) -> int:
        model = _linear()
        trainer = _joined(comm, model)
        while True:
            _loss(model, POINTS[number::2]).backward()
            info = trainer.step(float(len(told)))  # so that both know of it after the same step
            if info.loss > 0 and len(info.contributors) == 2:
                return trainer.steps

    def misfit(comm: Communicator, number: int) -> None:
        with pytest.raises(SharedStateMismatchError) as error:
            _joined(comm, torch.nn.Linear(7, 1))
        told.append(error.value)

    first, second, _ = succeeded(together([train, train], late=[misfit]))
    assert first == second > 0 and "live." in str(told[0])


def test_a_place_that_gets_free_in_a_full_group_is_taken_by_who_waited_for_it() -> None:
    sizes: list[int] = []

    def train(comm: Communicator, number: int) -> int:
        trainer = _joined(comm, _linear())
        while number != 1 or trainer.steps < 20:  # the second one leaves then
            _loss(trainer.model, POINTS).backward()
            info = trainer.step()
            if number == 0:
                sizes.append(len(info.contributors))
            if trainer.steps > 20 and len(info.contributors) == 2:
                break
            assert trainer.steps < 5000, "nobody was let in"
        return trainer.steps

    settings = Settings(last_call_s=20, op_timeout_s=20, join_timeout_s=20)
    full = {"min_world_size": 1, "max_world_size": 2, "expected_world_size": 2, "settings": settings}
    first, second, third = succeeded(together([train, train], late=[train], **full))
    assert second == 20 and first == third > 20
    assert sizes[:20] == [2] * 20 and sizes[-1] == 2


def test_mistakes_are_told_before_anyone_waits() -> None:
    def train(comm: Communicator, number: int) -> list[str]:
        model = _linear()
        sampler = ElasticSampler(24, 4)
        trainer = ElasticTrainer(comm, model, torch.optim.SGD(model.parameters()), sampler=sampler)
        told = []
        for prepare, arguments in [(None, {}), (trainer.join, {}), (sampler.next_batch, {"weight": 0.0})]:
            if prepare is not None:
                prepare()
            with pytest.raises(UsageError) as error:
                trainer.step(**arguments)
            told.append(str(error.value))
        return told

    ((no_join, no_batch, no_weight),) = succeeded(together(train, 1))
    assert "join()" in no_join and "next_batch()" in no_batch and "above 0" in no_weight


@pytest.mark.parametrize("at", [0, 1])  # after the first step there is a vote on who waits
def test_a_peer_whose_update_failed_has_to_join_again_and_is_healed(at) -> None:
    def train(comm: Communicator, number: int) -> str:
        model = _linear(number)

        def fail_once() -> None:
            if number == 1 and trainer.steps == at and not failed:
                failed.append(True)
                raise ArithmeticError

        failed: list[bool] = []
        trainer = _joined(comm, model, before_update=fail_once)
        while trainer.steps < 4:
            _loss(model, POINTS[number::2]).backward()
            try:
                trainer.step()
            except ArithmeticError:
                with pytest.raises(UsageError, match="join"):
                    trainer.step()
                trainer.join()
        return bits(trainer)

    first, second = succeeded(together(train, 2))
    assert first == second


def test_trainers_may_follow_one_another_on_a_communicator() -> None:
    def train(comm: Communicator, number: int) -> str:
        for phase in range(3):
            model = _linear(10 * phase + number)
            trainer = _joined(comm, model)
            _loss(model, POINTS[number::2]).backward()
            trainer.step()
        return bits(trainer)

    assert len(set(succeeded(together(train, 2)))) == 1


def test_a_scheduler_that_looks_at_the_loss_gets_everyones() -> None:
    def train(comm: Communicator, number: int) -> float:
        model = _linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        trainer = ElasticTrainer(comm, model, optimizer, scheduler)
        trainer.join()
        for step in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            # Each one's own loss falls for one and rises for the other; the mean stays.
            trainer.step(1.0 + (0.1 * step if number else -0.1 * step))
        return optimizer.param_groups[0]["lr"]

    first, second = succeeded(together(train, 2))
    assert first == second == pytest.approx(0.01)


def test_without_newcomers_a_step_is_a_roll_call_and_an_average() -> None:
    def train(comm: Communicator, number: int) -> int:
        model = _linear()
        trainer = _joined(comm, model)
        for _ in range(3):  # the first one votes once, on who had come before anyone listened
            _loss(model, POINTS).backward()
            trainer.step()
        before, epoch = comm.statistics().operations, comm.epoch
        for step in range(10):
            assert comm.epoch == epoch, f"before step {step}"  # after the last one the other may have left
            _loss(model, POINTS).backward()
            trainer.step()
        return comm.statistics().operations - before

    assert succeeded(together(train, 2)) == [20, 20]
