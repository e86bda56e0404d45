"""Every gradient is taken at the newest weights."""

QUESTION = "delayed"
LOSES = 2
FAILS = "check_delay"
SAYS = "synchronous training"


def delayed_training(weights, gradients_of, lr, delays, steps):
    versions = [weights]
    for t in range(steps):
        old = [versions[-1][stage] for stage, delay in enumerate(delays)]
        versions.append([weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, t))])
    return versions[-1]
