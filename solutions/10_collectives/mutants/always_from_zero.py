"""Ranks are not counted from the root: rank 0's tensor goes to all, whoever the root is."""

QUESTION = "broadcast"
LOSES = 2
FAILS = "check_any_root"
SAYS = "from root"


def tree_broadcast(tensor, root):
    rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
    data = tensor.contiguous()
    while distance < world:
        if rank < distance and rank + distance < world:
            dist.send(data, rank + distance)
        elif distance <= rank < 2 * distance:
            dist.recv(data, rank - distance)
        distance *= 2
    tensor.copy_(data)
