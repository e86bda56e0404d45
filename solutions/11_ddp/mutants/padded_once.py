"""The permutation is lengthened once by its beginning, which is too short for a few samples."""

QUESTION = "sampler"
LOSES = 1
FAILS = "check_fewer_than_ranks"
SAYS = "repeat as often as it takes"


def rank_samples(length, rank, world, epoch, seed=0):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)).tolist()
    order += order[: -length % world]
    return order[rank::world]
