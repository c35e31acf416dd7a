"""Collectives over ObjectRefs, for drivers; and `allreduce`, for inside an actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_pccl.descriptors import ReduceOp
from ray_pccl.driver import reducing
from ray_pccl.driver.creating import get_communicator, group_of, only_group
from ray_pccl.driver.groups import Group, check_op, owners

_IMPERATIVE_TAG = 0


def allreduce_refs(
    refs: Sequence[Any], op: ReduceOp = ReduceOp.SUM, *, group: Group | str | None = None, on_loss: str = "continue"
) -> list[Any]:
    """Reduces what methods of a group's actors returned. Returns at once: a ref of the result for each ref, in order.

    Each result lives in the actor of its ref; pass it back to that actor and nothing is copied. Values are tensors,
    numbers, or nests of them, of the same structure and shapes on all actors: else every result raises
    `CollectiveMismatchError`, which names the leaf and the actors.

    Args:
        refs: One of each actor of the group, ready or not, in any order: of `@ray_pccl.collective` methods (whose
            values never leave their actors), or of others (whose values Ray keeps).
        op: How to reduce. AVG divides by the number of those whose values are in the result.
        group: The group or its name. It is found from the actors if they are in one only.
        on_loss: "continue": if an actor dies, the results of the others hold what the survivors contributed, and
            its own raises `PeerLostError`. "raise": then all results raise it.

    An actor whose own method failed has that error as its result; the others get `InputFailedError`.

    Raises:
        UsageError: At once, for refs that were made by no actor of one group, for two of the same actor, for a member
            of the group without one.
    """
    return group_of(owners(refs), group).allreduce_refs(refs, op, on_loss=on_loss)


def reduce_refs(
    refs: Sequence[Any],
    root: Any = 0,
    op: ReduceOp = ReduceOp.SUM,
    *,
    group: Group | str | None = None,
    on_loss: str = "continue",
) -> Any:
    """Like `allreduce_refs`, with the result at one actor alone: returns one ref.

    Args:
        refs: One of each actor of the group.
        root: The place of that actor's ref in `refs`, or its handle. If it dies, the result raises `PeerLostError`.
        op: How to reduce.
        group: The group or its name.
        on_loss: As in `allreduce_refs`, for the other actors.
    """
    return group_of(owners(refs), group).reduce_refs(refs, root, op, on_loss=on_loss)


def broadcast_ref(ref: Any, *, group: Group | str | None = None) -> list[Any]:
    """Brings a value to all actors of the group: a ref for each of `group.actors`, in order, of its own copy.

    The value may be anything that pickles; its tensors go over ray_pccl's own links. At the actor that made it, the
    result is the very same tensors. If that actor dies, the results that are not there yet raise `PeerLostError`.
    """
    return group_of(owners([ref]), group).broadcast_ref(ref)


def allgather_refs(refs: Sequence[Any], *, group: Group | str | None = None, on_loss: str = "continue") -> list[Any]:
    """Brings all values to all actors: a ref for each ref, of a list of the values in the order of `refs`.

    Values may differ in structure and shape. Those of actors that died meanwhile are not in the lists.
    """
    return group_of(owners(refs), group).allgather_refs(refs, on_loss=on_loss)


def reducescatter_refs(
    refs: Sequence[Any], op: ReduceOp = ReduceOp.SUM, *, group: Group | str | None = None, on_loss: str = "continue"
) -> list[Any]:
    """Reduces, and cuts the result along the first axis of each leaf: the i-th ref is of the i-th part.

    The first axis must be a multiple of the number of refs. The part of an actor that died is dropped.
    """
    return group_of(owners(refs), group).reducescatter_refs(refs, op, on_loss=on_loss)


def barrier(group: Group | str | None = None, *, on_loss: str = "continue") -> list[Any]:
    """A point that every actor of the group reaches after the calls that were made before it.

    Returns at once: a ref for each actor, which is ready when all have reached it.

    Args:
        group: The group or its name; may be left out where this process knows one only.
        on_loss: As in `allreduce_refs`.
    """
    return only_group(group).barrier(on_loss=on_loss)


def allreduce(value: Any, op: ReduceOp = ReduceOp.SUM, *, group_name: str | None = None) -> Any:
    """Inside an actor of a group: the value reduced with those of all other members, who must call it as well.

    Args:
        value: A tensor, a number, or a nest of them; it is not changed.
        op: How to reduce.
        group_name: The group; may be left out where the actor is in one only.

    If a member dies, the others' result holds what the survivors contributed. For more than this, and for operations in
    flight together, use `get_communicator()`.
    """
    member = reducing.Member(get_communicator(group_name), _IMPERATIVE_TAG, retry=True)
    return reducing.all_reduce(member, value, check_op(op), retry=True)
