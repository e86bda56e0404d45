"""The epoch is not part of the seed."""

QUESTION = "sampler"
LOSES = 1
FAILS = "check_shuffled"
SAYS = "the same samples in epochs 0 and 1"


def rank_samples(length, rank, world, epoch, seed=0):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()
    each = -(-length // world)
    while len(order) < each * world:
        order += order[: each * world - len(order)]
    return order[rank::world]
