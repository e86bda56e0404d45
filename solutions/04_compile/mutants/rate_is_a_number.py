"""Learning rate and step become Python numbers."""

QUESTION = "optimizer"
LOSES = 3
FAILS = "check_adamw_graph"
SAYS = "was decided once and for all"


def adamw(parameter, gradient, first, second, step, lr):
    step, lr = step.item(), lr.item()
    first = BETA1 * first + (1 - BETA1) * gradient
    second = BETA2 * second + (1 - BETA2) * gradient * gradient
    denominator = (second / (1 - BETA2**step)).sqrt() + EPS
    return parameter * (1 - lr * DECAY) - lr * first / (1 - BETA1**step) / denominator, first, second
