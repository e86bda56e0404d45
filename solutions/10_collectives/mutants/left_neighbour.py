"""A ring that goes the other way round."""

QUESTION = "scatter"
LOSES = 2
FAILS = "check_scatter_ring"
SAYS = "only to its right neighbour"


def ring_reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    partial = chunks[(rank + 1) % world].clone()
    for step in range(world - 1):
        share = chunks[(rank + step + 2) % world]
        arriving = torch.empty_like(share)
        exchange(partial, (rank - 1) % world, arriving, (rank + 1) % world)
        partial = arriving.add_(share)
    return partial
