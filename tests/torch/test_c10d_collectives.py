"""Every collective of the backend "pccl", in all its forms, against what each rank can work out for itself."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from tests.torch.zygote import Zygote

SIZES = (2, 3)
DTYPES = (
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
)
SHAPES = ((), (0,), (1,), (7, 3), (40, 1000))


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A rank's tensor: small whole numbers, which every type holds and sums exactly."""
    count = 1
    for dimension in shape:
        count *= dimension
    numbers = (torch.arange(count) * 7 + rank * 3) % 5 + 1
    if dtype is torch.bool:
        return (numbers % 2 == 0).reshape(shape)
    if dtype.is_complex:
        return torch.complex(numbers.double(), (numbers + rank).double()).to(dtype).reshape(shape)
    return numbers.to(dtype).reshape(shape)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, with a gap after each."""
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def reduced(values: list[torch.Tensor], op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    kind = dist.ReduceOp
    if values[0].dtype is torch.bool:
        fold = torch.logical_or if op in (kind.SUM, kind.MAX, kind.BOR) else torch.logical_and
        return functools.reduce(torch.logical_xor if op == kind.BXOR else fold, values)
    folds = {
        kind.SUM: torch.add,
        kind.AVG: torch.add,
        kind.PRODUCT: torch.mul,
        kind.MIN: torch.minimum,
        kind.MAX: torch.maximum,
        kind.BAND: torch.bitwise_and,
        kind.BOR: torch.bitwise_or,
        kind.BXOR: torch.bitwise_xor,
    }
    total = functools.reduce(folds[op], values)
    return total / len(values) if op == kind.AVG else total


def ops_of(dtype: torch.dtype) -> list[dist.ReduceOp.RedOpType]:
    kind = dist.ReduceOp
    if dtype.is_complex:
        return [kind.SUM, kind.AVG]
    ordered = [kind.SUM, kind.PRODUCT, kind.MIN, kind.MAX]
    return ordered + ([kind.AVG] if dtype.is_floating_point else [kind.BAND, kind.BOR, kind.BXOR])


def reduce_everything(rank: int) -> int:
    size, cases = dist.get_world_size(), 0
    for dtype in DTYPES:
        for shape in SHAPES:
            values = [value(place, shape, dtype) for place in range(size)]
            for op in ops_of(dtype):
                expected = reduced(values, op)
                for form in (torch.clone, strided):
                    tensor = form(values[rank])
                    dist.all_reduce(tensor, op)
                    if op == dist.ReduceOp.AVG:  # torch rounds halves and complex numbers otherwise
                        torch.testing.assert_close(tensor, expected)
                    else:
                        same(tensor, expected)
                    tensor = form(values[rank])
                    dist.reduce(tensor, dst=1, op=op)
                    torch.testing.assert_close(tensor, expected if rank == 1 else values[rank])
                    cases += 2
    return cases


@pytest.mark.parametrize("size", SIZES)
def test_reductions_of_every_type_shape_and_operation_are_exact(zygote: Zygote, size: int) -> None:
    assert all(cases > 200 for cases in zygote.run(reduce_everything, size))


def move_everything(rank: int) -> None:
    size = dist.get_world_size()
    for dtype in DTYPES:
        for shape in SHAPES:
            values = [value(place, shape, dtype) for place in range(size)]
            for form in (torch.clone, strided):
                mine = form(values[rank])

                def room(form=form, like=values[0]) -> torch.Tensor:
                    return form(torch.zeros_like(like))

                tensor = mine.clone() if rank == 1 else room()
                dist.broadcast(tensor, 1)
                same(tensor, values[1])

                gathered = [room() for _ in range(size)]
                dist.all_gather(gathered, mine)
                for found, expected in zip(gathered, values, strict=True):
                    same(found, expected)

                if shape and shape[0]:
                    whole = torch.zeros((size * shape[0], *shape[1:]), dtype=dtype)
                    dist.all_gather_into_tensor(whole, mine)
                    same(whole, torch.cat(values))
                    stacked = torch.zeros((size, *shape), dtype=dtype)
                    dist.all_gather_into_tensor(stacked, mine)
                    same(stacked, torch.stack(values))

                on_root = [room() for _ in range(size)] if rank == 0 else None
                dist.gather(mine, on_root, dst=0)
                for found, expected in zip(on_root or (), values, strict=False):
                    same(found, expected)

                tensor = room()
                dist.scatter(tensor, [form(each) for each in values] if rank == 1 else None, src=1)
                same(tensor, values[rank])

                received = [room() for _ in range(size)]
                dist.all_to_all(received, [form(value(rank + place, shape, dtype)) for place in range(size)])
                for place, found in enumerate(received):
                    same(found, value(rank + place, shape, dtype))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_moved_arrives_whatever_its_type_and_shape(zygote: Zygote, size: int) -> None:
    zygote.run(move_everything, size)


def scatter_reductions(rank: int) -> None:
    size = dist.get_world_size()
    for dtype in DTYPES:
        for op in ops_of(dtype):
            lists = [[value(place + part, (5, 2), dtype) for part in range(size)] for place in range(size)]
            expected = reduced([lists[place][rank] for place in range(size)], op)
            output = torch.zeros((5, 2), dtype=dtype)
            dist.reduce_scatter(output, [each.clone() for each in lists[rank]], op)
            torch.testing.assert_close(output, expected)
            output = torch.zeros((5, 2), dtype=dtype)
            dist.reduce_scatter_tensor(output, torch.cat(lists[rank]), op)
            torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_leaves_each_rank_its_part(zygote: Zygote, size: int) -> None:
    zygote.run(scatter_reductions, size)


def split_exchange(rank: int) -> None:
    size = dist.get_world_size()
    sends = [(rank + place) % 3 for place in range(size)]
    receives = [(place + rank) % 3 for place in range(size)]
    source = torch.cat([torch.full((count, 2), float(10 * rank + place)) for place, count in enumerate(sends)])
    output = torch.zeros((sum(receives), 2))
    dist.all_to_all_single(output, source, receives, sends)
    expected = [torch.full((count, 2), float(10 * place + rank)) for place, count in enumerate(receives)]
    same(output, torch.cat(expected))
    even = torch.zeros(2 * size)
    dist.all_to_all_single(even, torch.arange(2.0 * size) + 100 * rank)
    same(even, torch.cat([torch.arange(2 * rank, 2 * rank + 2.0) + 100 * place for place in range(size)]))


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_takes_split_sizes(zygote: Zygote, size: int) -> None:
    zygote.run(split_exchange, size)


def misfit_splits(rank: int) -> str:
    # Rank 0 sends 2 elements where rank 1 has room for 3.
    splits = {0: ([1, 1], [1, 2]), 1: ([3, 1], [1, 1])}
    output_splits, input_splits = splits[rank]
    try:
        dist.all_to_all_single(
            torch.zeros(sum(output_splits)), torch.zeros(sum(input_splits)), output_splits, input_splits
        )
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "no error"


def test_splits_that_do_not_fit_are_an_error_on_all_ranks_that_names_both(zygote: Zygote) -> None:
    for text in zygote.run(misfit_splits, 2):
        assert "rank 0" in text and "rank 1" in text and "2 elements" in text and "room for 3" in text


def coalesce(rank: int) -> None:
    size, group = dist.get_world_size(), dist.group.WORLD
    tensors = [value(rank, (count,), dtype) for count, dtype in ((3, torch.float32), (5, torch.int64))]
    expected = [
        reduced([value(place, (count,), dtype) for place in range(size)], dist.ReduceOp.SUM)
        for count, dtype in ((3, torch.float32), (5, torch.int64))
    ]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for found, due in zip(tensors, expected, strict=True):
        same(found, due)

    inputs = [torch.full((2,), float(rank)), torch.full((3,), float(rank + 10))]
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    group.allgather_coalesced(outputs, inputs).wait()
    for place, (first, second) in enumerate(outputs):
        same(first, torch.full((2,), float(place)))
        same(second, torch.full((3,), float(place + 10)))

    wholes = [torch.zeros(2 * size), torch.zeros(3 * size)]
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        getattr(group, name)(wholes, inputs).wait()
        same(wholes[1], torch.cat([torch.full((3,), float(place + 10)) for place in range(size)]))
    sources = [torch.arange(2.0 * size), torch.ones(size)]
    parts = [torch.zeros(2), torch.zeros(1)]
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        getattr(group, name)(parts, sources).wait()
        same(parts[0], size * torch.arange(2.0 * rank, 2.0 * rank + 2))
        same(parts[1], torch.tensor([float(size)]))
    for old, new in (("_allgather_base", "all_gather_single"), ("_reduce_scatter_base", "reduce_scatter_single")):
        assert getattr(type(group), old) is getattr(type(group), new)


@pytest.mark.parametrize("size", SIZES)
def test_coalesced_calls_and_both_generations_of_names_work(zygote: Zygote, size: int) -> None:
    zygote.run(coalesce, size)


def premultiply(rank: int) -> None:
    size = dist.get_world_size()
    tensor = torch.full((4,), float(rank + 1))
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same(tensor, torch.full((4,), 0.5 * sum(range(1, size + 1))))


def test_a_premultiplied_sum_scales_each_input(zygote: Zygote) -> None:
    zygote.run(premultiply, 2)


def add_sparse(rank: int) -> None:
    size = dist.get_world_size()
    for count in (0, 1, 4):  # entries on rank 0; each following rank has one more
        indices = torch.arange(count + rank).unsqueeze(0)
        tensor = torch.sparse_coo_tensor(indices, torch.full((count + rank, 2), float(rank + 1)), (10, 2))
        expected = torch.zeros(10, 2)
        for place in range(size):
            expected[: count + place] += place + 1
        dist.all_reduce(tensor)
        same(tensor.to_dense(), expected)


def test_sparse_tensors_are_summed(zygote: Zygote) -> None:
    zygote.run(add_sparse, 3)


def objects(rank: int) -> None:
    size = dist.get_world_size()
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank * 1000})
    assert [each["rank"] for each in found] == list(range(size))
    told = ["told", 3] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    assert told == ["told", 3]


def test_objects_can_be_gathered_and_broadcast(zygote: Zygote) -> None:
    zygote.run(objects, 3)


def differ(rank: int) -> str:
    try:
        dist.all_reduce(torch.zeros(3 + rank))
    except RuntimeError as error:
        text = str(error)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    same(tensor, torch.full((1,), float(dist.get_world_size())))
    return text


def test_a_mismatch_raises_on_all_ranks_naming_both_sides_and_the_group_goes_on(zygote: Zygote) -> None:
    for text in zygote.run(differ, 2):
        assert "count=3" in text and "count=4" in text and "rank0@" in text and "rank1@" in text


def subgroups(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 1]), dist.new_group([0, 2])]
    for group in pairs:
        members = dist.get_process_group_ranks(group) if group is not dist.GroupMember.NON_GROUP_MEMBER else []
        if rank in members:
            tensor = torch.full((3,), float(10**rank))
            dist.all_reduce(tensor, group=group)
            same(tensor, torch.full((3,), float(sum(10**member for member in members))))
            assert dist.get_rank(group) == sorted(members).index(rank)
            tensor = torch.full((2,), float(rank))
            dist.broadcast(tensor, max(members), group=group)
            same(tensor, torch.full((2,), float(max(members))))
    first, _ = dist.new_subgroups_by_enumeration([[0, 2], [1]])
    assert dist.get_world_size(first) == (1 if rank == 1 else 2)
    dist.destroy_process_group(first)
    dist.barrier()


def test_subgroups_reduce_among_their_members(zygote: Zygote) -> None:
    zygote.run(subgroups, 3)
