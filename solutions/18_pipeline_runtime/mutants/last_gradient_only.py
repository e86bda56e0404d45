"""The gradients of a micro-batch replace those of the one before."""

QUESTION = "stage"
LOSES = 1
FAILS = "check_micro_batches_apart"
SAYS = "do not replace it"


def stage_forward(stage, kept, i, x, loss=None):
    x = x.detach().requires_grad_(x.is_floating_point())
    output = stage(x) if loss is None else loss(stage(x))
    kept[i] = stage, x, output
    return output.detach()


def stage_backward(kept, i, grad=None):
    stage, x, output = kept.pop(i)
    stage.zero_grad()
    output.backward(grad)
    return x.grad
