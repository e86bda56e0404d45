"""The delay is counted from the version after the step."""

QUESTION = "delayed"
LOSES = 2
FAILS = "check_delay"
SAYS = "one version too new"


def delayed_training(weights, gradients_of, lr, delays, steps):
    versions = [weights]
    for t in range(steps):
        old = [versions[min(t, max(0, t + 1 - delay))][stage] for stage, delay in enumerate(delays)]
        versions.append([weight - lr * grad for weight, grad in zip(versions[-1], gradients_of(old, t))])
    return versions[-1]
