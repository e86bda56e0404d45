"""The obvious way: everyone sends to rank 0, which sends the sum back."""

QUESTION = "ring"
LOSES = 4
FAILS = "check_all_reduce"
SAYS = "everything is gathered on rank 0"


def ring_all_reduce(tensor):
    total, rank, world = tensor.clone(memory_format=torch.contiguous_format), dist.get_rank(), dist.get_world_size()
    if rank == 0:
        arriving = torch.empty_like(total)
        for other in range(1, world):
            dist.recv(arriving, other)
            total += arriving
        for other in range(1, world):
            dist.send(total, other)
    else:
        dist.send(total, 0)
        dist.recv(total, 0)
    return total
