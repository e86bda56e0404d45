"""One sequence is taken to fit always."""

QUESTION = "sweep"
LOSES = 2
FAILS = "check_does_not_fit"
SAYS = "is None"


def fastest(runs, limit):
    def at(points, batch, column):
        low, high = next(((p, q) for p, q in pairwise(points) if batch <= q[0]), points[-2:])
        return low[column] + (batch - low[0]) * (high[column] - low[column]) / (high[0] - low[0])

    best, most = None, 0.0
    for name, points in runs.items():
        batch = points[0][0]
        while at(points, batch + 1, 1) <= limit:
            batch += 1
        rate = batch / at(points, batch, 2)
        if rate > most:
            best, most = (name, batch), rate
    return best
