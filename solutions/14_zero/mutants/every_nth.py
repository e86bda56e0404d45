"""A rank takes every world-th number."""

QUESTION = "pieces"
LOSES = 1
FAILS = "check_pieces"
SAYS = "all pieces on"


def piece_of(tensor, rank, world):
    size = -(-tensor.numel() // world)
    padded = F.pad(tensor.detach().flatten(), (0, size * world - tensor.numel()))
    return padded[rank::world].clone()


def whole(piece, shape):
    padded = piece.new_empty(piece.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(padded, piece)
    return padded[: torch.Size(shape).numel()].view(shape)
