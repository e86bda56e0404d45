"""Each tensor has a gather of its own, of everything."""

QUESTION = "flat"
LOSES = 2
FAILS = "check_flat_whole"
SAYS = "one all-gather of"


def flat_shard(tensors: list[torch.Tensor], rank: int, world: int) -> torch.Tensor:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    size = -(-flat.numel() // world)
    return F.pad(flat, (0, size * world - flat.numel()))[rank * size : (rank + 1) * size].clone()


def flat_whole(shard: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    flat = shard.new_empty(shard.numel() * dist.get_world_size())
    for _ in shapes:
        dist.all_gather_into_tensor(flat, shard)
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes)]
