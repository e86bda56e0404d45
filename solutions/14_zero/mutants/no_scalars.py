"""Cut along the first dimension."""

QUESTION = "pieces"
LOSES = 1
FAILS = "check_scalar"
SAYS = "A single number without dimensions"


def piece_of(tensor, rank, world):
    if tensor.dim() == 0:
        return tensor.detach().view(1).clone()
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.detach().flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()


def whole(piece, shape):
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    return padded[: torch.Size(shape).numel()].view(shape)
