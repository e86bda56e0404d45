"""The parts are copies: what an optimiser does to them is lost."""

QUESTION = "rows"
LOSES = 2
FAILS = "check_views"
SAYS = "should be views of it, not copies"


def own_rows(length: int, rank: int, world: int) -> tuple[int, int]:
    rows = -(-length // world)
    return min(rank * rows, length), min((rank + 1) * rows, length)


def shard_views(row: torch.Tensor, shapes: list[tuple[int, ...]], rank: int, world: int) -> list[torch.Tensor]:
    views, offset = [], 0
    for shape in shapes:
        length, inner = math.prod(shape[:1]), math.prod(shape[1:])
        start, stop = own_rows(length, rank, world)
        views.append(row[offset : offset + (stop - start) * inner].view(stop - start, *shape[1:]).clone())
        offset += -(-length // world) * inner
    return views
