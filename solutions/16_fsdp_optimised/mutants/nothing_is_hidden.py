"""Messages and computing are added, as without prefetch; the choice is made with the right time."""

QUESTION = "wrapping"
LOSES = 1
FAILS = "check_forward_time"
SAYS = "when nothing overlaps"


def forward_time(units, alpha, beta):
    return sum(alpha + beta * size + seconds for size, seconds in units)


def hidden_time(units, alpha, beta):
    messages = [alpha + beta * size for size, _ in units]
    computing = [seconds for _, seconds in units]
    return messages[0] + sum(map(max, computing, messages[1:])) + computing[-1]


def choose_units(blocks, limit, alpha, beta):
    best, least = [], float("inf")
    for cuts in range(2 ** (len(blocks) - 1)):
        starts = [0, *(i + 1 for i in range(len(blocks) - 1) if cuts >> i & 1), len(blocks)]
        units = [tuple(map(sum, zip(*blocks[a:b]))) for a, b in pairwise(starts)]
        fits = all(sum(size for size, _ in units[k : k + 2]) <= limit for k in range(len(units)))
        if fits and (seconds := hidden_time(units, alpha, beta)) < least:
            best, least = [b - a for a, b in pairwise(starts)], seconds
    return best
