"""No tensor has fewer numbers than there are ranks."""

QUESTION = "pieces"
LOSES = 1
FAILS = "check_few_numbers"
SAYS = "does not come back whole"


def piece_of(tensor, rank, world):
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.detach().flatten(), (0, size * world - tensor.numel()))
    return padded[rank * size : (rank + 1) * size].clone()


def whole(piece, shape):
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    numel = max(torch.Size(shape).numel(), dist.get_world_size())
    return padded[:numel].view(shape) if numel == torch.Size(shape).numel() else padded[:numel]
