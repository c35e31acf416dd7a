"""The last step of a sync: the pieces that arrived, into the user's tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence

from ray_pccl.state.pieces import Piece
from ray_pccl.state.tensors import Bytes, TensorInfo

THREADS = min(2, os.cpu_count() or 1)
LEAST_BYTES = 64 << 20
"""Below that one thread is as fast."""


def store(
    infos: Sequence[TensorInfo], contents: Sequence[Bytes], pieces: Sequence[Piece], arrived: Mapping[int, Bytes]
) -> tuple[str, ...]:
    """Writes all pieces; the names of the tensors that changed. `contents` is what each tensor's `load` returned."""

    def write(indices: Sequence[int]) -> None:
        for index in indices:
            piece = pieces[index]
            infos[piece.tensor].write(contents[piece.tensor], piece.start, arrived[index])

    order = sorted(arrived)
    if sum(len(piece) for piece in arrived.values()) < LEAST_BYTES:
        write(order)
    else:
        _in_threads(write, [order[part::THREADS] for part in range(THREADS)])
    changed = sorted({pieces[index].tensor for index in order})
    for tensor in changed:
        infos[tensor].store(contents[tensor])
    return tuple(infos[tensor].name for tensor in changed)


def _in_threads(work: Callable[[Sequence[int]], None], parts: Sequence[Sequence[int]]) -> None:
    errors: list[BaseException] = []

    def run(part: Sequence[int]) -> None:
        try:
            work(part)
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=run, args=(part,), name="ray_pccl-store") for part in parts[1:]]
    for thread in others:
        thread.start()
    run(parts[0])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
