"""The samples that cannot be divided are left out."""

QUESTION = "sampler"
LOSES = 2
FAILS = "check_everyone_once"
SAYS = "nobody sees"


def rank_samples(length, rank, world, epoch, seed=0):
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    each = max(1, length // world)
    order = (order * world)[: max(each * world, length)]
    return order[rank * each : (rank + 1) * each]
