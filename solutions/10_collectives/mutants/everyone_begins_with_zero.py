"""All ranks send to rank 0 first, then to rank 1, and so on."""

QUESTION = "everyone"
LOSES = 1
FAILS = "check_everyone_steps"
SAYS = "is swamped"


def everyone_to_everyone(parts, sizes):
    rank, world = dist.get_rank(), dist.get_world_size()
    received = [parts[0].new_empty(size) for size in sizes]
    received[rank].copy_(parts[rank])
    others = [other for other in range(world) if other != rank]
    works = [dist.irecv(received[other], other) for other in others]
    works += [dist.isend(parts[other], other) for other in others]
    for work in works:
        work.wait()
    return received
