"""Every rank draws a permutation of its own."""

QUESTION = "sampler"
LOSES = 2
FAILS = "check_everyone_once"
SAYS = "nobody sees"


def rank_samples(length, rank, world, epoch, seed=0):
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * rank + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    each = -(-length // world)
    while len(order) < each * world:
        order += order[: each * world - len(order)]
    return order[rank::world]
