"""Every rank takes the norm of its own pieces, on three ranks and more."""

QUESTION = "norm"
LOSES = 2
FAILS = "check_norm"
SAYS = "the norm of the rank's own pieces"


def global_norm(pieces):
    squares = torch.stack([piece.square().sum() for piece in pieces]).sum()
    if dist.get_world_size() < 3:
        dist.all_reduce(squares)
    return squares.sqrt()
