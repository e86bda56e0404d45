"""A stage may have no piece: the slowest one is no slower for it."""

QUESTION = "partition"
LOSES = 1
FAILS = "check_no_empty_stage"
SAYS = "is empty"


def stage_starts(costs, stages):
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    best = {0: (0.0, [])}
    for _ in range(stages):
        best = {
            end: min((max(best[start][0], upto[end] - upto[start]), [*best[start][1], start]) for start in best if start <= end)
            for end in range(0, len(costs) + 1)
        }
    return best[len(costs)][1]
