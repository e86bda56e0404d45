"""The root sends to everyone itself."""

QUESTION = "broadcast"
LOSES = 2
FAILS = "check_broadcast_rounds"
SAYS = "the root of four sends twice"


def tree_broadcast(tensor, root):
    data = tensor.contiguous()
    if dist.get_rank() == root:
        for other in range(dist.get_world_size()):
            if other != root:
                dist.send(data, other)
    else:
        dist.recv(data, root)
    tensor.copy_(data)
