"""Only the last result is written, and all of `sizes` that has no operation is read."""

QUESTION = "traffic"
LOSES = 1
FAILS = "check_kept_results"
SAYS = "writes every tensor that is asked for"


def eager_bytes(operations, sizes, itemsize):
    return itemsize * sum(sizes[name] for result, operands in operations for name in {result, *operands})


def fused_bytes(operations, sizes, outputs, itemsize):
    read = {name for _, operands in operations for name in operands} - {result for result, _ in operations}
    return itemsize * (sum(sizes[name] for name in read) + sizes[operations[-1][0]])
