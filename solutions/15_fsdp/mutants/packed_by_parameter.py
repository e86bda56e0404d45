"""The rows of all ranks of the first parameter come first."""

QUESTION = "pack"
LOSES = 2
FAILS = "check_pack"
SAYS = "sorted by parameter first"


def pack(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        size = -(-math.prod(tensor.shape[:1]) // world) * math.prod(tensor.shape[1:])
        parts.append(F.pad(tensor.reshape(-1), (0, world * size - tensor.numel())).view(world, size))
    return torch.cat([part.reshape(-1) for part in parts]).view(world, -1)


def unpack(packed: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    tensors, offset = [], 0
    for shape in shapes:
        size = -(-math.prod(shape[:1]) // len(packed)) * math.prod(shape[1:])
        tensors.append(packed[:, offset : offset + size].reshape(-1)[: math.prod(shape)].view(shape))
        offset += size
    return tensors
