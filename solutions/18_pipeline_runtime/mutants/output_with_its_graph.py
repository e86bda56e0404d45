"""The output goes away with the graph behind it."""

QUESTION = "stage"
LOSES = 1
FAILS = "check_output_without_graph"
SAYS = "so detach()"


def stage_forward(stage, kept, i, x, loss=None):
    x = x.detach().requires_grad_(x.is_floating_point())
    output = stage(x) if loss is None else loss(stage(x))
    kept[i] = x, output
    return output


def stage_backward(kept, i, grad=None):
    x, output = kept.pop(i)
    output.backward(grad)
    return x.grad
