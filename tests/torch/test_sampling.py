"""Every sample exactly once an epoch, whoever comes and dies, and the same on all who live."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_pccl import UsageError
from ray_pccl.torch import ElasticSampler

LIFE = st.lists(st.tuples(st.sampled_from(["step", "die", "join", "retry"]), st.integers(0, 1000)), max_size=60)


def _copy(sampler: ElasticSampler) -> ElasticSampler:
    other = ElasticSampler(sampler.size, sampler.batch_size, seed=sampler.seed, shuffle=sampler.shuffle)
    other.load_state_dict(sampler.state_dict())
    return other


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 25), batch=st.integers(1, 7), world=st.integers(1, 4), life=LIFE)
def test_each_sample_is_used_once_an_epoch_in_every_life_of_a_group(size, batch, world, life) -> None:
    samplers = {f"peer {number}": ElasticSampler(size, batch, seed=3) for number in range(world)}
    used: Counter[tuple[int, int]] = Counter()
    count = world

    def all_of(call: str) -> None:
        for sampler in samplers.values():
            getattr(sampler, call)(tuple(samplers))

    all_of("assign")
    for what, draw in life:
        names = list(samplers)
        if what == "die" and len(names) > 1:
            del samplers[names[draw % len(names)]]  # the others learn of it with the next step, or the next attempt
        elif what == "join":
            samplers[f"peer {count}"] = _copy(samplers[names[draw % len(names)]])
            count += 1
            all_of("assign")
        elif what == "retry":
            all_of("assign")
        elif what == "step":
            for peer, sampler in samplers.items():
                sampler.bind(peer)
                drawn = sampler.next_batch().tolist()
                places = sampler.assigned(peer)
                assert len(drawn) == batch and drawn == sampler.indices(places).tolist()
                used.update((place // size, index) for place, index in zip(places, drawn, strict=True))
            all_of("commit")
        states = [sampler.state_dict() for sampler in samplers.values()]
        assert all(state == states[0] for state in states), "survivors disagree"
    some = next(iter(samplers.values()))
    assert set(used.values()) <= {1}, "a sample was used twice in an epoch"
    assert some.used == sum(used.values())
    for epoch in range(some.epoch):
        assert all(used[epoch, index] == 1 for index in range(size)), f"epoch {epoch} is over, and lacks a sample"


def test_what_a_dead_peer_had_is_handed_out_before_anything_new() -> None:
    sampler = ElasticSampler(100, 4, shuffle=False)
    sampler.assign(("a", "b", "c"))
    sampler.commit(("a", "c"))
    assert [sampler.assigned(peer) for peer in "ac"] == [(4, 5, 6, 7), (12, 13, 14, 15)]
    assert sampler.used == 8 and sampler.assigned("b") == ()


def test_a_peer_that_stays_keeps_its_batch_while_others_come_and_go() -> None:
    sampler = ElasticSampler(100, 4, shuffle=False)
    sampler.bind("b")
    sampler.assign(("a", "b"))
    before = sampler.next_batch()
    sampler.assign(("b", "c"))
    assert torch.equal(sampler.next_batch(), before) and sampler.assigned("c") == (0, 1, 2, 3)


def test_every_epoch_has_an_order_of_its_own_that_the_seed_fixes() -> None:
    def epochs(seed: int) -> list[list[int]]:
        sampler = ElasticSampler(50, 50, seed=seed)
        sampler.bind("a")
        sampler.assign(("a",))
        orders = []
        for epoch in range(3):
            assert sampler.epoch == epoch
            orders.append(sampler.next_batch().tolist())
            sampler.commit(("a",))
        return orders

    first = epochs(1)
    assert all(sorted(order) == list(range(50)) for order in first)
    assert first[0] != first[1] != first[2] and first == epochs(1) and first[0] != epochs(2)[0]


@pytest.mark.parametrize("wrong", [{"size": 0}, {"size": 2.0}, {"batch_size": 0}, {"batch_size": True}])
def test_sizes_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(UsageError, match="whole number from 1"):
        ElasticSampler(**({"size": 5, "batch_size": 2} | wrong))


def test_a_state_of_other_arguments_is_refused_by_name() -> None:
    sampler = ElasticSampler(10, 2)
    with pytest.raises(UsageError, match=r"size=10.*size=12"):
        sampler.load_state_dict(ElasticSampler(12, 2).state_dict())


def test_a_sampler_without_a_trainer_says_what_it_needs() -> None:
    with pytest.raises(UsageError, match="ElasticTrainer"):
        ElasticSampler(10, 2).next_batch()
