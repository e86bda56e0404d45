"""The first ranks get one row more, as numpy.array_split cuts."""

QUESTION = "rows"
LOSES = 2
FAILS = "check_own_rows"
SAYS = "the rows of rank"


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    rows, more = divmod(length, world)
    if rows == 0:
        return min(rank, length), min(rank + 1, length)
    start = rank * rows + min(rank, more)
    return start, start + rows + (rank < more)


def shard_views(row: torch.Tensor, shapes: list[tuple[int, ...]], rank: int, world: int) -> list[torch.Tensor]:
    views, offset = [], 0
    for shape in shapes:
        length, inner = math.prod(shape[:1]), math.prod(shape[1:])
        rows = -(-length // world)
        start, stop = min(rank * rows, length), min((rank + 1) * rows, length)
        views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:]))
        offset += -(-length // world) * inner
    return views
