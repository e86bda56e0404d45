"""A piece that is a slice: it keeps the whole tensor in memory."""

QUESTION = "pieces"
LOSES = 1
FAILS = "check_copy"
SAYS = "a slice is a *view*"


def piece_of(tensor, rank, world):
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.detach().flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size]


def whole(piece, shape):
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    return padded[: torch.Size(shape).numel()].view(shape)
