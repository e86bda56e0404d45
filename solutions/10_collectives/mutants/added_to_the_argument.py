"""The argument is where the partial sum is built."""

QUESTION = "reduce"
LOSES = 1
FAILS = "check_reduce_argument"
SAYS = "the argument of rank"


def tree_reduce(tensor):
    rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
    arriving = torch.empty_like(tensor)
    while distance < world:
        if rank % (2 * distance) == distance:
            dist.send(tensor, rank - distance)
            return None
        if rank + distance < world:
            dist.recv(arriving, rank + distance)
            tensor += arriving
        distance *= 2
    return tensor
