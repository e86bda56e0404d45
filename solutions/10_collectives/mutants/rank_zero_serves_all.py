"""All chunks go to rank 0, which sends the whole to everyone."""

QUESTION = "gather"
LOSES = 2
FAILS = "check_gather_traffic"
SAYS = "no rank serves all others"


def ring_all_gather(chunk, size):
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = chunk.new_empty(size)
    chunks = whole.tensor_split(world)
    chunks[rank].copy_(chunk)
    for other in range(1, world):
        if rank == 0:
            dist.recv(chunks[other], other)
        elif rank == other:
            dist.send(chunk, 0)
    for other in range(1, world):
        if rank == 0:
            dist.send(whole, other)
        elif rank == other:
            dist.recv(whole, 0)
    return whole
