"""What the actors of diloco.py train: the demo's network, in torch with AdamW, or in numpy with SGD; and on what.

A learner's weights are read and written as one array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from demo_training import Model, batch

UNSEEN = 1000
"""The number of an actor that does not exist: nobody trains on its data."""


class TorchLearner:
    """The demo's network in torch, with AdamW."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        layers = (torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
        self._model = torch.nn.Sequential(*layers, torch.nn.Linear(64, 3))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=2e-3)

    def get(self) -> Any:
        """A copy of the weights."""
        vector = self._torch.nn.utils.parameters_to_vector(self._model.parameters())
        return vector.detach().numpy().copy()

    def set(self, weights: Any) -> None:
        """Takes over weights."""
        vector = self._torch.from_numpy(weights.copy())
        self._torch.nn.utils.vector_to_parameters(vector, self._model.parameters())

    def loss(self, points: Any, labels: Any) -> float:
        """The mean loss of a batch."""
        with self._torch.no_grad():
            return float(self._loss(points, labels))

    def step(self, points: Any, labels: Any) -> None:
        """One inner step."""
        self._optimizer.zero_grad()
        self._loss(points, labels).backward()
        self._optimizer.step()

    def _loss(self, points: Any, labels: Any) -> Any:
        torch = self._torch
        return torch.nn.functional.cross_entropy(self._model(torch.from_numpy(points)), torch.from_numpy(labels))


class NumpyLearner:
    """The demo's own network, with SGD and momentum."""

    def __init__(self) -> None:
        self._model = Model(seed=0)

    def get(self) -> Any:
        """A copy of the weights."""
        return self._model.weights.copy()

    def set(self, weights: Any) -> None:
        """Takes over weights."""
        self._model.weights[:] = weights

    def loss(self, points: Any, labels: Any) -> float:
        """The mean loss of a batch."""
        return self._model.gradient(points, labels)[0]

    def step(self, points: Any, labels: Any) -> None:
        """One inner step."""
        self._model.apply(self._model.gradient(points, labels)[1])


LEARNERS: dict[str, Callable[[], Any]] = {"torch": TorchLearner, "numpy": NumpyLearner}


def samples(number: int, step: int) -> tuple[Any, Any]:
    """The demo's spirals, with every tenth label wrong or right by chance: so no loss falls to 0."""
    points, labels = batch(number, step)
    labels[::10] = np.roll(labels, 1)[::10]
    return points, labels


def unseen() -> tuple[Any, Any]:
    """What a model is judged by."""
    points, labels = zip(*(samples(UNSEEN, step) for step in range(32)), strict=True)
    return np.concatenate(points), np.concatenate(labels)
