"""Everyone sends to rank 0."""

QUESTION = "reduce"
LOSES = 2
FAILS = "check_reduce_rounds"
SAYS = "rank 0 of four receives twice"


def tree_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(tensor, 0)
        return None
    total, arriving = tensor.clone(), torch.empty_like(tensor)
    for other in range(1, world):
        dist.recv(arriving, other)
        total += arriving
    return total
