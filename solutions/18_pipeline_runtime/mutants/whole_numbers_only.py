"""The limit of a stage is searched among whole numbers: right for FLOPs, not for seconds."""

QUESTION = "partition"
LOSES = 2
FAILS = "check_measured_costs"
SAYS = "fractions of a second"


def stage_starts(costs, stages):
    def filled(limit):
        starts, held = [0], 0.0
        for at, cost in enumerate(costs):
            too_few_left = len(costs) - at <= stages - len(starts) and at > starts[-1]
            if (held + cost > limit and at > starts[-1]) or too_few_left:
                starts.append(at)
                held = 0.0
            held += cost
        return starts

    limit = int(-(-max(costs) // 1))
    while len(filled(limit)) > stages:
        limit += 1
    return filled(limit)
