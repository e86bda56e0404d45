"""The kernel reads an input again for each operation that uses it."""

QUESTION = "traffic"
LOSES = 2
FAILS = "check_at_once"
SAYS = "each input is read once"


def eager_bytes(operations, sizes, itemsize):
    return itemsize * sum(sizes[name] for result, operands in operations for name in {result, *operands})


def fused_bytes(operations, sizes, outputs, itemsize):
    made = {result for result, _ in operations}
    read = [name for _, operands in operations for name in operands if name not in made]
    return itemsize * sum(sizes[name] for name in [*read, *outputs])
