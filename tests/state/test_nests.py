"""What is shared of torch's models and optimisers, of schedulers and of nests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ray_pccl import SharedState, UsageError

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


def _model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()


def _copy(source: SharedState, target: SharedState) -> None:
    """What a sync does to a newcomer."""
    assert [(info.name, info.dtype, info.shape) for info in source.infos] == [
        (info.name, info.dtype, info.shape) for info in target.infos
    ]
    for given, taken in zip(source.infos, target.infos, strict=True):
        contents = taken.load()
        taken.write(contents, 0, given.load().copy())
        taken.store(contents)


def _bits(state: SharedState) -> list[bytes]:
    return [info.load().tobytes() for info in state.infos]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_that_never_stepped_goes_on_as_the_others_do(name: str) -> None:
    model, other = _model(1), _model(2)
    optimizer, fresh = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    for seed in range(3):
        _step(model, optimizer, seed)
    optimizer.param_groups[0]["lr"] = 0.05
    state, received = SharedState.from_state_dict(model, optimizer), SharedState.from_state_dict(other, fresh)
    _copy(state, received)
    assert fresh.param_groups[0]["lr"] == 0.05
    for seed in range(3, 6):
        _step(model, optimizer, seed)
        _step(other, fresh, seed)
    assert _bits(SharedState.from_state_dict(model, optimizer)) == _bits(SharedState.from_state_dict(other, fresh))


def test_making_the_state_of_an_optimiser_changes_no_parameter_no_gradient_and_no_count() -> None:
    model = _model(1)
    model[0].weight.data[0, 0] = -0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model[0].bias.grad = torch.ones(3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    SharedState.from_state_dict(model, optimizer)
    after = [parameter.detach() for parameter in model.parameters()]
    assert [a.numpy().tobytes() for a in after] == [b.numpy().tobytes() for b in before]
    assert model[0].bias.grad.tolist() == [1.0] * 3 and model[0].weight.grad is None
    assert all(state["step"] == 0 for state in optimizer.state.values()) and optimizer.param_groups[0]["lr"] == 0.1
    shrinking = _Shrinking(model.parameters(), {})
    SharedState.from_state_dict(model, shrinking)
    assert [a.detach().numpy().tobytes() for a in model.parameters()] == [b.numpy().tobytes() for b in before]
    assert shrinking.state[model[0].bias]["step"] == 0
    with pytest.raises(UsageError, match="step once"):
        SharedState.from_state_dict(model, torch.optim.LBFGS(model.parameters()))


class _Shrinking(torch.optim.Optimizer):
    """One that changes parameters though there is neither a gradient nor a learning rate."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.5)
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1


def test_names_tell_where_a_tensor_is() -> None:
    model = _model(1)
    state = SharedState.from_state_dict(model, torch.optim.Adam(model.parameters()), revision=7)
    names = [info.name for info in state.infos]
    assert {"model.0.weight", "model.1.num_batches_tracked", "optimizer.state.0.exp_avg"} <= set(names)
    assert {"optimizer.param_groups.0.lr", "optimizer.param_groups.0.betas.1"} <= set(names)
    assert state.revision == 7 and names == sorted(names)


def test_numbers_are_put_back_where_they_were_with_their_types() -> None:
    made = [
        {"step": 3, "rates": [0.5, True], "pair": (1, 2.0), "who": "me", "w": np.zeros(2), "none": None} for _ in "ab"
    ]
    made[0] |= {"step": 9, "rates": [0.25, False], "pair": (7, 8.0), "who": "you"}
    _copy(SharedState.from_state_dict(made[0]), SharedState.from_state_dict(made[1]))
    assert made[1]["step"] == 9 and type(made[1]["step"]) is int
    assert made[1]["rates"] == [0.25, False] and type(made[1]["rates"][1]) is bool
    assert made[1]["pair"] == (7, 8.0) and made[1]["who"] == "me"
    made[0]["step"] = 1 << 70
    with pytest.raises(UsageError, match="step"):
        _bits(SharedState.from_state_dict(made[0]))


def test_a_scheduler_is_given_its_state_through_its_own_method() -> None:
    pairs = []
    for _ in "ab":
        optimizer = torch.optim.SGD(_model(1).parameters(), lr=1.0)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)))
    (optimizer, scheduler), (_, other) = pairs
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    _copy(SharedState.from_state_dict(scheduler=scheduler), SharedState.from_state_dict(scheduler=other))
    assert other.last_epoch == 5 and other.get_last_lr() == scheduler.get_last_lr()


def test_there_must_be_something_to_share() -> None:
    with pytest.raises(UsageError, match="no tensor"):
        SharedState.from_state_dict({"name": "x"})


TRAINED_ALIKE = {
    **OPTIMIZERS,
    "SGD with decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
    "RMSprop with decay": lambda p: torch.optim.RMSprop(p, lr=0.1, weight_decay=0.2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1, weight_decay=0.2),
}
TRAINED_OTHERWISE = {
    "SGD with dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}


@pytest.mark.parametrize("name", TRAINED_ALIKE)
def test_sharing_the_state_of_an_optimiser_that_never_stepped_does_not_change_the_training(name: str) -> None:
    model, same = _model(1), _model(1)
    plain, shared = TRAINED_ALIKE[name](model.parameters()), TRAINED_ALIKE[name](same.parameters())

    SharedState.from_state_dict(same, shared)
    for seed in range(3):
        _step(model, plain, seed)
        _step(same, shared, seed)

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


@pytest.mark.parametrize("name", TRAINED_OTHERWISE)
def test_an_optimiser_that_would_train_otherwise_has_to_step_first(name: str) -> None:
    model = _model(1)
    optimizer = TRAINED_OTHERWISE[name](model.parameters())

    with pytest.raises(UsageError, match="let it step once"):
        SharedState.from_state_dict(model, optimizer)

    assert not optimizer.state
    _step(model, optimizer, 0)
    assert SharedState.from_state_dict(model, optimizer).infos


def test_schedulers_inside_a_scheduler_are_shared_as_they_are_now() -> None:
    def scheduler() -> torch.optim.lr_scheduler.SequentialLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[2])

    def inside(outer: torch.optim.lr_scheduler.SequentialLR) -> list[tuple[int, int]]:
        return [(each.last_epoch, each._step_count) for each in outer._schedulers]

    source, target = scheduler(), scheduler()
    state, received = SharedState.from_state_dict(source), SharedState.from_state_dict(target)
    for _ in range(5):
        source.optimizer.step()
        source.step()
    assert inside(source) != inside(target)

    _copy(state, received)

    assert inside(source) == inside(target) and source.last_epoch == target.last_epoch
