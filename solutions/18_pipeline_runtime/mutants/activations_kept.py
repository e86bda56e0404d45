"""What a micro-batch has kept stays when its backward is done."""

QUESTION = "stage"
LOSES = 1
FAILS = "check_stage_memory"
SAYS = "Take out of"


def stage_forward(stage, kept, i, x, loss=None):
    x = x.detach().requires_grad_(x.is_floating_point())
    output = stage(x) if loss is None else loss(stage(x))
    kept[i] = x, output
    return output.detach()


def stage_backward(kept, i, grad=None):
    x, output = kept[i]
    output.backward(grad)
    return x.grad
