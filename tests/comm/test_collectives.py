"""Collectives written out have the values of torch.distributed and the bytes of the formulas; their cost."""

from collections import Counter
from itertools import pairwise as neighbours

import pytest
import torch
import torch.distributed as dist

from dlo_lib.base.errors import UserError
from dlo_lib.comm import collectives as ours
from dlo_lib.comm.calls import Kind
from dlo_lib.comm.collectives import (
    Algorithm,
    Measurement,
    Reduction,
    cheapest,
    cost,
    crossover,
    fit_alpha_beta,
)
from dlo_lib.comm.tracing.recorder import trace_collectives
from dlo_lib.launch import run_ranks

SIZES = [(0,), (), (1,), (3,), (5, 7), (4, 12), (1000,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
THEIRS = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.AVG: dist.ReduceOp.SUM,
}
every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def drawn(shape, dtype, rank=None):
    """Return integers in any dtype, small enough that every order of summation gives the same result."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return torch.randint(0, 9, shape, generator=generator).to(dtype)


def expected(tensor, reduction, group=None):
    total = tensor.clone()
    dist.all_reduce(total, THEIRS[reduction], group=group)
    return total / dist.get_world_size(group) if reduction is Reduction.AVG else total


def all_reduces_compared():
    compared = 0
    for all_reduce in (ours.all_reduce, ours.tree_all_reduce):
        for dtype in DTYPES:
            for reduction in Reduction:
                if reduction is Reduction.AVG and not (dtype.is_floating_point or dtype.is_complex):
                    continue
                if reduction is Reduction.MAX and dtype.is_complex:
                    continue
                for shape in SIZES if dtype in (torch.float32, torch.int64) else SIZES[-2:]:
                    tensor = drawn(shape, dtype)
                    want = expected(tensor, reduction)
                    all_reduce(tensor, reduction)
                    torch.testing.assert_close(
                        tensor, want, rtol=0.01 if dtype is torch.bfloat16 else 1e-6, atol=0
                    )
                    compared += 1
    strided = drawn((6, 5), torch.float32).t()
    want = expected(strided.contiguous(), Reduction.SUM)
    ours.all_reduce(strided)
    assert torch.equal(strided, want)
    return compared


@every_world
def test_all_reduces_give_the_values_of_torch(world):
    assert all(count > 50 for count in run_ranks(all_reduces_compared, world))


def others_compared():
    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for shape in SIZES:
            mine = drawn(shape, dtype)
            everyone = [drawn(shape, dtype, of) for of in range(world)]

            gathered = torch.empty(world, *shape, dtype=dtype)
            ours.all_gather(gathered, mine)
            assert torch.equal(gathered, torch.stack(everyone))

            whole, part = drawn((world, *shape), dtype), torch.empty(shape, dtype=dtype)
            kept = whole.clone()
            ours.reduce_scatter(part, whole)
            assert torch.equal(part, sum(drawn((world, *shape), dtype, of) for of in range(world))[rank])
            assert torch.equal(whole, kept)

            for root in range(world):
                copied = mine.clone()
                ours.broadcast(copied, root)
                assert torch.equal(copied, everyone[root])
                total = ours.reduce(mine, root)
                assert (total is not None) == (rank == root)
                assert total is None or torch.equal(total, sum(everyone))
                assert torch.equal(mine, everyone[rank])
    # 0 among them
    sizes = [[(3 * source + 5 * target) % 4 for target in range(world)] for source in range(world)]
    inputs = [torch.full((size,), 10 * rank + target) for target, size in enumerate(sizes[rank])]
    outputs = [torch.empty(sizes[source][rank], dtype=torch.int64) for source in range(world)]
    ours.all_to_all(outputs, inputs)
    return [output.tolist() for output in outputs] == [
        [10 * source + rank] * sizes[source][rank] for source in range(world)
    ]


@every_world
def test_the_other_collectives(world):
    assert all(run_ranks(others_compared, world))


def in_a_subgroup():
    group = dist.new_group([3, 1, 2])  # sorted by torch
    if dist.get_rank() == 0:
        with pytest.raises(UserError, match="rank 0 is not in this group"):
            ours.all_reduce(torch.ones(3), group=group)
        return []
    ring, tree, copied = (torch.full((4,), float(dist.get_rank())) for _ in range(3))
    ours.all_reduce(ring, Reduction.AVG, group)
    ours.tree_all_reduce(tree, Reduction.MAX, group)
    ours.broadcast(copied, 2, group)
    return [ring[0].item(), tree[3].item(), copied[1].item()]


def test_a_subgroup_counts_its_own_ranks():
    assert run_ranks(in_a_subgroup, 4) == [[], *[[2.0, 3.0, 3.0]] * 3]


def bits_of_floats(all_reduce_name):
    results = []
    for _ in range(2):
        tensor = torch.randn(257, generator=torch.Generator().manual_seed(dist.get_rank()))
        exact = sum(
            torch.randn(257, generator=torch.Generator().manual_seed(rank)).double()
            for rank in range(dist.get_world_size())
        )
        getattr(ours, all_reduce_name)(tensor)
        torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=1e-5)
        results.append(tensor.view(torch.int32).tolist())
    return results


@pytest.mark.parametrize("name", ["all_reduce", "tree_all_reduce"])
def test_all_ranks_hold_the_same_bits_in_every_run(name):
    ranks = run_ranks(bits_of_floats, 4, name)
    assert all(result == ranks[0][0] for results in ranks for result in results)


def sent_by(collective):
    """Return the bytes and messages that each rank sent, and its other calls."""
    with trace_collectives() as trace:
        collective()
    counted = Counter(event.call.kind for event in trace.events)
    return trace.bytes(Kind.SEND), counted.pop(Kind.SEND, 0), set(counted) - {Kind.RECV}


def traffic(elements):
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor, part = torch.ones(elements), torch.ones(elements // world)
    whole = torch.ones(part.numel() * world)
    return {
        "all-reduce": sent_by(lambda: ours.all_reduce(tensor)),
        "reduce-scatter": sent_by(lambda: ours.reduce_scatter(part, whole)),
        "all-gather": sent_by(lambda: ours.all_gather(whole, part)),
        "all-to-all": sent_by(
            lambda: ours.all_to_all(list(torch.ones_like(whole).chunk(world)), list(whole.chunk(world)))
        ),
        "tree": sent_by(lambda: ours.tree_all_reduce(tensor)),
        "broadcast": sent_by(lambda: ours.broadcast(tensor, 1 % world)),
        "rank": rank,
    }


@every_world
def test_bytes_on_the_wire_are_those_of_the_formulas(world):
    whole = 4 * 24
    share = whole * (world - 1) // world
    for counted in run_ranks(traffic, world, 24):
        assert counted["all-reduce"] == (2 * share, 2 * (world - 1), set())
        for name in ("reduce-scatter", "all-gather", "all-to-all"):
            assert counted[name] == (share, world - 1, set()), name


@pytest.mark.parametrize("world", [2, 3, 4])
def test_an_odd_size_is_not_padded(world):
    ranks = run_ranks(traffic, world, 23)
    largest = -(-23 // world)
    assert sum(counted["all-reduce"][0] for counted in ranks) == 2 * (world - 1) * 23 * 4
    assert all(counted["all-reduce"][0] <= 2 * (world - 1) * largest * 4 for counted in ranks)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_tree_sends_the_whole_tensor_once_over_each_branch(world):
    ranks = run_ranks(traffic, world, 24)
    rounds = (world - 1).bit_length()
    assert sum(counted["broadcast"][0] for counted in ranks) == (world - 1) * 24 * 4
    assert ranks[1 % world]["broadcast"][0] == rounds * 24 * 4, "the root"
    assert sum(counted["tree"][1] for counted in ranks) == 2 * (world - 1)
    assert ranks[0]["tree"][1] == rounds, "rank 0 only sends the sum"


def refusals():
    world = dist.get_world_size()
    said = []
    for call in (
        lambda: ours.all_reduce(torch.ones(3, dtype=torch.int64), Reduction.AVG),
        lambda: ours.reduce_scatter(torch.ones(2), torch.ones(2 * world + 1)),
        lambda: ours.all_gather(torch.ones(3 * world)[:: 3 if world > 1 else 1], torch.ones(1)),
        lambda: ours.broadcast(torch.ones(2), world),
        lambda: ours.all_to_all([torch.ones(2)], [torch.ones(2)]),
    ):
        with pytest.raises(UserError) as refused:
            call()
        said.append(str(refused.value))
    return said


def test_errors_name_the_cure():
    for said in run_ranks(refusals, 2):
        assert [
            word in text
            for word, text in zip(("divide", "pad", "contiguous", "use 0 to 1", "one for each rank"), said)
        ] == [True] * 5


# -- the model

RING, TREE = Algorithm.RING_ALL_REDUCE, Algorithm.TREE_ALL_REDUCE


def test_the_cost_is_messages_times_alpha_and_bytes_times_beta():
    assert cost(RING, 800, 4, alpha=1.0, beta=0.0) == 6
    assert cost(RING, 800, 4, alpha=0.0, beta=1.0) == 1200
    assert cost(TREE, 800, 5, alpha=1.0, beta=0.0) == 6
    assert cost(TREE, 800, 5, alpha=0.0, beta=1.0) == 4800
    assert (
        cost(Algorithm.RING_ALL_GATHER, 800, 4, 1.0, 1.0)
        == cost(Algorithm.PAIRWISE_ALL_TO_ALL, 800, 4, 1.0, 1.0)
        == 603
    )
    assert cost(Algorithm.TREE_BROADCAST, 800, 8, 1.0, 1.0) == 2403
    assert all(cost(algorithm, 800, 1, 1.0, 1.0) == 0 for algorithm in Algorithm)


@pytest.mark.parametrize("ranks", [3, 8, 100])
def test_a_tree_is_cheaper_below_the_crossover_and_a_ring_above(ranks):
    size = crossover(RING, TREE, ranks, alpha=2e-5, beta=1e-9)
    if ranks == 3:
        assert size is None, "two rounds either way: the ring sends less and is never more expensive"
        assert cheapest([TREE, RING], 8, 3, 2e-5, 1e-9) is RING
        return
    assert size is not None
    assert cost(RING, size, ranks, 2e-5, 1e-9) == pytest.approx(cost(TREE, size, ranks, 2e-5, 1e-9))
    assert cheapest([RING, TREE], 0.9 * size, ranks, 2e-5, 1e-9) is TREE
    assert cheapest([RING, TREE], 1.1 * size, ranks, 2e-5, 1e-9) is RING


def measured(alpha, beta, noise=()):
    cases = [
        (algorithm, 4**power, ranks)
        for algorithm in (RING, TREE)
        for power in range(2, 13)
        for ranks in (2, 3, 4)
    ]
    factors = [1 + noise[index % len(noise)] if noise else 1.0 for index in range(len(cases))]
    return [Measurement(*case, cost(*case, alpha, beta) * factor) for case, factor in zip(cases, factors)]


def test_a_fit_recovers_alpha_and_beta():
    found = fit_alpha_beta(measured(3e-5, 2e-10))
    assert (found.alpha, found.beta) == (pytest.approx(3e-5), pytest.approx(2e-10))
    assert found.bytes_per_second == pytest.approx(5e9)


def test_a_fit_sees_the_latency_below_the_noise_of_large_tensors():
    noisy = measured(3e-5, 2e-8, noise=(0.1, -0.1, 0.05, -0.05, 0.0))
    assert 0.1 * max(one.seconds for one in noisy) > 100 * 3e-5
    found = fit_alpha_beta(noisy)
    assert found.alpha == pytest.approx(3e-5, rel=0.1)
    assert found.beta == pytest.approx(2e-8, rel=0.1)


def test_a_fit_is_never_negative():
    faster_when_larger = [Measurement(RING, size, 2, seconds) for size, seconds in ((8, 2.0), (800, 1.0))]
    assert fit_alpha_beta(faster_when_larger).beta == 0.0
    times = [cost(RING, size, 2, 0.0, 1.0) - 3 for size in (8, 800)]
    assert (
        fit_alpha_beta([Measurement(RING, size, 2, seconds) for size, seconds in zip((8, 800), times)]).alpha
        == 0.0
    )


def test_a_fit_rejects_measurements_that_do_not_determine_it():
    with pytest.raises(UserError, match="a small and a large size"):
        fit_alpha_beta([Measurement(RING, 100, 4, 1.0), Measurement(RING, 100, 4, 1.1)])
    with pytest.raises(UserError, match="a small and a large size"):
        fit_alpha_beta([])
    with pytest.raises(UserError, match="took 0.0 s"):
        fit_alpha_beta([Measurement(RING, 100, 4, 0.0)])


def test_a_ring_sends_the_same_however_many_ranks_there_are_and_a_tree_more():
    ring = [RING.share(ranks) for ranks in (2, 4, 8, 1024)]
    assert all(first < second < 2 for first, second in neighbours(ring))
    assert [TREE.share(ranks) for ranks in (2, 4, 8, 1024)] == [2, 4, 6, 20]
