"""A gradient that fills a bucket exactly begins a new one."""

QUESTION = "buckets"
LOSES = 1
FAILS = "check_exact_fit"
SAYS = "still belong into the bucket"


def assign_buckets(nbytes, limit):
    buckets, held = [], 0
    for i in reversed(range(len(nbytes))):
        if not buckets or (held and held + nbytes[i] >= limit):
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
