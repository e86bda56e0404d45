"""log2 N rounded down: the ranks beyond the last power of two go without."""

QUESTION = "broadcast"
LOSES = 1
FAILS = "check_three_ranks"
SAYS = "from root"


def tree_broadcast(tensor, root):
    rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
    place = (rank - root) % world
    data = tensor.contiguous()
    while 2 * distance <= world:
        if place < distance:
            dist.send(data, (rank + distance) % world)
        elif place < 2 * distance:
            dist.recv(data, (rank - distance) % world)
        distance *= 2
    tensor.copy_(data)
