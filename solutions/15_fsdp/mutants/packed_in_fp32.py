"""What is packed becomes fp32."""

QUESTION = "pack"
LOSES = 1
FAILS = "check_odd_shapes"
SAYS = "expected torch.bfloat16"


def pack(tensors: list[torch.Tensor], world: int) -> torch.Tensor:
    parts = []
    for tensor in tensors:
        size = -(-math.prod(tensor.shape[:1]) // world) * math.prod(tensor.shape[1:])
        parts.append(F.pad(tensor.float().reshape(-1), (0, world * size - tensor.numel())).view(world, size))
    return torch.cat(parts, dim=1)


def unpack(packed: torch.Tensor, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    tensors, offset = [], 0
    for shape in shapes:
        size = -(-math.prod(shape[:1]) // len(packed)) * math.prod(shape[1:])
        tensors.append(packed[:, offset : offset + size].reshape(-1)[: math.prod(shape)].view(shape))
        offset += size
    return tensors
