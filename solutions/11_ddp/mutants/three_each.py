"""Three gradients are enough for a bucket."""

QUESTION = "buckets"
LOSES = 1
FAILS = "check_full"
SAYS = "would have fitted"


def assign_buckets(nbytes, limit):
    buckets, held = [], 0
    for i in reversed(range(len(nbytes))):
        if not buckets or held + nbytes[i] > limit or len(buckets[-1]) == 3:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += nbytes[i]
    return buckets
