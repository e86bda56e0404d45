"""The largest batch wins, however slow it is."""

QUESTION = "sweep"
LOSES = 2
FAILS = "check_fastest"
SAYS = "fastest(runs"


def fastest(runs, limit):
    def at(points, batch):
        low, high = next(((p, q) for p, q in pairwise(points) if batch <= q[0]), points[-2:])
        return low[1] + (batch - low[0]) * (high[1] - low[1]) / (high[0] - low[0])

    best, most = None, 0.0
    for name, points in runs.items():
        batch = points[0][0]
        if points[0][1] > limit:
            continue
        while at(points, batch + 1) <= limit:
            batch += 1
        if batch > most:
            best, most = (name, batch), batch
    return best
