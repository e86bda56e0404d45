"""All parts go round to everyone, and each rank picks its own."""

QUESTION = "everyone"
LOSES = 2
FAILS = "check_straight"
SAYS = "one message to each other rank"


def everyone_to_everyone(parts, sizes):
    rank, world = dist.get_rank(), dist.get_world_size()
    lengths = torch.tensor([len(part) for part in parts])
    passing, received = torch.cat(parts), {rank: parts[rank]}
    for step in range(1, world):
        source = (rank - step) % world
        their_lengths = torch.empty_like(lengths)
        exchange(lengths, (rank + 1) % world, their_lengths, (rank - 1) % world)
        arriving = passing.new_empty(int(their_lengths.sum()))
        exchange(passing, (rank + 1) % world, arriving, (rank - 1) % world)
        lengths, passing = their_lengths, arriving
        received[source] = arriving.split(lengths.tolist())[rank].clone()
    return [received[source] for source in range(world)]
