"""Buckets are filled in the order of forward."""

QUESTION = "buckets"
LOSES = 1
FAILS = "check_order"
SAYS = "the gradient of the last parameter arrives first"


def assign_buckets(nbytes, limit):
    buckets, held = [], 0
    for i, size in enumerate(nbytes):
        if not buckets or held + size > limit:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += size
    return buckets
