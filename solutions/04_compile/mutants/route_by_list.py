"""The choice becomes a list of Python numbers."""

QUESTION = "route"
LOSES = 3
FAILS = "check_route"
SAYS = "was decided once and for all"


def route(tokens, experts, choice):
    return torch.stack([token @ experts[expert] for token, expert in zip(tokens, choice.tolist())])
