"""Whole tensors go round the ring, and each rank adds up all of them: N times the bytes of a reduce-scatter."""

QUESTION = "scatter"
LOSES = 2
FAILS = "check_scatter_traffic"
SAYS = "two of three chunks"


def ring_reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor.clone()
    for _ in range(world - 1):
        arriving = torch.empty_like(tensor)
        exchange(passing, (rank + 1) % world, arriving, (rank - 1) % world)
        total += arriving
        passing = arriving
    return total.tensor_split(world)[rank].clone()
