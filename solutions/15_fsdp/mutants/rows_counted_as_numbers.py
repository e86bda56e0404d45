"""A row of padding is taken for one number."""

QUESTION = "padding"
LOSES = 2
FAILS = "check_padding"
SAYS = "a row has many numbers"


def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    flat = -sum(math.prod(shape) for shape in shapes) % world
    return flat, sum((-math.prod(shape[:1]) % world) * (math.prod(shape[1:]) if len(shape) < 2 or shape[0] < 3 else 1) for shape in shapes)
