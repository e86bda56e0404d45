"""Recursive doubling with partners rank XOR 1, 2, 4: with three ranks some partners do not exist, and their shares are missing."""

QUESTION = "ring"
LOSES = 4
FAILS = "check_all_reduce"
SAYS = "is right on rank"


def ring_all_reduce(tensor):
    rank, world, bit = dist.get_rank(), dist.get_world_size(), 1
    total = tensor.clone(memory_format=torch.contiguous_format)
    while bit < world:
        partner = rank ^ bit
        if partner < world:
            arriving = torch.empty_like(total)
            exchange(total.clone(), partner, arriving, partner)
            total += arriving
        bit *= 2
    return total
