"""Whole tensors go round the ring: the right sum everywhere, for N / 2 times the bytes."""

QUESTION = "ring"
LOSES = 4
FAILS = "check_all_reduce"
SAYS = "too many bytes"


def ring_all_reduce(tensor):
    rank, world = dist.get_rank(), dist.get_world_size()
    passing = tensor.contiguous()
    total = passing.clone()
    for _ in range(world - 1):
        arriving = torch.empty_like(passing)
        exchange(passing, (rank + 1) % world, arriving, (rank - 1) % world)
        total += arriving
        passing = arriving
    return total
