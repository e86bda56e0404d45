"""Chunks are padded to one size, and the padding stays between them."""

QUESTION = "gather"
LOSES = 1
FAILS = "check_gather_odd"
SAYS = "does not divide"


def ring_all_gather(chunk, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    padded = -(-size // world)
    chunks = chunk.new_zeros(world, padded)
    chunks[rank, : chunk.numel()] = chunk
    for step in range(world - 1):
        exchange(chunks[(rank - step) % world], (rank + 1) % world, chunks[(rank - step - 1) % world], (rank - 1) % world)
    return chunks.reshape(-1)[:size].clone()
