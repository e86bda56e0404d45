"""The zeros come first, so that every piece is shifted."""

QUESTION = "flat"
LOSES = 2
FAILS = "check_flat_shards"
SAYS = "all pieces on"


def flat_shard(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    size = -(-flat.numel() // world)
    return F.pad(flat, (size * world - flat.numel(), 0))[rank * size : (rank + 1) * size].clone()


def flat_whole(shard: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    flat = shard.new_empty(shard.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(flat, shard)
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
