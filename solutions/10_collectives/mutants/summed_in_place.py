"""Partial sums are built in the argument."""

QUESTION = "scatter"
LOSES = 1
FAILS = "check_scatter_input"
SAYS = "the argument"


def ring_reduce_scatter(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(world)
    for step in range(world - 1):
        share = chunks[(rank - step - 2) % world]
        arriving = torch.empty_like(share)
        exchange(chunks[(rank - step - 1) % world], (rank + 1) % world, arriving, (rank - 1) % world)
        share += arriving
    return chunks[rank].clone()
