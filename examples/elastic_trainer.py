"""Data-parallel training with `ElasticTrainer`: once undisturbed, once with a peer that is killed and one that joins.

    python examples/elastic_trainer.py                   some 15 seconds, and both loss curves in elastic_trainer.png
    python examples/elastic_trainer.py --quick           fewer samples
    python examples/elastic_trainer.py --plot FILE

Three processes train one model. Both runs use the same number of samples, each once an epoch: what the killed peer had
drawn is given to others. It is asserted that all peers held the same bits after every step, that the newcomer was given
the others' state, and that both runs come to the same loss within noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import training_run
import xxhash
from training_run import SAMPLES, Ending, Row, final_loss, loss_of, network, problem

from ray_pccl import Communicator
from ray_pccl.torch import ElasticSampler, ElasticTrainer

BATCH = 32
PAUSE_S = 0.002
TOLERANCE = 0.05


def train(comm: Communicator, number: int, budget: int, tell: Callable[[Row], None]) -> Ending:
    """What each peer does."""
    points, heights = problem(seed=0, count=SAMPLES)
    model = network(seed=number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
    sampler = ElasticSampler(SAMPLES, BATCH)
    trainer = ElasticTrainer(comm, model, optimizer, scheduler, sampler)
    trainer.join()
    joined_at = trainer.steps
    while sampler.used < budget:
        indices = sampler.next_batch()
        loss = loss_of(model, points[indices], heights[indices])
        loss.backward()
        info = trainer.step(loss)
        tell(Row(info.step, sampler.used, info.loss, len(info.contributors), digest(trainer)))
        time.sleep(PAUSE_S)
    return Ending(final_loss(model), digest(trainer), sampler.used, joined_at)


def digest(trainer: ElasticTrainer) -> int:
    """Of the weights and the optimiser's moments."""
    text = xxhash.xxh3_64()
    for parameter in trainer.model.parameters():
        text.update(parameter.detach().numpy())
        for value in trainer.optimizer.state[parameter].values():
            text.update(value.numpy())
    return text.intdigest()


def main() -> None:
    """Raises if anything that it claims did not hold."""
    parser = argparse.ArgumentParser(description="Training that goes on while peers come and go.")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--plot", type=Path, default=Path("elastic_trainer.png"), help="where the loss curves go")
    arguments = parser.parse_args()
    budget = SAMPLES * (10 if arguments.quick else 40)
    calm = training_run.run(train, budget, faults=False)
    faulty = training_run.run(train, budget, faults=True)
    training_run.compare(calm, faulty, TOLERANCE)
    print(f"the newcomer came after {faulty.endings[-1].joined_at} steps, and was given all that the others held")
    training_run.plot("Elastic data-parallel training", calm, faulty, arguments.plot)


if __name__ == "__main__":
    main()
