"""Planted mistakes of A small lab for the tests of grading, question by question."""

from dlo_lib.grading.lab.mutants import Mutant

MUTANTS = [
    # -- scale
    Mutant(
        "The largest element is taken without its absolute value",
        "check_largest",
        says="off by up to",
        replace={"return x.float().abs().amax(dim=1) / 127": "return x.float().amax(dim=1) / 127"},
    ),
    Mutant(
        "The scale is computed in the dtype of x: rounded when x is bfloat16",
        "check_scale_dtype",
        says="expected float32",
        replace={"return x.float().abs().amax(dim=1) / 127": "return x.abs().amax(dim=1) / 127"},
    ),
    # -- quantise
    Mutant(
        "Values are cut instead of rounded",
        "check_round_trip",
        says="more than half a step",
        replace={
            "return torch.round(x / safe[:, None]).to(torch.int8), scale": """
            return (x / safe[:, None]).to(torch.int8), scale
            """,
        },
    ),
    Mutant(
        "A row of zeros is filled with ones instead of zeros",
        "check_row_of_zeros",
        says="must stay zeros",
        answer="""
        def quantise(x):
            scale = absmax_scale(x)
            return torch.round(torch.where(scale[:, None] == 0, 1.0, x / scale[:, None])).to(torch.int8), \
scale
        """,
    ),
    # -- mean
    Mutant(
        "The sum is divided by two, whatever the number of ranks",
        "check_three_ranks",
        says="of 3",
        replace={"return total / dist.get_world_size()": "return total / 2"},
    ),
]
