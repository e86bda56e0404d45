"""Partners rank XOR 1, 2, 3: on a power of two all meet, on three ranks some do not."""

QUESTION = "everyone"
LOSES = 1
FAILS = "check_everyone_three"
SAYS = "of an odd number of ranks"


def everyone_to_everyone(parts, sizes):
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [parts[0].new_zeros(size) for size in sizes]
    received[rank].copy_(parts[rank])
    for bits in range(1, world):
        partner = rank ^ bits
        if partner < world:
            exchange(parts[partner], partner, received[partner], partner)
    return received
