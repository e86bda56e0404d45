"""A bucket is closed when it has exceeded the limit already."""

QUESTION = "buckets"
LOSES = 1
FAILS = "check_limit"
SAYS = "only a gradient that is larger by itself"


def assign_buckets(nbytes, limit):
    buckets, held = [[]], 0
    for i in reversed(range(len(nbytes))):
        if held >= limit:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
