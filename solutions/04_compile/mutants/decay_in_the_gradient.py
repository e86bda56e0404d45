"""Adam with L2: the decay goes through the moments."""

QUESTION = "optimizer"
LOSES = 2
FAILS = "check_adamw_values"
SAYS = "weight decay shrinks the parameter itself"


def adamw(parameter, gradient, first, second, step, lr):
    gradient = gradient + DECAY * parameter
    first = BETA1 * first + (1 - BETA1) * gradient
    second = BETA2 * second + (1 - BETA2) * gradient * gradient
    denominator = (second / (1 - BETA2**step)).sqrt() + EPS
    return parameter - lr * first / (1 - BETA1**step) / denominator, first, second
