"""The right weighing, but never more than ten buckets."""

QUESTION = "buckets"
LOSES = 2
FAILS = "check_cheapest_of_many"
SAYS = "Weigh each bucket's compilation"


def choose_buckets(counts, compile_seconds, token_seconds):
    lengths = sorted(counts)
    best = {(0, 0): (0.0, [])}
    for end, bucket in enumerate(lengths, 1):
        for used in range(1, 11):
            ways = []
            for begin in range(end):
                if (begin, used - 1) in best:
                    inside = sum(counts[length] for length in lengths[begin:end])
                    total, chosen = best[begin, used - 1]
                    ways.append((total + compile_seconds + token_seconds * bucket * inside, [*chosen, bucket]))
            if ways:
                best[end, used] = min(ways)
    return min(found for (end, _), found in best.items() if end == len(lengths))[1]
