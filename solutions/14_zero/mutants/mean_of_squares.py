"""The mean square of each piece times its size, and 0 / 0 for an empty one."""

QUESTION = "norm"
LOSES = 1
FAILS = "check_empty_pieces"
SAYS = "the norm where one rank has empty pieces"


def global_norm(pieces):
    squares = torch.stack([piece.square().mean() * piece.numel() for piece in pieces]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()
