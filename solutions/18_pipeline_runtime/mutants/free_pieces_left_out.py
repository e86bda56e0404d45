"""Pieces that cost nothing are left out, and with them the embedding."""

QUESTION = "partition"
LOSES = 2
FAILS = "check_balanced"
SAYS = "the first is 0"


def stage_starts(costs, stages):
    places = [at for at, cost in enumerate(costs) if cost > 0]
    costs = [costs[at] for at in places]
    upto = [0.0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    best = {0: (0.0, [])}
    for stage in range(stages):
        best = {
            end: min((max(best[start][0], upto[end] - upto[start]), [*best[start][1], start]) for start in best if start < end)
            for end in range(stage + 1, len(costs) + 1)
        }
    return [places[start] for start in best[len(costs)][1]]
