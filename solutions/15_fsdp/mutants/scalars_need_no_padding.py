"""A tensor without dimensions is not padded."""

QUESTION = "padding"
LOSES = 1
FAILS = "check_padding_of_scalars"
SAYS = "one row of one number"


def padding(shapes: list[tuple[int, ...]], world: int) -> tuple[int, int]:
    flat = -sum(math.prod(shape) for shape in shapes) % world
    return flat, sum((-math.prod(shape[:1]) % world) * math.prod(shape[1:]) for shape in shapes if shape)
