"""The rows of each expert: shapes that depend on values."""

QUESTION = "route"
LOSES = 3
FAILS = "check_route"
SAYS = "At a break within a loop"


def route(tokens, experts, choice):
    out = tokens.new_zeros(len(tokens), experts.shape[2])
    for expert in range(len(experts)):
        rows = (choice == expert).nonzero().flatten()
        out[rows] = tokens[rows] @ experts[expert]
    return out
