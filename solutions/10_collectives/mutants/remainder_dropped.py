"""N chunks of equal size: what N does not divide is lost."""

QUESTION = "scatter"
LOSES = 1
FAILS = "check_scatter_odd"
SAYS = "does not divide"


def ring_reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    size = tensor.numel() // world
    chunks = tensor[: size * world].view(world, size)
    partial = chunks[rank - 1].clone()
    for step in range(world - 1):
        share = chunks[(rank - step - 2) % world]
        arriving = torch.empty_like(share)
        exchange(partial, (rank + 1) % world, arriving, (rank - 1) % world)
        partial = arriving.add_(share)
    return partial
