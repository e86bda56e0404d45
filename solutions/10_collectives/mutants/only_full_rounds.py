"""The ranks beyond the last power of two are not added."""

QUESTION = "reduce"
LOSES = 1
FAILS = "check_reduce_three"
SAYS = "the sum on rank 0 of"


def tree_reduce(tensor):
    rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
    while 2 * distance <= world:
        distance *= 2
    if rank >= distance:
        return None
    total, arriving = tensor.clone(), torch.empty_like(tensor)
    while distance > 1:
        distance //= 2
        if rank >= distance:
            dist.send(total, rank - distance)
            return None
        dist.recv(arriving, rank + distance)
        total += arriving
    return total
