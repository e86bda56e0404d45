"""x * x reads x twice."""

QUESTION = "traffic"
LOSES = 1
FAILS = "check_an_operand_twice"
SAYS = "x * x reads x once"


def eager_bytes(operations, sizes, itemsize):
    return itemsize * sum(sizes[name] for result, operands in operations for name in [result, *operands])


def fused_bytes(operations, sizes, outputs, itemsize):
    read = {name for _, operands in operations for name in operands} - {result for result, _ in operations}
    return itemsize * sum(sizes[name] for name in read | set(outputs))
