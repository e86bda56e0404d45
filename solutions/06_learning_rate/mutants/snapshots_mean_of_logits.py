"""The logits are averaged."""

QUESTION = "snapshots"
LOSES = 2
FAILS = "check_ensemble"
SAYS = "outvote"


def snapshot_steps(steps, snapshots):
    length = math.ceil(steps / snapshots)
    return [min(end, steps) for end in range(length, steps + length, length)]


def ensemble(logits):
    return logits.mean(0).softmax(-1)
