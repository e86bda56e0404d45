"""What arrives is laid into the rows of one matrix, as wide as the largest part."""

QUESTION = "everyone"
LOSES = 1
FAILS = "check_unequal_parts"
SAYS = "of parts of unequal sizes"


def everyone_to_everyone(parts, sizes):
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = parts[0].new_zeros(world, max(sizes))
    rows[rank, : sizes[rank]] = parts[rank]
    for distance in range(1, world):
        to, source = (rank + distance) % world, (rank - distance) % world
        exchange(parts[to], to, rows[source, : sizes[source]], source)
    return list(rows)
