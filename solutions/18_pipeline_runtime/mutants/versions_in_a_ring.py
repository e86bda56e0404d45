"""A negative version goes round to the newest one."""

QUESTION = "delayed"
LOSES = 2
FAILS = "check_delay"
SAYS = "there is only version 0"


def delayed_training(weights, gradients_of, lr, delays, steps):
    versions = [weights]
    for t in range(steps):
        old = [versions[(t - delay) % len(versions)][stage] for stage, delay in enumerate(delays)]
        versions.append([weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, t))])
    return versions[-1]
