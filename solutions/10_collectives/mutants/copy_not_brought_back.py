"""Where the tensor is not contiguous, a copy of it is filled."""

QUESTION = "broadcast"
LOSES = 1
FAILS = "check_broadcast_strides"
SAYS = "only a copy"


def tree_broadcast(tensor, root):
    rank, world, distance = dist.get_rank(), dist.get_world_size(), 1
    place = (rank - root) % world
    data = tensor.contiguous()
    while distance < world:
        if place < distance and place + distance < world:
            dist.send(data, (rank + distance) % world)
        elif distance <= place < 2 * distance:
            dist.recv(data, (rank - distance) % world)
        distance *= 2
