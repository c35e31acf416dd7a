"""Members of a training that come, go and fail at awkward moments: no wrong number, and nobody waits in vain."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from ray_pccl import Communicator, NotConnectedError, Settings, SharedStateMismatchError, UsageError
from ray_pccl.ring import fault_points
from ray_pccl.testing import eventually
from ray_pccl.torch import ElasticSampler, ElasticTrainer
from ray_pccl.torch.state_trees import dismantle
from tests.torch.threads import succeeded, together

SETTINGS = Settings(last_call_s=0, op_timeout_s=10, join_timeout_s=20)


def _made(comm: Communicator, seed: int = 0, **more: Any) -> ElasticTrainer:
    """Every gradient of its model is 1."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 1, bias=False)
    return ElasticTrainer(comm, model, torch.optim.SGD(model.parameters(), lr=0.5), **more)


def _backward(trainer: ElasticTrainer) -> None:
    trainer.model.weight.sum().backward()


def test_a_member_that_is_late_for_a_reduction_is_no_mistake_when_the_group_was_below_its_minimum_meanwhile() -> None:
    """One leaves after the roll call, and comes back as a newcomer; one comes to the reduction only after that.

    So it waits in the reduction for the minimum, and another one, whose reduction has failed, in its roll call.
    """
    numbers: dict[int, int] = {}
    comms: dict[int, Communicator] = {}
    reached = [0] * 3

    def strike(point: str) -> None:
        number = numbers.get(threading.get_ident())
        if number is None or point != "training_reducing":
            return
        reached[number] += 1
        if reached[number] == 2 and number == 2:
            eventually(lambda: reached[0] == 2, 10, "another one is at the reduction")
            time.sleep(0.3)  # and in it; if not, it waits with the late one, which is fine as well
            comms[2].close()
        if reached[number] == 2 and number == 1:
            eventually(lambda: len(comms[1].members) == 2, 10, "it hears of the loss")

    def train(comm: Communicator, number: int) -> tuple[int, int, list[list[float]]]:
        numbers[threading.get_ident()] = number
        comms[number] = comm
        trainer = _made(comm, number)
        trainer.join()
        while trainer.steps < 4:
            _backward(trainer)
            try:
                info = trainer.step()
            except NotConnectedError:
                comm.connect()
                trainer.join()
        return info.step, len(info.contributors), trainer.model.weight.tolist()

    fault_points.install(strike)
    try:
        first, second, third = succeeded(together(train, 3, settings=SETTINGS))
    finally:
        fault_points.install(None)
    assert first == second == third and first[:2] == (4, 3)


def test_gradients_and_batches_of_before_a_join_do_not_count_after_it() -> None:
    def train(comm: Communicator, number: int) -> list[list[list[float]]]:
        applied: list[list[list[float]]] = []

        def fail_once() -> None:
            if number == 1 and not failed:
                failed.append(True)
                raise ArithmeticError
            applied.append(trainer.model.weight.grad.tolist())

        failed: list[bool] = []
        trainer = _made(comm, sampler=ElasticSampler(100, 2), before_update=fail_once)
        trainer.join()
        while trainer.steps < 3:
            trainer.sampler.next_batch()
            _backward(trainer)
            try:
                trainer.step()
            except ArithmeticError:
                trainer.join()
                assert trainer.model.weight.grad is None and not trainer.sampler.drawn
        return applied

    first, second = succeeded(together(train, 2))
    assert first == [[[1.0, 1.0]]] * 3 and second == first[1:]


def test_a_newcomer_that_dies_in_its_healing_is_replaced_by_another_at_once() -> None:
    """Below the minimum: the one that is left is amid the sync, and the next newcomer is let in to it."""
    fallen = threading.Event()
    victims: dict[int, Communicator] = {}

    def strike(point: str) -> None:
        victim = victims.pop(threading.get_ident(), None) if point == "state_round" else None
        if victim is not None:
            time.sleep(0.3)  # the other one is in the round; if not, it begins that without this one
            victim.close()

    def train(comm: Communicator, number: int) -> tuple[float, list[list[float]]]:
        trainer = _made(comm, number)
        trainer.join()
        slowest = 0.0
        while trainer.steps < 4:
            if number and trainer.steps == 1 and not fallen.is_set():
                comm.close()
                comm.connect()
                trainer = _made(comm, 10)
                victims[threading.get_ident()] = comm
                try:
                    trainer.join()
                except NotConnectedError:
                    fallen.set()
                comm.connect()
                trainer = _made(comm, 20)
                trainer.join()
            _backward(trainer)
            began = time.monotonic()
            trainer.step()
            slowest = max(slowest, time.monotonic() - began)
        return slowest, trainer.model.weight.tolist()

    fault_points.install(strike)
    try:
        (first, weights), (second, others) = succeeded(together(train, 2, settings=SETTINGS))
    finally:
        fault_points.install(None)
    assert fallen.is_set() and weights == others
    assert max(first, second) < SETTINGS.op_timeout_s / 2, "they waited for one another under different tags"


