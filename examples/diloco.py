"""DiLoCo: peers train alone for many steps, and average what they have learned in 8 bits; one dies, one joins.

    python examples/diloco.py                    some 20 seconds, and both loss curves in diloco.png
    python examples/diloco.py --quick            fewer samples
    python examples/diloco.py --plot FILE

Synchronous training averages gradients at every step. Here, as in DiLoCo (Douillard et al., 2023), each peer makes
EVERY steps by itself, with AdamW. What it moved away from the shared weights is its *pseudo-gradient*. These are
averaged, a byte an element, and an outer SGD with Nesterov momentum makes a step along the average. As in Streaming
DiLoCo (2025), the parameters are averaged in FRAGMENTS parts, one after another, and each average runs behind DELAY of
the peers' own steps.

It is asserted that all peers held the same bits after every outer step; that a run in which one peer is killed and one
joins comes to the same loss within noise; and that this is at most WORSE times as high as that of synchronous training
on as many samples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
import training_run
import xxhash
from training_run import PEERS, SAMPLES, Ending, Row, final_loss, loss_of, network, problem

from ray_pccl import Communicator
from ray_pccl.torch import DiLoCo

EVERY, FRAGMENTS, DELAY = 20, 2, 3
BATCH = 32
PAUSE_S = 0.001
TOLERANCE = 0.05
WORSE = 1.1


def train(comm: Communicator, number: int, budget: int, tell: Callable[[Row], None]) -> Ending:
    """What each peer does: on samples of its own, which it draws by itself."""
    points, heights = problem(seed=0, count=SAMPLES)
    draw = torch.Generator().manual_seed(number)
    model = network(seed=number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco = DiLoCo(comm, model, optimizer, sync_every=EVERY, fragments=FRAGMENTS, delay=DELAY, mixing=0.5)
    diloco.join()
    joined_at, sent = diloco.steps, 0
    a_step = PEERS * BATCH * EVERY // FRAGMENTS  # the samples of an outer one
    while diloco.steps * a_step < budget:
        indices = torch.randint(SAMPLES, (BATCH,), generator=draw)
        loss = loss_of(model, points[indices], heights[indices])
        loss.backward()
        info = diloco.step()
        if info is not None:
            sent = max(sent, info.tx_bytes)
            tell(Row(info.step, info.step * a_step, float(loss.detach()), len(info.contributors), digest(diloco)))
        time.sleep(PAUSE_S)
    diloco.finish()
    return Ending(final_loss(model), digest(diloco), diloco.steps * a_step, joined_at, sent)


def digest(diloco: DiLoCo) -> int:
    """Of the outer parameters."""
    text = xxhash.xxh3_64()
    for flat in diloco.outer:
        text.update(flat.detach().numpy())
    return text.intdigest()


def synchronous(budget: int) -> float:
    """The baseline: the same model and inner optimiser, and one step for every average."""
    points, heights = problem(seed=0, count=SAMPLES)
    draw = torch.Generator().manual_seed(0)
    model = network(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(budget // (PEERS * BATCH)):
        indices = torch.randint(SAMPLES, (PEERS * BATCH,), generator=draw)
        optimizer.zero_grad()
        loss_of(model, points[indices], heights[indices]).backward()
        optimizer.step()
    return final_loss(model)


def main() -> None:
    """Raises if anything that it claims did not hold."""
    parser = argparse.ArgumentParser(description="DiLoCo on peers that come and go.")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--plot", type=Path, default=Path("diloco.png"), help="where the loss curves go")
    arguments = parser.parse_args()
    budget = SAMPLES * (30 if arguments.quick else 100)
    calm = training_run.run(train, budget, faults=False)
    faulty = training_run.run(train, budget, faults=True)
    training_run.compare(calm, faulty, TOLERANCE)
    print(f"the newcomer came after {faulty.endings[-1].joined_at} outer steps, and was given the outer parameters")
    baseline = synchronous(budget)
    print(f"synchronous training:        final loss {baseline:.4f} after {budget} samples")
    assert faulty.loss < WORSE * baseline, f"{faulty.loss} is more than {WORSE} times {baseline}"
    elements = sum(parameter.numel() for parameter in network(0).parameters())
    whole = FRAGMENTS * calm.endings[0].sent
    plain = 2 * 4 * elements * (PEERS - 1) // PEERS  # what a ring sends of it in float32
    print(f"a peer sent {whole} bytes for an average of {elements} elements; in float32 a ring sends {plain},")
    print(f"and {EVERY * plain} if it averages after every step")
    training_run.plot("DiLoCo", calm, faulty, arguments.plot)


if __name__ == "__main__":
    main()
