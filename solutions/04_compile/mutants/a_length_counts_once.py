"""The cheapest buckets, if there were one sequence of each length."""

QUESTION = "buckets"
LOSES = 4
FAILS = "check_cheapest"
SAYS = "Weigh each bucket's compilation against the padding it saves"


def choose_buckets(counts, compile_seconds, token_seconds):
    lengths = sorted(counts)
    best = [(0.0, [])]
    for end, bucket in enumerate(lengths, 1):
        ways = []
        for begin in range(end):
            total = best[begin][0] + compile_seconds + token_seconds * bucket * (end - begin)
            ways.append((total, [*best[begin][1], bucket]))
        best.append(min(ways))
    return best[-1][1]