def _trained_with_a_newcomer(*makers: Any) -> list[Any]:
    """What the last maker's trainer, a newcomer, and those of the others hold after the same step; errors as well."""
    goal: list[int] = []
    ended = threading.Event()

    def program(maker: Any) -> Any:
        def train(comm: Communicator, number: int) -> Any:
            trainer = maker(comm, number)
            try:
                trainer.join()
            except Exception:
                ended.set()
                raise
            while not goal or trainer.steps < goal[0]:
                trainer.model.weight.float().square().sum().backward()
                info = trainer.step(float(ended.is_set()))
                if not goal and (len(info.contributors) == 3 or (info.loss > 0 and len(info.contributors) == 2)):
                    goal.append(trainer.steps + 3)
            return dismantle(trainer.state_dict())

        return train

    *first, last = [program(maker) for maker in makers]
    return together(first, late=[last], settings=SETTINGS)


class WithMasterWeights(torch.optim.Optimizer):
    """Keeps float32 copies of its parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("master", parameter.float().clone())
            state["master"] -= 0.01 * parameter.grad.float()
            parameter.copy_(state["master"])


@pytest.mark.parametrize("kind", [WithMasterWeights, torch.optim.NAdam, torch.optim.ASGD])
def test_a_newcomers_optimiser_has_its_state_in_the_types_that_the_others_have(kind: Any) -> None:
    def make(comm: Communicator, number: int) -> ElasticTrainer:
        torch.manual_seed(number)
        model = torch.nn.Linear(4, 1, bias=False).bfloat16()
        optimizer = kind(model.parameters())
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
        assert isinstance(scheduler.milestones, Counter)
        return ElasticTrainer(comm, model, optimizer, scheduler)

    (values, tensors), *others = succeeded(_trained_with_a_newcomer(make, make, make))
    for skeleton, held in others:
        assert skeleton == values and all(map(torch.equal, held, tensors))


def test_a_newcomer_with_other_parts_is_told_so_and_the_others_go_on() -> None:
    def with_scheduler(comm: Communicator, number: int) -> ElasticTrainer:
        trainer = _made(comm, number)
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
        return ElasticTrainer(comm, trainer.model, trainer.optimizer, scheduler)

    for usual, other in [(_made, with_scheduler), (with_scheduler, _made)]:
        first, second, told = _trained_with_a_newcomer(usual, usual, other)
        assert first[0] == second[0]
        assert isinstance(told, SharedStateMismatchError) and "values of optimizer, progress" in str(told)


class Forgetful:
    """Does not take over what it is given."""

    def __init__(self, number: int) -> None:
        self._number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self._number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_a_part_that_does_not_take_over_what_it_is_given_is_named() -> None:
    def make(comm: Communicator, number: int) -> ElasticTrainer:
        return _made(comm, number, others={"curriculum": Forgetful(number // 2)})

    first, second, told = _trained_with_a_newcomer(make, make, make)
    assert first[0] == second[0]
    assert isinstance(told, UsageError) and "the curriculum (Forgetful) holds another state" in str(told)


def test_a_newcomer_that_takes_longer_than_the_timeout_until_it_joins_is_no_error_in_a_step_that_was_made() -> None:
    patience_s = 1.5
    settings = Settings(last_call_s=0, op_timeout_s=patience_s, join_timeout_s=20)

    def train(comm: Communicator, number: int) -> tuple[list[int], list[list[float]]]:
        trainer = _made(comm, number, sampler=ElasticSampler(1000, 2))
        if number == 2:
            time.sleep(1.5 * patience_s)
        trainer.join()
        counts: list[int] = []
        while counts.count(3) < 3 and len(counts) < 50:
            trainer.sampler.next_batch()
            _backward(trainer)
            counts.append(len(trainer.step().contributors))
        assert trainer.sampler.used == 2 * sum(counts) or number == 2
        return counts, trainer.model.weight.tolist()

    first, second, late = succeeded(together([train, train], late=[train], settings=settings))
    assert first == second and first[0][0] == 2
    assert late == ([3] * 3, first[1])


def test_a_peer_that_has_connected_again_has_to_join_again() -> None:
    def train(comm: Communicator, number: int) -> str:
        trainer = _made(comm)
        trainer.join()
        comm.close()
        comm.connect()
        _backward(trainer)
        with pytest.raises(UsageError, match=r"after each connect\(\)") as error:
            trainer.step()
        trainer.join()
        _backward(trainer)
        assert trainer.step().step == 1
        return str(error.value)

    assert "join()" in succeeded(together(train, 1))[0]


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "sampler", "progress"])
def test_others_that_would_take_the_name_of_a_part_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"others has {name}"):
        _made(Communicator("never connected"), others={name: Forgetful(0)})
