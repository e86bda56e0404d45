"""Each square is sent by itself."""

QUESTION = "norm"
LOSES = 1
FAILS = "check_one_number"
SAYS = "add the squares here"


def global_norm(pieces):
    total = torch.zeros(())
    for piece in pieces:
        square = piece.square().sum()
        dist.all_reduce(square)
        total += square
    return total.sqrt()
