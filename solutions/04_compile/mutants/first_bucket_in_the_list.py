"""The first bucket of the list that is larger, though the list has no order, and equal is enough."""

QUESTION = "pad"
LOSES = 1
FAILS = "check_pad_edges"
SAYS = "pad_to_bucket of length"


def pad_to_bucket(tokens, targets, buckets):
    length = tokens.shape[1]
    missing = next(bucket for bucket in buckets if bucket >= length) - length
    return F.pad(tokens, (0, missing)), F.pad(targets, (0, missing), value=-100)
