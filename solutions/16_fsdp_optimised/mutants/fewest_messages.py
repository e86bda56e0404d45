"""The units are chosen by their number: the fewer the better."""

QUESTION = "wrapping"
LOSES = 2
FAILS = "check_choice"
SAYS = "the forward time of your units"


def forward_time(units, alpha, beta):
    messages = [alpha + beta * size for size, _ in units]
    computing = [seconds for _, seconds in units]
    return messages[0] + sum(map(max, computing, messages[1:])) + computing[-1]


def choose_units(blocks, limit, alpha, beta):
    best, least = [], float("inf")
    for cuts in range(2 ** (len(blocks) - 1)):
        starts = [0, *(i + 1 for i in range(len(blocks) - 1) if cuts >> i & 1), len(blocks)]
        units = [tuple(map(sum, zip(*blocks[a:b]))) for a, b in pairwise(starts)]
        fits = all(sum(size for size, _ in units[k : k + 2]) <= limit for k in range(len(units)))
        if fits and len(units) < least:
            best, least = [b - a for a, b in pairwise(starts)], len(units)
    return best
