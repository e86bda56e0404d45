"""Every operand is taken to be as large as the result; a bias is smaller."""

QUESTION = "traffic"
LOSES = 1
FAILS = "check_one_by_one"
SAYS = "read the operands, write the result"


def eager_bytes(operations, sizes, itemsize):
    return itemsize * sum(sizes[result] * len({result, *operands}) for result, operands in operations)


def fused_bytes(operations, sizes, outputs, itemsize):
    read = {name for _, operands in operations for name in operands} - {result for result, _ in operations}
    return itemsize * sum(sizes[name] for name in read | set(outputs))
