"""The model learns that token 0 follows."""

QUESTION = "pad"
LOSES = 2
FAILS = "check_pad"
SAYS = "has the target -100"


def pad_to_bucket(tokens, targets, buckets):
    length = tokens.shape[1]
    missing = min(bucket for bucket in buckets if bucket >= length) - length
    return F.pad(tokens, (0, missing)), F.pad(targets, (0, missing))
