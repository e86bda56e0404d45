"""The cycle's length is rounded down: one snapshot more than asked for."""

QUESTION = "snapshots"
LOSES = 2
FAILS = "check_snapshot_steps"
SAYS = "ceil(steps / snapshots)"


def snapshot_steps(steps, snapshots):
    length = steps // snapshots
    return [min(end, steps) for end in range(length, steps + length, length)]


def ensemble(logits):
    return logits.softmax(-1).mean(0)
