"""A rank without rows has (rank * rows, length)."""

QUESTION = "rows"
LOSES = 1
FAILS = "check_ranks_without_rows"
SAYS = "a rank without rows"


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    rows = -(-length // world)
    return rank * rows, min((rank + 1) * rows, length)


def shard_views(row: torch.Tensor, shapes: list[tuple[int, ...]], rank: int, world: int) -> list[torch.Tensor]:
    views, offset = [], 0
    for shape in shapes:
        length, inner = math.prod(shape[:1]), math.prod(shape[1:])
        start, stop = own_rows(length, rank, world)
        start = min(start, stop)
        views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:]))
        offset += -(-length // world) * inner
    return views
