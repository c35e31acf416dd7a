"""Many tensors at once, and a peer that dies in the middle of it: PCCL's two ways to all-reduce them, unchanged.

    python examples/concurrent_all_reduce.py

Both functions are those of PCCL's page "Concurrent All-Reduce with Retry", but for the import. The first is the
recommended one: the library retries what a death interrupts. The second does the same by hand, with handles.

Four peers, each a process of its own, reduce 24 tensors with each of them. Then, twice, one peer is killed where it
should have reduced once more: both functions give the survivors their own sums.
"""

# PCCL's functions stay as they are:
# ruff: noqa: D200, D415, F541, SIM113
from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from master_actor import serve
from ray_pccl import (
    Attribute,
    Communicator,
    DataType,
    DistributionHint,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Settings,
)

PEERS = 4
TENSORS = 24
COUNT = 50_000
PATIENCE_S = 30.0

# fmt: off
# ------------------------------------------------------------------------------------------------ the functions of PCCL


def all_reduce_multiple_with_retry(communicator: Communicator,
                                   tensors: list[torch.Tensor],
                                   op: ReduceOp,
                                   max_in_flight: int = 16):
    """
    Launches concurrent all-reduce operations on a list of tensors,
    waits for them all, and retries if a peer fails or the world size changes.
    Will attempt to target :param max_in_flight: concurrent all-reduce operations.
    The more similar your tensors are in size, the better this in flight system will work.
    """
    descriptors = []
    tag = 0
    for tensor in tensors:
        reduce_op_descriptor = ReduceOpDescriptor.from_torch(
            send=tensor,
            recv=tensor,
            reduce_descriptor=ReduceDescriptor(
                count=tensor.numel(),
                op=op,
                tag=tag,
                operand_descriptor=ReduceOperandDescriptor(
                    datatype=DataType.FLOAT,
                    distribution_hint=DistributionHint.NORMAL
                ),
                quantization_options=QuantizationOptions(
                    quantized_datatype=DataType.FLOAT,
                    algorithm=QuantizationAlgorithm.NONE
                )
            )
        )
        descriptors.append(reduce_op_descriptor)
        tag += 1
    try:
        info = communicator.all_reduce_multiple_with_retry(descriptors, max_in_flight=max_in_flight)
        return True, info.tx_bytes, info.rx_bytes
    except PCCLError:
        return False, 0, 0


def all_reduce_multiple_with_retry__equivalent(communicator: Communicator,
                                   tensors: list[torch.Tensor],
                                   op: ReduceOp,
                                   max_in_flight: int = 16):
    """
    The following function is equivalent to the above, but uses a more manual approach. (Not recommended for production)
    """
    world_size = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)

    total_tx = 0
    total_rx = 0

    def launch_all_reduce(x: torch.Tensor, tag: int):
        op_desc = ReduceOperandDescriptor(
            datatype=DataType.FLOAT,
            distribution_hint=DistributionHint.NORMAL
        )
        quant_desc = QuantizationOptions(
            quantized_datatype=DataType.FLOAT,
            algorithm=QuantizationAlgorithm.NONE
        )
        return communicator.all_reduce_async(
            x, x,
            operand_descriptor=op_desc,
            quantization_options=quant_desc,
            op=op,
            tag=tag
        )

    handles = [None for _ in range(len(tensors))]
    done_handles = set()

    in_flight = 0
    for tensor_index in range(len(tensors)):
        dst_tensor = tensors[tensor_index]

        if in_flight >= max_in_flight:
            break

        handles[tensor_index] = launch_all_reduce(
            dst_tensor,
            tensor_index
        )
        in_flight += 1

    while world_size > 1:
        all_done = True
        for tensor_index in range(len(tensors)):
            handle = handles[tensor_index]
            dst_tensor = tensors[tensor_index]

            if handle is None:
                if tensor_index in done_handles:
                    continue

                if in_flight >= max_in_flight:
                    continue

                handle = handles[tensor_index] = launch_all_reduce(
                    dst_tensor,
                    tensor_index
                )
                in_flight += 1

            is_success, status, info = handle.wait()
            world_size = communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
            if not is_success:
                print(f"Reduce failed: {status}; Starting recovery procedure")
                handles[tensor_index] = None
                # Wait for all ongoing ops to finish or fail before retry
                for j in range(len(tensors)):
                    if j == tensor_index:
                        continue
                    h_j = handles[j]
                    if h_j is not None:
                        s_j, _, _ = h_j.wait()
                        if s_j:
                            done_handles.add(j)
                        in_flight -= 1
                    handles[j] = None
                all_done = False
                break

            # success for this handle
            handles[tensor_index] = None
            done_handles.add(tensor_index)

            total_tx += info.tx_bytes
            total_rx += info.rx_bytes

            in_flight -= 1

        if all_done:
            print(
                f"Reduce completed RX: {total_rx}, TX: {total_tx}; world_size: {world_size}")
            break

    if world_size == 1:
        print(f"All peers have left except this peer. All reduce will do nothing.")
        # If we are alone, just finalize all handles and return
        for h in handles:
            if h is not None:
                h.wait()
        return False

    return True


