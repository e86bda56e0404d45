"""The chunk returned is a view of a copy of the whole tensor, which stays in memory with it."""

QUESTION = "scatter"
LOSES = 1
FAILS = "check_scatter_memory"
SAYS = "a view of a whole tensor"


def ring_reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.clone().tensor_split(world)
    for step in range(world - 1):
        share = chunks[(rank - step - 2) % world]
        arriving = torch.empty_like(share)
        exchange(chunks[(rank - step - 1) % world], (rank + 1) % world, arriving, (rank - 1) % world)
        share += arriving
    return chunks[rank]
