"""The sampler reads every sequence once over any number of ranks and resumes exactly."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from dlo_lib.base.errors import UserError
from dlo_lib.data import IGNORE_INDEX, PADDING, Layout, RankSampler, Uneven, batches, collate, open_dataset
from dlo_lib.data.reproducible import hashes, permutation

ranks = st.integers(1, 5)
batch_sizes = st.integers(1, 4)


def samplers(size: int, batch: int, world_size: int, **options) -> list[RankSampler]:
    return [RankSampler(size, batch, rank, world_size, **options) for rank in range(world_size)]


@given(world_size=ranks, batch=batch_sizes, size=st.integers(1, 60), seed=st.integers(0, 5))
def test_padding_reads_every_sequence_exactly_once(world_size, batch, size, seed):
    dealt = [list(sampler) for sampler in samplers(size, batch, world_size, seed=seed, uneven=Uneven.PAD)]
    assert len({len(of_rank) for of_rank in dealt}) == 1, "every rank has the same number of micro-batches"
    assert all(len(indices) == batch for of_rank in dealt for indices in of_rank), "every micro-batch is full"
    read = [index for of_rank in dealt for indices in of_rank for index in indices]
    assert sorted(index for index in read if index != PADDING) == list(range(size))
    assert read.count(PADDING) < batch * world_size


@given(world_size=ranks, batch=batch_sizes, extra=st.integers(0, 40), seed=st.integers(0, 5))
def test_dropping_repeats_no_sequence_and_drops_less_than_a_step(world_size, batch, extra, seed):
    size = batch * world_size + extra
    some = samplers(size, batch, world_size, seed=seed)
    dealt = [list(sampler) for sampler in some]
    read = [index for of_rank in dealt for indices in of_rank for index in indices]
    assert len(read) == len(set(read))
    assert set(read) <= set(range(size))
    assert size - len(read) < batch * world_size
    assert {len(of_rank) for of_rank in dealt} == {some[0].batches_per_epoch}


@given(
    world_size=ranks,
    batch=batch_sizes,
    size=st.integers(20, 60),
    uneven=st.sampled_from(Uneven),
    done=st.integers(0, 30),
    rank=st.integers(0, 4),
)
def test_a_saved_state_resumes_with_the_same_micro_batches(world_size, batch, size, uneven, done, rank):
    def fresh():
        return RankSampler(size, batch, rank % world_size, world_size, seed=7, uneven=uneven)

    whole = fresh()
    stream = whole.endless()
    for _ in range(done):
        next(stream)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = fresh()
    resumed.load_state_dict(state)
    assert list(itertools.islice(resumed.endless(), 25)) == list(itertools.islice(stream, 25))
    assert resumed.state_dict() == whole.state_dict()


def test_the_state_is_the_same_on_all_ranks_at_every_step():
    for _ in range(3):
        streams = samplers(23, 2, 3, seed=1)
        for _ in zip(*(sampler.endless() for sampler in streams)):
            assert len({json.dumps(sampler.state_dict()) for sampler in streams}) == 1
            if streams[0].epoch == 2:
                break


@pytest.mark.parametrize("after", [1, 2])
def test_another_number_of_ranks_reads_the_rest_of_the_epoch(after):
    before = samplers(24, 2, 4)
    read = [next(iter(sampler)) for sampler in before]
    resumed = samplers(24, 2, after)
    for sampler in resumed:
        sampler.load_state_dict(before[0].state_dict())
        read += list(sampler)
    assert sorted(itertools.chain.from_iterable(read)) == list(range(24))


def test_epochs_and_seeds_have_different_orders_and_ranks_share_one():
    def epoch(sampler):
        return list(itertools.chain.from_iterable(sampler))

    sampler = RankSampler(50, 5, seed=0)
    first, second = epoch(sampler), epoch(sampler)
    assert sampler.epoch == 2
    assert first != second
    assert sorted(first) == sorted(second)
    assert epoch(RankSampler(50, 5, seed=1)) != first
    assert epoch(RankSampler(50, 5, seed=0)) == first
    in_turn = [index for step in zip(*samplers(50, 5, 2)) for indices in step for index in indices]
    assert in_turn == first, "more ranks read the same order in parallel"
    assert epoch(RankSampler(50, 5, shuffle=False)) == list(range(50))


def test_each_epoch_drops_other_sequences():
    sampler = RankSampler(11, 5)
    left = [set(range(11)) - set(itertools.chain.from_iterable(sampler)) for _ in range(8)]
    assert all(len(dropped) == 1 for dropped in left)
    assert len(set.union(*left)) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"size": 5, "batch": 2, "world_size": 4},
            r"has 5 sequences, one micro-batch on every rank takes 8 \(4 x 2\): use a smaller batch",
        ),
        ({"size": 0, "batch": 1, "uneven": Uneven.PAD}, "has 0 sequences"),
        ({"size": 5, "batch": 0}, "use a batch >= 1"),
        ({"size": 5, "batch": 1, "rank": 2, "world_size": 2}, "a rank below the number of ranks"),
    ],
)
def test_sizes_that_leave_no_micro_batch_raise(arguments, message):
    with pytest.raises(UserError, match=message):
        RankSampler(**arguments)


@pytest.mark.parametrize(
    ("other", "message"),
    [({"size": 31}, "has size 30, this run 31"), ({"seed": 1}, "has seed 0, this run 1")],
)
def test_a_position_in_other_data_raises(other, message):
    state = RankSampler(30, 2).state_dict()
    with pytest.raises(UserError, match=f"{message}: resume with the same data and seed"):
        RankSampler(**({"size": 30, "batch": 2} | other)).load_state_dict(state)


def test_padding_does_not_count_in_the_loss():
    dataset = open_dataset("arithmetic", 16, layout=Layout.PAD)
    torch.manual_seed(0)
    model = torch.nn.Embedding(dataset.vocab_size, dataset.vocab_size)

    def loss_of(indices) -> torch.Tensor:
        inputs, targets = collate(dataset, indices)
        return F.cross_entropy(
            model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    assert torch.equal(loss_of([3, PADDING]), loss_of([3]))
    assert loss_of([PADDING]) == 0


def test_batches_contain_the_sequences_of_the_sampler():
    dataset = open_dataset("arithmetic", 24)
    sampler = RankSampler(len(dataset), 3, 1, 2, shuffle=False)
    for number, (inputs, targets) in zip(range(4), batches(dataset, sampler)):
        assert inputs.shape == targets.shape == (3, 24)
        for row in range(3):
            own_inputs, own_targets = dataset[6 * number + 3 + row]
            assert torch.equal(inputs[row], own_inputs)
            assert torch.equal(targets[row], own_targets)


def test_the_hashes_equal_those_of_splitmix64():
    # The first outputs of the reference implementation for the state 0.
    assert [hex(number) for number in hashes(3)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
    assert permutation(8, 1, 2).tolist() == permutation(8, 1, 2).tolist() != permutation(8, 2, 1).tolist()


def test_a_permutation_is_uniform():
    counts = np.zeros((4, 4))
    for seed in range(4000):
        counts[np.arange(4), permutation(4, seed)] += 1
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 30, "9 degrees of freedom: above 30 once in 2000"