# fmt: on
# --------------------------------------------------------------------------------------------------- what is done here


def tensors_of(value: float) -> list[torch.Tensor]:
    """The tensors of a peer: tensor number i is full of its value plus i."""
    return [torch.full((COUNT,), value + index) for index in range(TENSORS)]


def reduce(comm: Communicator, value: float, by_hand: bool) -> tuple[bool, float, float]:
    """Whether it worked, the first tensor's sum, and the seconds it took."""
    tensors = tensors_of(value)
    began = time.monotonic()
    if by_hand:
        with contextlib.redirect_stdout(io.StringIO()):  # it says how it goes
            ok = all_reduce_multiple_with_retry__equivalent(comm, tensors, ReduceOp.SUM, max_in_flight=TENSORS)
    else:
        ok, _, _ = all_reduce_multiple_with_retry(comm, tensors, ReduceOp.SUM)
    taken = time.monotonic() - began
    first = float(tensors[0][0])
    step = float(tensors[1][0]) - first
    for index, tensor in enumerate(tensors):
        assert (tensor == first + step * index).all(), f"tensor {index} is wrong"
    return ok, first, taken


def peer(pipe: Connection, endpoint: str, value: float) -> None:
    """The life of one peer: it reduces when it is told to, with which function, and reports."""
    torch.set_num_threads(1)
    settings = Settings.from_env(last_call_s=PATIENCE_S)  # all of them, or none
    with Communicator("reducing", master=endpoint, max_world_size=PEERS, settings=settings) as comm:
        pipe.send("ready")
        while (by_hand := pipe.recv()) is not None:
            pipe.send(reduce(comm, value, by_hand))


def answer(pipe: Connection) -> Any:
    """What a peer says next."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"a peer said nothing for {PATIENCE_S:g} s")
    return pipe.recv()


def main() -> None:
    """Starts a master and four peers, and has them reduce. Raises if any sum is wrong."""
    master = serve()
    master.start()
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(PEERS):
        ours, theirs = spawn.Pipe()
        arguments = (theirs, str(master.server.endpoint), float(10**rank))
        processes.append(spawn.Process(target=peer, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        answer(pipe)
    print(f"{PEERS} peers, {TENSORS} tensors of {COUNT} floats each; the first ones hold 1, 10, 100 and 1000")
    for by_hand in (False, True):
        show("all four", by_hand, pipes, 1111.0)
    for by_hand, victim in ((False, 3), (True, 2)):
        wanted = float(sum(10**rank for rank in range(victim)))
        for pipe in pipes[:victim]:
            pipe.send(by_hand)
        time.sleep(0.3)  # by now the others wait for it
        pid = processes[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        show(f"peer {victim} is killed", by_hand, pipes[:victim], wanted, told=True)
    for pipe, process in zip(pipes[:victim], processes[:victim], strict=True):
        pipe.send(None)
        process.join(PATIENCE_S)
    master.stop("the example is over")


def show(what: str, by_hand: bool, pipes: list[Connection], wanted: float, told: bool = False) -> None:
    """Has peers reduce, unless they were told to before, and prints what they hold."""
    for pipe in pipes:
        if not told:
            pipe.send(by_hand)
    answers = [answer(pipe) for pipe in pipes]
    assert {(ok, total) for ok, total, _ in answers} == {(True, wanted)}, answers
    milliseconds = 1000 * max(taken for _, _, taken in answers)
    way = "by hand" if by_hand else "recommended"
    print(f"{way:>12}, {what}: the sum is {wanted:g} on {len(answers)} peers, {milliseconds:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
