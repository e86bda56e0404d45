"""The scale is computed in the dtype of x: rounded when x is bfloat16."""

QUESTION = "scale"
LOSES = 1
FAILS = "check_scale_dtype"
SAYS = "expected float32"


def absmax_scale(x):
    return x.abs().amax(dim=1) / 127
