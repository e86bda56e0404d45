"""The packed rows are taken for one flat buffer."""

QUESTION = "pack"
LOSES = 2
FAILS = "check_unpack"
SAYS = "unpacked from"


def pack(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        size = -(-math.prod(tensor.shape[:1]) // world) * math.prod(tensor.shape[1:])
        parts.append(F.pad(tensor.reshape(-1), (0, world * size - tensor.numel())).view(world, size))
    return torch.cat(parts, dim=1)


def unpack(packed: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    tensors, offset = [], 0
    for shape in shapes:
        size = -(-math.prod(shape[:1]) // len(packed)) * math.prod(shape[1:])
        start = offset * len(packed)
        tensors.append(packed.reshape(-1)[start : start + size * len(packed)][: math.prod(shape)].view(shape))
        offset += size
    return tensors
