"""The seed is set for everybody."""

QUESTION = "sampler"
LOSES = 1
FAILS = "check_own_generator"
SAYS = "a torch.Generator of your own"


def rank_samples(length, rank, world, epoch, seed=0):
    torch.manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(length).tolist()
    each = -(-length // world)
    while len(order) < each * world:
        order += order[: each * world - len(order)]
    return order[rank::world]
